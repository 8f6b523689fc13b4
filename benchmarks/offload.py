"""What moving and compressing saved tensors gives: peaks and times, measured.

    python -m benchmarks.offload            # all tables
    python -m benchmarks.offload big        # recomputation, disk and both, at half the peak of a large step
    python -m benchmarks.offload codecs     # exact codecs alone, on published nets with dropout or pooling

Peaks are the allocator's (the profiler's memory events), plus the disk's staging buffers, which torch does not
allocate. Times are of one process on one thread, plain step and plan in turns: *wall* of the step, and
*processor* of the stepping thread alone. All plans are compared with the plain step to the bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.nets import Attention, Net, vision
from benchmarks.peak import keep_freed_memory, step_peak_bytes
from benchmarks.vision_import import import_torchvision
from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.memory import Plan, Tape, Trace, plan, record, simulate
from ctdr_lightning.memory.holders.base import HolderOptions, Holders
from ctdr_lightning.memory.holders.measure import measure_codecs, measure_links
from ctdr_lightning.memory.search.together import free_codecs

ROUNDS = 3


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


CODEC_NETS: dict[str, Callable[[], Net]] = {
    "ViT": vit,
    "T5": t5,
    "BERT": bert,
    "GoogLeNet": lambda: vision("googlenet", size=96, aux_logits=False, init_weights=False),
    "VGG-16": lambda: vision("vgg16"),
}


class Case:
    """A net and its step, with the plain step's trace and gradients."""

    def __init__(self, made: Net) -> None:
        self.net, self.inputs, self._step = made
        self.net.train()
        self.want = self.run()
        self.net.zero_grad(set_to_none=True)  # or they would stand in the recorded step, and be added to
        self.trace = record(lambda: self._step(self.net, self.inputs))

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


def times(steps: list[Callable[[], object]]) -> list[tuple[float, float]]:
    """Median wall and processor seconds of each step, run in turns."""
    taken: list[list[tuple[float, float]]] = [[] for _ in steps]
    for round_number in range(ROUNDS + 1):
        for step, found in zip(steps, taken, strict=True):
            wall_s, thread_s = time.perf_counter(), time.thread_time()
            step()
            if round_number:
                found.append((time.perf_counter() - wall_s, time.thread_time() - thread_s))
    return [(median(w for w, _ in found), median(t for _, t in found)) for found in taken]


def rows(case: Case, plans: dict[str, Plan], holders: Holders) -> Iterator[str]:
    """A line for each plan: peaks and times as shares of the plain step's, bytes moved, whether gradients agree."""

    def runner(made: Plan | None) -> Callable[[], object]:
        return lambda: case.step(made, holders)

    resident = case.trace.resident_bytes
    measured = times([runner(None), *map(runner, plans.values())])
    plain_peak = step_peak_bytes(case.net, runner(None))  # only now: oneDNN's caches are warm for all
    whole = plain_peak + resident
    yield f"  plain: measured {format_bytes(whole)}, of it {format_bytes(resident)} weights and inputs"
    for (name, made), (wall_s, thread_s) in zip(plans.items(), measured[1:], strict=True):
        same = all(torch.equal(a, b) for a, b in zip(case.run(made, holders), case.want, strict=True))
        staging = sum(link.device_bytes for link in case.trace.links if any_to(made, link.to))
        peak = step_peak_bytes(case.net, runner(made)) + staging
        moved = made.timeline.transfers.moved_bytes
        plain_s, plain_thread_s = measured[0]
        yield (
            f"  {name:17} peak x{(peak + resident) / whole:.3f} (simulated x{made.peak_bytes / whole:.3f}), "
            f"above weights x{peak / plain_peak:.3f}; wall x{wall_s / plain_s:.3f}, processor "
            f"x{thread_s / plain_thread_s:.3f} (simulated x{made.seconds / case.trace.seconds:.3f}); "
            f"moved {format_bytes(moved)}; gradients {'equal' if same else 'DIFFER'}"
        )


def any_to(made: Plan, holder: str) -> bool:
    """Whether a plan sends anything to a holder."""
    return any(getattr(action, "to", None) == holder for action in made.away.values())


def with_machine(trace: Trace, folder: Path) -> Trace:
    """The trace with this machine's disk and exact codecs."""
    return trace.with_machine(measure_links(["disk"], HolderOptions(folder=folder)), measure_codecs())


def table_big(folder: Path, share: float) -> None:
    """Recomputation alone, disk and recomputation together, at a share of BIG's peak."""
    case = Case(big())
    budget = int(share * simulate(case.trace).peak_bytes)
    plans = {"recompute (auto)": plan(case.trace, budget)}
    case.trace = with_machine(case.trace, folder)
    print(f"BIG at {share} of its peak; disk {case.trace.links[0].out_bytes_per_s / 1e9:.2f} GB/s out,", end=" ")
    print(f"{case.trace.links[0].in_bytes_per_s / 1e9:.2f} GB/s back", flush=True)
    plans["together (disk)"] = plan(case.trace, budget, "together")
    holders = Holders(HolderOptions(folder=folder))
    for row in rows(case, plans, holders):
        print(row, flush=True)
    holders.close()


def table_codecs(folder: Path) -> None:
    """Exact codecs alone: nothing is recomputed, nothing moved."""
    for name, make in CODEC_NETS.items():
        case = Case(make())
        case.trace = case.trace.with_machine(codecs=measure_codecs())
        free = free_codecs(case.trace)
        made = plan(case.trace, policy=lambda trace, budget, free=free: free)  # type: ignore[misc]
        print(f"{name}: exact codecs on {len(made.away)} of {len(case.trace.saved)} saved values")
        for row in rows(case, {"codecs alone": made}, Holders(HolderOptions(folder=folder))):
            print(row, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(description="Moving and compressing saved tensors, measured.")
    parser.add_argument("tables", nargs="*", choices=["big", "codecs", []], help="which tables; all by default")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the disk's file is")
    parser.add_argument("--share", type=float, default=0.5, help="budget as a share of BIG's peak")
    options = parser.parse_args(arguments)
    keep_freed_memory()
    torch.set_num_threads(1)
    if not options.tables or "codecs" in options.tables:
        table_codecs(options.folder)
    if not options.tables or "big" in options.tables:
        table_big(options.folder, options.share)
    return 0


if __name__ == "__main__":
    sys.exit(main())
