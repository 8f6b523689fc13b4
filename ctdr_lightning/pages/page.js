"use strict";
// Over a chart: the curves' values at the pointer. The numbers stand beside each picture as JSON.
const units = { bytes: ["B", "KiB", "MiB", "GiB", "TiB"] };
function bytes(n) {
  let i = 0;
  while (Math.abs(n) >= 1024 && i < 4) { n /= 1024; i += 1; }
  return n.toFixed(i ? 1 : 0) + " " + units.bytes[i];
}
function number(n) { return Math.abs(n) >= 1000 ? n.toFixed(0) : String(Number(n.toPrecision(4))); }
function shown(value, label) { return label.includes("memory") ? bytes(value) : number(value); }
for (const figure of document.querySelectorAll("figure.chart")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const box = svg.viewBox.baseVal, left = 84, right = 16;
  const tip = figure.appendChild(Object.assign(document.createElement("div"), { className: "tip" }));
  svg.addEventListener("mousemove", (event) => {
    const place = svg.getBoundingClientRect(), px = (event.clientX - place.left) / place.width * box.width;
    const x = data.x[0] + (px - left) / (box.width - left - right) * (data.x[1] - data.x[0]);
    if (px < left || px > box.width - right) { tip.style.display = "none"; return; }
    cursor.setAttribute("x1", px); cursor.setAttribute("x2", px);
    const lines = [data.x_label + " " + number(x)];
    for (const curve of data.curves) {
      let low = 0, high = curve.xs.length - 1;
      while (low < high) { const mid = (low + high + 1) >> 1; if (curve.xs[mid] <= x) low = mid; else high = mid - 1; }
      if (curve.xs.length && x <= curve.xs[curve.xs.length - 1]) lines.push(curve.name + ": " + shown(curve.ys[low], data.y_label));
    }
    tip.textContent = lines.join("\n");
    tip.style.display = "block";
    tip.style.left = Math.min(event.clientX - place.left + 14, place.width - tip.offsetWidth) + "px";
    tip.style.top = (event.clientY - place.top + 30) + "px";
  });
  svg.addEventListener("mouseleave", () => { tip.style.display = "none"; cursor.setAttribute("x1", -9); cursor.setAttribute("x2", -9); });
}
// A click on a column's name sorts by it.
for (const head of document.querySelectorAll("th")) {
  head.addEventListener("click", () => {
    const body = head.closest("table").tBodies[0], column = head.cellIndex, down = head.dataset.down !== "yes";
    const key = (row) => row.cells[column].dataset.sort || row.cells[column].textContent;
    const order = [...body.rows].sort((a, b) => key(a).localeCompare(key(b), "en", { numeric: true }) * (down ? -1 : 1));
    head.dataset.down = down ? "yes" : "no";
    body.append(...order);
  });
}
