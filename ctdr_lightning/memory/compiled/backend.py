"""A backend of ``torch.compile``: ``torch.compile(model, backend="ctdr", options={"memory_budget": "8GiB"})``.

Own work on AOTAutograd's joint graphs: ``activation_memory_budget`` of torch bounds the bytes that are saved, a budget
here bounds the true peak of the compiled step. Left out: values that wait elsewhere or in fewer bytes, and compiled
autograd. Several graphs of one step share the budget in the order in which they are compiled: each may take what those
before it leave.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from torch import fx

from ctdr_lightning.basics.devices import memory_bytes_here
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.units import format_bytes, parse_bytes
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.traces.trace import Trace

if TYPE_CHECKING:
    from ctdr_lightning.memory.compiled.partition import AccountOf

_ENGINES = ("inductor", "aot_eager")
_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # the modes that use them


@dataclass(frozen=True)
class CompiledGraph:
    """One compiled graph, forward and backward.

    Attributes:
        plan: Its plan, on a trace of its joint graph; None where torch's own partition was taken.
        peak_bytes: Peak of the batch while it runs, as planned or scheduled: with what is beside it, and with what
            graphs before it hold.
        held_bytes: Bytes from its forward to its backward, weights and buffers apart.
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
        mode: A mode of ``torch.compile``, such as ``"max-autotune-no-cudagraphs"``.
        beside_bytes: Bytes in memory that no compiled graph touches, such as the optimizer's state.
        account_of: Counts them instead: from a graph's trace, and the bytes of the weights and buffers that it reads,
            to the account of the batch.
        options: Settings of inductor.

    Attributes:
        graphs: The compiled graphs: by the number of their frame, how often it was compiled before, and their place.

    Raises:
        ConfigError: If the budget or the engine cannot be read; if the mode or an option asks for CUDA graphs, whose
            pool of memory is not counted.

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
        account_of: AccountOf | None = None,
        **options: Any,
    ) -> None:
        if engine not in _ENGINES:
            raise ConfigError(f"engine {engine!r} is not known.", f"Valid names: {', '.join(_ENGINES)}.")
        if engine == "aot_eager" and (mode or options):
            raise ConfigError(
                f"engine 'aot_eager' takes no mode and no options; found {mode or options}.", "Omit them."
            )
        if mode in _CUDA_GRAPHS or options.get("triton.cudagraphs"):
            raise ConfigError(
                f"CUDA graphs keep their own pool of memory, which no budget bounds; found mode={mode!r}.",
                "Leave the mode out, or write mode='max-autotune-no-cudagraphs'.",
            )
        self.budget_bytes = parse_bytes(memory_budget, total_bytes=memory_bytes_here("cuda"))
        self.graphs: dict[tuple[int, int, int], CompiledGraph] = {}
        self._account_of = account_of or (lambda trace, _: BatchAccount(trace.with_static(beside_bytes)))
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
        from ctdr_lightning.basics.torch_compiler import compile_id

        frame, time = compile_id()
        account_of = partial(self._account_with, self._held_bytes(frame, time))
        made, partition = self._compiler(gm, inputs, self.budget_bytes, account_of)
        if partition.account is not None or partition.reason:  # else it has no backward
            key = frame, time, sum(known[:2] == (frame, time) for known in self.graphs)
            self.graphs[key] = CompiledGraph(
                partition.plan, partition.peak_bytes, partition.held_bytes, partition.reason
            )
        self._warn(partition.reason, partition.symbolic)
        return made

    def _account_with(self, held_bytes: int, trace: Trace, read_bytes: int) -> BatchAccount:
        return self._account_of(trace.with_static(held_bytes), read_bytes)

    def _held_bytes(self, frame: int, time: int) -> int:
        """Bytes that graphs hold which run before the next one; of a frame that was compiled several times the most."""
        of_times: Counter[tuple[int, int]] = Counter()
        for (other, again, _), graph in self.graphs.items():
            of_times[other, again] += graph.held_bytes
        of_frames: dict[int, int] = {}
        for (other, _), n_bytes in of_times.items():
            of_frames[other] = max(of_frames.get(other, 0), n_bytes)
        return of_times[frame, time] + sum(n_bytes for other, n_bytes in of_frames.items() if other < frame)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the batch; 0 before a graph was compiled."""
        return max((graph.peak_bytes for graph in self.graphs.values()), default=0)

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
            f"Compiled for {budget}: graphs: {len(self.graphs)}, by a plan: {planned}; predicted peak "
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
    # The graphs of one torch.compile share its options, and with them the budget. Options are kept, so that no others
    # come by the same identity.
    found = next((backend for known, backend in _given if known is options), None)
    if found is None:
        found = CompileBackend(**options, mode=mode)
        _given.append((options, found))
    return found(gm, inputs)
