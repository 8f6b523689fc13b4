"""What moving and compressing saved tensors gives: peaks and times, measured.

    python -m benchmarks.offload                  # all tables
    python -m benchmarks.offload disk --nets BIG  # recomputation, and that and a disk, at shares of the peak
    python -m benchmarks.offload codecs           # exact codecs alone, on published nets with dropout or pooling

Peaks are the allocator's (the profiler's memory events), plus the disk's staging buffers, which torch does not
allocate. Times are of one process on one thread, plain step and plan in turns: *wall* of the step, and
*processor* of the stepping thread alone. All plans are compared with the plain step to the bit.
``FOLDER/offload.json`` keeps the figures, and ``benchmarks.documents`` makes tables of a committed copy of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.figures import markdown, rows_of, write_figures
from benchmarks.nets import Attention, Net, net_r, net_rn18, net_t, vision
from benchmarks.peak import keep_freed_memory, step_peak_bytes
from benchmarks.vision_import import import_torchvision
from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.units import MIB
from ctdr_lightning.memory import Plan, Tape, Trace, plan, record, simulate
from ctdr_lightning.memory.holders.base import HolderOptions, Holders
from ctdr_lightning.memory.holders.measure import measure_codecs, measure_links
from ctdr_lightning.memory.search.together import free_codecs

# With three rounds T5's codecs took x.96 in one run and x1.17 in another.
ROUNDS = 7
BOTH = "auto, with a disk"


def big() -> Net:
    """BIG: five transformer blocks of width 256 on 32 x 128 tokens."""
    torch.manual_seed(0)
    return nn.Sequential(*[Attention(256) for _ in range(5)]), torch.randn(32, 128, 256), lambda net, x: net(x).sum()


def vit() -> Net:
    """A small vision transformer with dropout of 0.1."""
    torch.manual_seed(0)
    make = import_torchvision().models.VisionTransformer
    net = make(image_size=64, patch_size=8, num_layers=3, num_heads=4, hidden_dim=128, mlp_dim=512, dropout=0.1)
    return net, torch.randn(8, 3, 64, 64), lambda net, x: net(x).sum()


def bert() -> Net:
    """A small BERT; attention and hidden dropout are 0.1."""
    import_torchvision()
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 512}
    net = BertModel(BertConfig(vocab_size=500, **sizes))
    return net, torch.randint(0, 500, (8, 128)), lambda net, x: net(x).last_hidden_state.square().mean()


def t5() -> Net:
    """A small T5; dropout is 0.1."""
    import_torchvision()
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    net = T5ForConditionalGeneration(
        T5Config(vocab_size=500, d_model=128, d_ff=512, num_layers=3, num_heads=4, d_kv=32, decoder_start_token_id=0)
    )
    return net, torch.randint(0, 500, (8, 128)), lambda net, x: net(x, labels=x).loss


# The nets of the disk's table, and the shares of their peak above the weights that are asked for.
DISK_NETS: dict[str, tuple[Callable[[], Net], tuple[float, ...]]] = {
    "T": (net_t, (0.3,)),
    "R": (net_r, (0.3,)),
    "RN18": (net_rn18, (0.7, 0.5, 0.4)),
    "BIG": (big, (0.5, 0.7, 0.4)),
}
CODEC_NETS: dict[str, Callable[[], Net]] = {
    "ViT": vit,
    "T5": t5,
    "BERT": bert,
    "GoogLeNet": lambda: vision("googlenet", size=96, aux_logits=False, init_weights=False),
    "VGG-16": lambda: vision("vgg16", batch=16, size=224),  # on fewer or smaller images its gradients set the peak
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured of a plan.

    Attributes:
        plain_bytes: Measured peak of the plain step, weights and inputs included.
        peak_bytes: Measured peak under the plan.
        predicted_bytes: Simulated peak.
        wall: Measured time over that of the plain step.
        processor: The same of the stepping thread alone.
        predicted: Simulated time over that of the plain step.
        moved_bytes: Bytes that leave the device.
        equal: Whether every gradient is the plain step's, to the bit.
    """

    plain_bytes: int = 0
    peak_bytes: int = 0
    predicted_bytes: int = 0
    wall: float = 0.0
    processor: float = 0.0
    predicted: float = 0.0
    moved_bytes: int = 0
    equal: bool = True


@dataclass(frozen=True)
class Row(Measured):
    """One plan, as it was measured.

    Attributes:
        net: The net.
        plan: What made it.
        share: Its budget, as a share of the plain peak above the weights; 0 where none was given.
        fits: Whether a plan was found.
        resident_bytes: Weights and inputs.
    """

    net: str
    plan: str
    share: float
    fits: bool = True
    resident_bytes: int = 0


class Case:
    """A net and its step, with the plain step's trace and gradients.

    Args:
        made: The net, its inputs and its step.
        n_rounds: How often each plan is timed.
    """

    def __init__(self, made: Net, n_rounds: int) -> None:
        self.net, self.inputs, self._step = made
        self.n_rounds = n_rounds
        self.net.train()
        self.want = self.run()
        self.net.zero_grad(set_to_none=True)  # or they would stand in the recorded step, and be added to
        self.trace = record(lambda: self._step(self.net, self.inputs))
        held = (*self.net.parameters(), *self.net.buffers(), self.inputs)
        # Of the net itself, as the trace also counts constants that a step makes: those of T5 would count twice.
        self.resident_bytes = sum(tensor.nbytes for tensor in held)

    def step(self, made: Plan | None = None, holders: Holders | None = None) -> None:
        """One step, plain or under a plan."""
        torch.manual_seed(1)
        self.net.zero_grad(set_to_none=True)
        if made is None:
            self._step(self.net, self.inputs).backward()
        else:
            with Tape(made, holders=holders):
                loss = self._step(self.net, self.inputs)
            loss.backward()

    def run(self, made: Plan | None = None, holders: Holders | None = None) -> list[Tensor]:
        """The same; returns copies of its gradients, which take memory and time of their own."""
        self.step(made, holders)
        return [p.grad.clone() for p in self.net.parameters() if p.grad is not None]


def times(steps: list[Callable[[], object]], n_rounds: int) -> list[tuple[float, float]]:
    """Median wall and processor seconds of each step, run in turns after one round to warm up."""
    taken: list[list[tuple[float, float]]] = [[] for _ in steps]
    for round_number in range(n_rounds + 1):
        for step, found in zip(steps, taken, strict=True):
            wall_s, thread_s = time.perf_counter(), time.thread_time()
            step()
            if round_number:
                found.append((time.perf_counter() - wall_s, time.thread_time() - thread_s))
    return [(median(w for w, _ in found), median(t for _, t in found)) for found in taken]


def measured(case: Case, plans: Sequence[Plan], holders: Holders) -> Iterator[Measured]:
    """The plain step and plans in turns, then their peaks and gradients."""
    (wall_s, thread_s), *taken = times(
        [case.step, *(partial(case.step, made, holders) for made in plans)], case.n_rounds
    )
    resident = case.resident_bytes
    plain_bytes = step_peak_bytes(case.net, case.step) + resident  # only now: oneDNN's caches are warm for all
    for made, (its_wall_s, its_thread_s) in zip(plans, taken, strict=True):
        staging = sum(link.device_bytes for link in case.trace.links if any_to(made, link.to))
        yield Measured(
            plain_bytes=plain_bytes,
            peak_bytes=step_peak_bytes(case.net, partial(case.step, made, holders)) + staging + resident,
            predicted_bytes=made.peak_bytes,
            wall=its_wall_s / wall_s,
            processor=its_thread_s / thread_s,
            predicted=made.seconds / case.trace.seconds,
            moved_bytes=made.timeline.transfers.moved_bytes,
            equal=all(torch.equal(a, b) for a, b in zip(case.run(made, holders), case.want, strict=True)),
        )


def rows_under(case: Case, name: str, share: float, plans: dict[str, Plan], holders: Holders) -> Iterator[Row]:
    """A row for each plan of a net."""
    resident = case.resident_bytes
    for plan_name, found in zip(plans, measured(case, list(plans.values()), holders), strict=True):
        yield Row(name, plan_name, share, resident_bytes=resident, **vars(found))


def any_to(made: Plan, holder: str) -> bool:
    """Whether a plan sends anything to a holder."""
    return any(getattr(action, "to", None) == holder for action in made.away.values())


def disk_rows(name: str, folder: Path, n_rounds: int) -> Iterator[Row]:
    """Recomputation alone, and `auto` with a disk besides, at shares of a net's peak above its weights."""
    make, shares = DISK_NETS[name]
    case = Case(make(), n_rounds)
    plain, options = case.trace, HolderOptions(folder=folder)
    with_disk = plain.with_machine(measure_links(["disk"], options))
    for share in shares:
        budget = plain.resident_bytes + int(share * (simulate(plain).peak_bytes - plain.resident_bytes))
        found = {"auto": _made(plain, budget), BOTH: _made(with_disk, budget)}
        case.trace = with_disk
        holders = Holders(options)
        yield from (Row(name, policy, share, fits=False) for policy, made in found.items() if made is None)
        yield from rows_under(case, name, share, {k: made for k, made in found.items() if made is not None}, holders)
        holders.close()


def _made(trace: Trace, budget: int) -> Plan | None:
    try:
        return plan(trace, budget)
    except InfeasibleBudgetError:
        return None


def codec_rows(name: str, folder: Path, n_rounds: int) -> Iterator[Row]:
    """Exact codecs alone: nothing is recomputed, nothing moved."""
    case = Case(CODEC_NETS[name](), n_rounds)
    case.trace = case.trace.with_machine(codecs=measure_codecs())
    free = free_codecs(case.trace)
    made = plan(case.trace, policy=lambda step, budget: free)
    yield from rows_under(case, name, 0.0, {"codecs alone": made}, Holders(HolderOptions(folder=folder)))


def disk_table(text: str) -> str:
    """Recomputation and disk, of an ``offload.json``, as a Markdown table."""
    found = [row for row in rows_of(text, "rows", Row) if row.share]
    head = ["net, budget", "plan", "peak (predicted)", "wall", "processor", "predicted", "moved"]
    return markdown(text, [head, *map(_disk_line, found)])


def _disk_line(row: Row) -> list[str]:
    who = [f"{row.net}, {row.share:g}", row.plan]
    if not row.fits:
        return [*who, "none found", "", "", "", ""]
    peak = f"{row.peak_bytes / row.plain_bytes:.3f} ({row.predicted_bytes / row.plain_bytes:.3f})"
    return [*who, peak, *_times(row), f"{row.moved_bytes / MIB:.0f} MiB"]


def codec_table(text: str) -> str:
    """Exact codecs alone, of an ``offload.json``, as a Markdown table."""
    found = [row for row in rows_of(text, "rows", Row) if not row.share]
    head = ["net", "peak above weights", "peak (predicted)", "wall", "processor", "predicted"]
    return markdown(text, [head, *map(_codec_line, found)])


def _codec_line(row: Row) -> list[str]:
    above = (row.peak_bytes - row.resident_bytes) / (row.plain_bytes - row.resident_bytes)
    peak = f"{row.peak_bytes / row.plain_bytes:.3f} ({row.predicted_bytes / row.plain_bytes:.3f})"
    return [row.net, f"{above:.3f}", peak, *_times(row)]


def _times(row: Row) -> list[str]:
    return [f"x{times:.3f}" for times in (row.wall, row.processor, row.predicted)]


def rows(tables: list[str], nets: list[str], folder: Path, n_rounds: int) -> Iterator[Row]:
    """The rows that were asked for."""
    for table, of_table, made in (("codecs", CODEC_NETS, codec_rows), ("disk", DISK_NETS, disk_rows)):
        for name in of_table if table in tables else ():
            if not nets or name in nets:
                yield from made(name, folder, n_rounds)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the figures; a run adds to those that the file holds already."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="*", choices=["disk", "codecs", []], help="which tables; all by default")
    parser.add_argument("--nets", nargs="+", default=[], choices=[*CODEC_NETS, *DISK_NETS], help="all by default")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", type=Path, default=Path("outputs/offload"))
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="where the disk's file is")
    options = parser.parse_args(arguments)
    keep_freed_memory()
    torch.set_num_threads(1)
    file = options.folder / "offload.json"
    known = {_key(row): row for row in (rows_of(file.read_text(), "rows", Row) if file.exists() else [])}
    for row in rows(options.tables or ["codecs", "disk"], options.nets, options.disk, options.rounds):
        print(row, flush=True)
        known[_key(row)] = row
        write_figures(file, rows=list(known.values()))
    return 0 if all(row.equal for row in known.values()) else 1


def _key(row: Row) -> tuple[str, str, float]:
    return row.net, row.plan, row.share


if __name__ == "__main__":
    sys.exit(main())
