"""A backend of ``torch.compile``: ``torch.compile(model, backend="ctdr", options={"memory_budget": "8GiB"})``.

Own work on AOTAutograd's joint graphs: ``activation_memory_budget`` of torch bounds the bytes that are saved, a budget
here bounds the true peak of the compiled step. Left out: values that wait elsewhere or in fewer bytes, and compiled
autograd. Several graphs of one step share the budget in the order in which they are compiled: each may take what those
before it leave.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from ctdr_lightning.basics.devices import memory_bytes_here
from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.basics.units import format_bytes, format_roomy, parse_bytes
from ctdr_lightning.memory.plans.plan import Plan

_ENGINES = ("inductor", "aot_eager")


@dataclass(frozen=True)
class CompiledGraph:
    """One compiled graph, forward and backward.

    Attributes:
        plan: Its plan, on a trace of its joint graph; None where torch's own partition was taken.
        peak_bytes: Peak of its forward and backward, weights and inputs included, as planned or scheduled.
        held_bytes: Bytes in memory from its forward to its backward: its inputs, and what waits for the backward.
        reason: Why it could not be planned, or the empty string.
    """

    plan: Plan | None
    peak_bytes: int
    held_bytes: int
    reason: str = ""


class CompileBackend:
    """Compiles graphs so that their steps stay within a budget.

    Args:
        memory_budget: Largest true peak of the compiled step: weights, inputs, gradients and all between. Bytes, text
            such as ``"8GiB"``, or a fraction of the GPU's memory.
        policy: Name of a registered policy. Plans of compiled graphs keep or recompute.
        engine: ``"inductor"``, or ``"aot_eager"`` for graphs that run op by op, to the bit as without a plan.
        mode: A mode of ``torch.compile``, such as ``"reduce-overhead"``.
        beside_bytes: Bytes in memory that no compiled graph touches, such as the optimizer's state.
        options: Settings of inductor.

    Attributes:
        graphs: What was compiled, by the number of its frame.

    Raises:
        ConfigError: If the budget, the engine or the mode cannot be read.

    Example:
        >>> import torch
        >>> backend = CompileBackend("64MiB", engine="aot_eager")
        >>> net = torch.compile(torch.nn.Linear(8, 8), backend=backend)
        >>> net(torch.ones(4, 8)).sum().backward()
        >>> [graph.peak_bytes <= 2**26 for graph in backend.graphs.values()]
        [True]
    """

    def __init__(
        self,
        memory_budget: int | float | str,
        *,
        policy: str = "auto",
        engine: str = "inductor",
        mode: str | None = None,
        beside_bytes: int = 0,
        **options: Any,
    ) -> None:
        if engine not in _ENGINES:
            raise ConfigError(f"engine {engine!r} is not known.", f"Valid names: {', '.join(_ENGINES)}.")
        if engine == "aot_eager" and (mode or options):
            raise ConfigError(
                f"engine 'aot_eager' takes no mode and no options; found {mode or options}.", "Omit them."
            )
        self.budget_bytes = parse_bytes(memory_budget, total_bytes=memory_bytes_here("cuda"))
        self.beside_bytes = beside_bytes
        self.graphs: dict[int, CompiledGraph] = {}
        self._policy, self._engine, self._mode, self._options = policy, engine, mode, options

    @cached_property
    def _compiler(self) -> Callable[..., Any]:
        # The compiler takes seconds to import.
        from ctdr_lightning.basics.torch_compiler import list_mode_options
        from ctdr_lightning.memory.compiled.graph_compiler import GraphCompiler

        if self._engine == "aot_eager":
            return GraphCompiler(self._policy, None)
        return GraphCompiler(self._policy, {**(list_mode_options(self._mode) if self._mode else {}), **self._options})

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        """Compile a graph, as ``torch.compile`` asks for it.

        Raises:
            InfeasibleBudgetError: If no plan of the graph fits into what is left of the budget.
        """
        from ctdr_lightning.basics.torch_compiler import frame_id

        frame = frame_id()
        taken_bytes = self._taken_bytes(frame)
        try:
            made, partition = self._compiler(gm, inputs, self.budget_bytes - taken_bytes)
        except InfeasibleBudgetError as error:
            raise _of_the_whole(error, self.budget_bytes, taken_bytes) if taken_bytes else error from None
        held_bytes = partition.held_bytes + (partition.trace.resident_bytes if partition.trace is not None else 0)
        self.graphs[frame] = CompiledGraph(partition.plan, partition.peak_bytes, held_bytes, partition.reason)
        self._warn(partition.reason, partition.symbolic)
        return made

    def _taken_bytes(self, frame: int) -> int:
        """Bytes in memory beside a graph: those given, and of the graphs that run before it."""
        return self.beside_bytes + sum(graph.held_bytes for other, graph in self.graphs.items() if other < frame)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the step, and of what is beside it; 0 before a graph was compiled."""
        return max((self._taken_bytes(frame) + graph.peak_bytes for frame, graph in self.graphs.items()), default=0)

    def summary(self) -> str:
        """The compiled graphs in a sentence.

        Example:
            >>> CompileBackend("64MiB").summary()
            'No graph was compiled for the budget of 64.0 MiB.'
        """
        budget = f"the budget of {format_bytes(self.budget_bytes)}"
        if not self.graphs:
            return f"No graph was compiled for {budget}."
        planned = sum(graph.plan is not None for graph in self.graphs.values())
        return (
            f"Compiled for {budget}: {len(self.graphs)} graphs, {planned} of them by a plan; predicted peak "
            f"{format_bytes(self.peak_bytes)}."
        )

    @staticmethod
    def _warn(reason: str, symbolic: bool) -> None:
        if reason:
            warnings.warn(
                f"CTDR: torch parts a compiled graph, and the budget does not hold in it: {reason}", stacklevel=3
            )
        elif symbolic:
            warnings.warn(
                "CTDR: sizes of a compiled graph are not fixed; its plan keeps to the budget for those that it was "
                "compiled with. Write dynamic=False to have each size planned.",
                stacklevel=3,
            )


def _of_the_whole(error: InfeasibleBudgetError, budget_bytes: int, taken_bytes: int) -> InfeasibleBudgetError:
    """The error of a graph in the words of the whole budget."""
    whole_bytes = error.least_peak_bytes + taken_bytes
    return InfeasibleBudgetError(
        f"{error.problem} Of the budget of {format_bytes(budget_bytes)} the optimizer's state and other graphs of the "
        f"step take {format_bytes(taken_bytes)}.",
        f"Raise memory_budget to {format_roomy(whole_bytes)}; or use a smaller batch, or compile the step as one.",
        least_peak_bytes=whole_bytes,
    )


_given: list[tuple[Any, CompileBackend]] = []


def ctdr(gm: fx.GraphModule, inputs: Sequence[Any], *, options: Any = None, mode: str | None = None) -> Any:
    """The backend that ``torch.compile`` finds by the name ``"ctdr"``.

    Args:
        gm: The graph.
        inputs: Its example inputs.
        options: Arguments of `CompileBackend` by name.
        mode: A mode of ``torch.compile``.

    Raises:
        ConfigError: If ``options`` has no ``memory_budget``.
    """
    if not options or "memory_budget" not in options:
        raise ConfigError(
            f"backend 'ctdr' needs a budget; found options={options!r}.", "Write options={'memory_budget': '8GiB'}."
        )
    # The graphs of one torch.compile share its options, and with them the budget.
    found = next((backend for known, backend in _given if known is options), None)
    if found is None:
        found = CompileBackend(**options, mode=mode)
        _given.append((options, found))
    return found(gm, inputs)
