"""Every policy that moves or compresses tensors, on a link of a chosen rate: measured peak, time and bytes moved.

    python -m benchmarks.moving             # all policies on a transformer and a ResNet, `auto` at four rates
    python -m benchmarks.moving policies --nets M

A processor's steps are so slow that any disk looks infinitely fast. So a file, in memory where the system has a place
for such files, is slowed down to a *ratio*: 1 moves all that autograd saves, one way, in the time of one step. Each
policy is given the smallest of ``SHARES`` of the plain peak that it can meet. Peaks are the allocator's, with the
staging buffers; times are of one thread, plain step and plan in turns; gradients are compared with the plain step's to
the bit. ``FOLDER/moving.json`` keeps the figures, and ``benchmarks.documents`` makes tables of a committed copy of it.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.figures import markdown, rows_of, write_figures
from benchmarks.nets import Attention, Net, net_rn18
from benchmarks.offload import ROUNDS, Case, Measured, measured
from benchmarks.peak import keep_freed_memory
from ctdr_lightning.basics.errors import CTDRError
from ctdr_lightning.basics.units import MIB
from ctdr_lightning.memory import POLICIES, Plan, plan, simulate
from ctdr_lightning.memory.holders.base import HolderOptions, Holders
from ctdr_lightning.memory.holders.measure import measure_codecs, measure_links
from ctdr_lightning.memory.plans.actions import Compress, Offload

SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
RATIOS = (0.25, 0.5, 1.0, 2.0)
POLICY_FILES = Path(__file__).parents[1] / "ctdr_lightning" / "memory" / "policies"


def net_m() -> Net:
    """M: four transformer blocks of width 384 on 8 x 128 tokens."""
    torch.manual_seed(0)
    return nn.Sequential(*[Attention(384) for _ in range(4)]), torch.randn(8, 128, 384), lambda net, x: net(x).sum()


NETS: dict[str, Callable[[], Net]] = {"M": net_m, "RN18": lambda: net_rn18(8)}


@dataclass(frozen=True)
class Row(Measured):
    """One plan, as it was measured.

    Attributes:
        net: The net.
        policy: The policy.
        ratio: Rate of the link: 1 moves all saved bytes, one way, in the time of a step.
        share: Its budget, as a share of the plain peak; 0 where it met none of those tried.
    """

    net: str
    policy: str
    ratio: float
    share: float


def _in_memory() -> Path:
    """A folder whose files are in memory, where there is one."""
    return Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


def moving_policies() -> list[str]:
    """Every registered policy that can move or compress."""
    return [name for name, policy in POLICIES.items() if policy.uses & {Offload, Compress}]


class Bench:
    """One net on a slowed-down disk.

    Args:
        name: In ``NETS``.
        folder: Where the disk's file is.
        n_rounds: How often each plan is timed.
    """

    def __init__(self, name: str, folder: Path, n_rounds: int) -> None:
        self.name = name
        self.case = Case(NETS[name](), n_rounds)
        self._plain = self.case.trace
        self._options = HolderOptions(folder=folder)
        (self._disk,) = measure_links(["disk"], self._options)
        self._codecs = measure_codecs()

    def slowed(self, ratio: float) -> Holders:
        """The disk at a rate, in the trace and in fact."""
        saved = sum(self._plain.value_bytes(value) for value in self._plain.saved)
        rate = ratio * saved / self._plain.seconds
        link = replace(self._disk, out_bytes_per_s=rate, in_bytes_per_s=rate)
        self.case.trace = self._plain.with_machine([link], self._codecs)
        holders = Holders(self._options)
        disk: Any = holders["disk"]
        disk.rate_bytes_per_s = rate
        return holders

    def made(self, policy: str) -> tuple[float, Plan | None]:
        """The policy's plan for the smallest budget that it meets, and that budget's share."""
        plain = simulate(self.case.trace).peak_bytes
        for share in SHARES:
            try:
                return share, plan(self.case.trace, int(share * plain), policy)
            except CTDRError:
                continue
        return 0.0, None

    def measured(self, policy: str, ratio: float) -> Row:
        """One policy at one rate."""
        holders = self.slowed(ratio)
        share, made = self.made(policy)
        if made is None:
            return Row(self.name, policy, ratio, 0.0)
        row = Row(self.name, policy, ratio, share, **vars(next(measured(self.case, [made], holders))))
        holders.close()
        return row


def rows(nets: list[str], tables: list[str], folder: Path, n_rounds: int) -> Iterator[Row]:
    """Every policy at ratio 1, then `auto` at all ratios."""
    for name in nets:
        bench = Bench(name, folder, n_rounds)
        if "policies" in tables:
            yield from (bench.measured(policy, 1.0) for policy in moving_policies())
        if "ratios" in tables:
            yield from (bench.measured("auto", ratio) for ratio in RATIOS)


def claims() -> dict[str, str]:
    """What each policy's paper claims, from the heads of the files."""
    found = {}
    for path in POLICY_FILES.glob("*.py"):
        source = path.read_text()
        match = re.search(r"^Claimed: (.*(?:\n {4}.*)*)", ast.get_docstring(ast.parse(source)) or "", re.MULTILINE)
        for name in re.findall(r'POLICIES\.register\(\s*"(\w+)"', source) if match else ():
            found[name] = " ".join(match[1].split()).rstrip(".")
    return found


def policy_table(text: str) -> str:
    """The policies' figures of a ``moving.json`` as a Markdown table."""
    found = {(row.net, row.policy): row for row in rows_of(text, "rows", Row) if row.ratio == 1.0}
    head = ["net, policy", "peak (predicted)", "wall (predicted)", "processor", "moved", "its paper claims"]
    said = claims()
    return markdown(text, [head, *(_policy_line(row, said.get(row.policy, "")) for row in found.values())])


def ratio_table(text: str) -> str:
    """The figures of `auto` by the link's rate as a Markdown table."""
    measured = [row for row in rows_of(text, "rows", Row) if row.policy == "auto" and row.plain_bytes]
    found = {(row.net, row.ratio): row for row in measured}
    head = ["net", "rate", "peak (predicted)", "wall", "predicted", "processor", "moved"]
    return markdown(text, [head, *map(_ratio_line, found.values())])


def _policy_line(row: Row, claim: str) -> list[str]:
    who = f"{row.net}, `{row.policy}`"
    if not row.share:
        return [who, f"over {SHARES[-1]:g}", "", "", "", claim]
    wall = f"x{row.wall:.2f} ({row.predicted:.2f})"
    return [who, _peak(row), wall, f"x{row.processor:.2f}", f"{row.moved_bytes / MIB:.0f} MiB", claim]


def _ratio_line(row: Row) -> list[str]:
    times = (f"x{seconds:.3f}" for seconds in (row.wall, row.predicted, row.processor))
    return [row.net, f"{row.ratio:g}", _peak(row), *times, f"{row.moved_bytes / MIB:.0f} MiB"]


def _peak(row: Row) -> str:
    return f"{row.peak_bytes / row.plain_bytes:.2f} ({row.predicted_bytes / row.plain_bytes:.2f})"


def main() -> int:
    """Measure, print and write the figures; a run adds to those that the file holds already."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="*", choices=["policies", "ratios", []], help="which tables; all by default")
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", type=Path, default=Path("outputs/moving"))
    parser.add_argument("--disk", type=Path, default=_in_memory(), help="where the disk's file is")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    file = options.folder / "moving.json"
    known = {_key(row): row for row in (rows_of(file.read_text(), "rows", Row) if file.exists() else [])}
    tables = options.tables or ["policies", "ratios"]
    for row in rows(options.nets, tables, options.disk, options.rounds):
        print(row, flush=True)
        known[_key(row)] = row
        write_figures(file, rows=list(known.values()))
    return 0 if all(row.equal for row in known.values()) else 1


def _key(row: Row) -> tuple[str, str, float]:
    return row.net, row.policy, row.ratio


if __name__ == "__main__":
    sys.exit(main())
