"""Compiled steps under a budget beside torch's own ``activation_memory_budget``.

One thread. The whole step is compiled, its loss included. Peaks are true ones by the profiler above weights and inputs,
as shares of the plain compiled step's; times are medians of thread time over rounds in which all of an engine take
turns. ``aot_eager`` runs its graphs op by op, ``inductor`` compiles them. For each value of torch's setting the same
net runs under a budget of the peak that torch reached.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Benchmark, table
from benchmarks.nets import gpt2, net_r, net_rn18, transformer, vision
from benchmarks.steps import in_turns, keep_freed_memory, step_peak_bytes
from ctdr_lightning.basics.torch_compiler import aot_config
from ctdr_lightning.memory.compiled.backend import CompileBackend
from ctdr_lightning.memory.values.tensors import storage_bytes

NETS: dict[str, Callable[[], Any]] = {
    "R": net_r,
    "T": transformer,
    "RN18": net_rn18,
    "GPT-2": gpt2,
    "ResNet-50": partial(vision, "resnet50"),
}
SETTINGS = (0.7, 0.5, 0.3)
SHARES = (0.8, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True)
class Row:
    """One way to compile one net.

    Attributes:
        net: Its name.
        engine: ``"aot_eager"`` or ``"inductor"``.
        way: The plain step, torch's setting, or a budget.
        plain_bytes: Peak of the plain compiled step.
        peak: True peak over it.
        predicted: Predicted peak over it; 0 where none was.
        slowdown: Time over the plain compiled step's.
        gradients: Relative difference of all gradients from the plain compiled step's.
        compile_s: Seconds until the first step was over.
    """

    net: str
    engine: str
    way: str
    plain_bytes: int
    peak: float
    predicted: float
    slowdown: float
    gradients: float
    compile_s: float


@dataclass
class _Way:
    name: str
    run: Callable[[], None]
    compile_s: float
    peak_bytes: int
    gradients: Tensor
    predicted_bytes: int = 0


class _Compiled:
    """The ways to compile one net by one engine."""

    def __init__(self, name: str, engine: str) -> None:
        self.net, self.inputs, self._step = NETS[name]()
        self.engine = engine
        self.standing_bytes = storage_bytes((*self.net.parameters(), *self.net.buffers(), self.inputs))

    def way(self, name: str, backend: Any) -> _Way:
        """Compile by a backend, and run."""
        step = torch.compile(partial(self._step, self.net, self.inputs), backend=backend)
        start_s = perf_counter()
        gradients = _gradients(self.net, lambda: step().backward())
        seconds = perf_counter() - start_s
        peak_bytes = step_peak_bytes(self.net, lambda: step().backward())
        return _Way(name, lambda: _step_of(self.net, step), seconds, peak_bytes, gradients)

    def by_torch(self, setting: float) -> _Way:
        """Under torch's setting."""
        with aot_config.patch(activation_memory_budget=setting):
            # Another function for dynamo, which would take the graph that it has.
            return self.way(f"torch's {setting}", _alike(self.engine))

    def planned(self, name: str, peak_bytes: int) -> _Way | None:
        """Under a budget; None where no plan fits."""
        backend = CompileBackend(self.standing_bytes + peak_bytes, engine=self.engine)
        try:
            found = self.way(name, backend)
        except Exception as error:
            if "fits the budget" not in str(error):
                raise
            return None
        found.predicted_bytes = backend.peak_bytes - self.standing_bytes
        return found


def _alike(engine: str) -> Callable[..., Any]:
    def compiled(gm: Any, inputs: Any) -> Any:
        return torch._dynamo.lookup_backend(engine)(gm, inputs)  # type: ignore[no-any-return]

    return compiled


def _step_of(net: nn.Module, step: Callable[[], Tensor]) -> None:
    net.zero_grad(set_to_none=True)
    step().backward()


def _gradients(net: nn.Module, run: Callable[[], None]) -> Tensor:
    torch.manual_seed(1)
    net.zero_grad(set_to_none=True)
    run()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def measured(name: str, engine: str, settings: Sequence[float], shares: Sequence[float], rounds: int) -> Iterator[Row]:
    """Every way to compile one net by one engine."""
    torch._dynamo.reset()
    compiled = _Compiled(name, engine)
    plain = compiled.way("plain", engine)
    ways: list[_Way | None] = [plain]
    for setting in settings:
        theirs = compiled.by_torch(setting)
        ways += [theirs, compiled.planned(f"budget of torch's {setting}", theirs.peak_bytes)]
    ways += [compiled.planned(f"budget {share}", int(share * plain.peak_bytes)) for share in shares]
    found = [way for way in ways if way is not None]
    times = [thread_s for _, thread_s in in_turns([way.run for way in found], rounds, warm_up=True)]
    for way, seconds in zip(found, times, strict=True):
        difference = float((way.gradients - plain.gradients).norm() / plain.gradients.norm())
        peak, predicted = (n_bytes / plain.peak_bytes for n_bytes in (way.peak_bytes, way.predicted_bytes))
        slowdown = seconds / times[0]
        yield Row(name, engine, way.name, plain.peak_bytes, peak, predicted, slowdown, difference, way.compile_s)


def figures(
    *,
    nets: Sequence[str] = ("R", "T", "RN18", "GPT-2"),
    engines: Sequence[str] = ("aot_eager", "inductor"),
    settings: Sequence[float] = SETTINGS,
    shares: Sequence[float] = SHARES,
    rounds: int = 9,
) -> Iterator[Row]:
    """Every net by every engine.

    Args:
        nets: Their names.
        engines: Names of engines.
        settings: Values of torch's ``activation_memory_budget``.
        shares: Budgets as shares of the plain compiled peak.
        rounds: Behind each time.
    """
    keep_freed_memory()
    torch._dynamo.config.recompile_limit = 64  # one function is compiled in every way
    for name in nets:
        for engine in engines:
            yield from measured(name, engine, settings, shares, rounds)


def _line(row: Row) -> str:
    predicted = f"{row.predicted:.3f}" if row.predicted else ""
    same = "0" if not row.gradients else f"{row.gradients:.0e}"
    return (
        f"{row.net}, {row.engine}: {row.way} | {row.peak:.3f} | {predicted} | x{row.slowdown:.2f} | {same} | "
        f"{row.compile_s:.0f} s"
    )


TABLE = table(Row, "net, engine: way | peak | predicted | time | gradients differ by | compiled in", _line)
BENCHMARK = Benchmark(
    "compiled",
    figures,
    {"rows": Row},
    {"table": TABLE},
    choices={"nets": NETS, "engines": ("aot_eager", "inductor")},
    key=("net", "engine", "way"),
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
