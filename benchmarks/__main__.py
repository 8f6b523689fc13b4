"""Every benchmark, one after the other, each in a process of its own: ``make bench``.

    python -m benchmarks engine decompose   # some; all on fewer nets and in fewer rounds than the documents' tables
    python -m benchmarks --full             # with the settings of the documents' tables: hours

``FOLDER/bench.json`` keeps the machine, the versions, and for each benchmark its day, command, lines, seconds and how
it ended. It is written after each one; others that ran on the same machine with the same versions stay in it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.harness import machine
from ctdr_lightning.basics.files import write_text

# Peers are in the first two: torch's checkpoint, checkpoint_sequential and memory budget in "policies", tensorly's
# solvers in "decompose".
# The arguments leave out the large nets and most rounds, with which all take hours; --full leaves the arguments out.
TABLES: dict[str, tuple[str, ...]] = {
    "policies": ("R", "--rounds", "3"),
    "decompose": ("--size", "256", "--rounds", "1"),
    "engine": ("--random", "3", "--repeats", "10"),
    "promise": ("--rounds", "3"),
    "ablation": ("means", "fixed", "--nets", "LeNet", "AlexNet"),
    "joint": ("--nets", "D", "--rounds", "3"),
    "one_number": ("--nets", "C", "--shares", "0.7", "0.5", "--rounds", "3"),
    "new_user": ("--jobs", "U-Net", "--shares", "0.55"),
    "logits": ("--models", "gpt2", "--words", "8000", "--rounds", "3"),
    "tiles": ("--nets", "LeNet", "AlexNet"),
    "sharded": ("--kinds", "h100", "--cards", "8", "--layers", "2", "--depths", "2"),
    "gathers": ("MLP", "--shares", "1.05", "--rounds", "5"),
    "compiled": ("--nets", "T", "--engines", "aot_eager", "--settings", "0.5", "--shares", "0.5", "--rounds", "3"),
    "gpu": ("battery", "--small"),
    "planner": ("--nets", "R", "T", "RN18", "--shares", "0.8", "0.5", "0.4"),
    "planning_time": (),
    "step_time": ("R", "T", "--rounds", "5"),
    "trials": (),
    "cards": ("--networks", "ResNet-50", "--cards", "rtx4090"),
    "alternatives": ("--nets", "GPT", "--rounds", "3"),
    "bounds": ("--nets", "R", "--time-limit", "3"),
    "offload": ("--nets", "T", "R", "BERT", "GoogLeNet", "--rounds", "3"),
    "moving": ("policies", "least", "--nets", "M", "--published", "chain of 16", "--rounds", "2"),
    "digits": ("--seeds", "1"),
    "accuracy_curve": ("--seeds", "1"),
    "recovery": ("scratch", "--seeds", "1"),
    "from_scratch": ("C", "--seeds", "1"),
    "ranks": ("--cases", "C8 V4", "--seeds", "0"),
}


def run(name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Run one benchmark and show what it prints.

    Returns:
        Its day, command, lines, seconds and exit status.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    print(f"\n== {name} ==", flush=True)
    start_s, lines = perf_counter(), []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    return {
        "day": date.today().isoformat(),
        "command": ["python", *command[1:]],
        "lines": lines,
        "seconds": perf_counter() - start_s,
        "status": process.returncode,
    }


def begun(path: Path) -> dict[str, Any]:
    """A file's tables of earlier runs on this machine with these versions; those of other machines are left out."""
    here = machine()
    there = json.loads(path.read_text()) if path.exists() else {}
    return {"machine": here, "tables": there["tables"] if there.get("machine") == here else {}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for.

    Returns:
        1 where a benchmark failed.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Every benchmark, one after the other.")
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="all by default")
    parser.add_argument("--folder", type=Path, default=Path("outputs/bench"))
    parser.add_argument("--full", action="store_true", help="with the settings of the documents' tables")
    parser.add_argument("--list", action="store_true", help="say which there are")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(TABLES))
        return 0
    path, asked = options.folder / "bench.json", options.tables or list(TABLES)
    found = begun(path)
    for name in asked:
        found["tables"][name] = run(name, () if options.full else TABLES[name])
        write_text(path, json.dumps(found, indent=1) + "\n")
    failed = [name for name in asked if found["tables"][name]["status"]]
    print(f"\n{path}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
