"""Compiles one graph within a budget: by AOTAutograd alone, whose graphs run op by op, or by inductor.

A trace of a joint graph knows of no fusion: its bytes are too many where calls become one kernel, and too few where a
compiler copies tensors into other layouts. Inductor's own schedule tells the truth, before any code is generated. So
torch's partition is tried first, the fastest where it fits; then plans, with a limit that is corrected by what
the schedule takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from ctdr_lightning.basics.errors import InfeasibleBudgetError
from ctdr_lightning.basics.torch_compiler import aot_autograd, boxed_nop, compile_fx, inductor_with
from ctdr_lightning.basics.units import format_bytes, format_roomy
from ctdr_lightning.memory.compiled.partition import AccountOf, Partition
from ctdr_lightning.memory.recorder.call_seconds import CallSeconds

_ATTEMPTS = 6  # residual nets on a processor needed up to four: scheduled peaks were 0.94 to 1.07 of the planned ones
_SAFETY = 0.99  # a corrected limit is a little lower than in proportion


@dataclass
class GraphCompiler:
    """Compiles the graphs of one model.

    Attributes:
        policy: Name of the policy.
        options: Settings of inductor; None has the graphs run op by op.
        prices: Seconds of calls that were measured so far.
    """

    policy: str
    options: Mapping[str, Any] | None
    prices: CallSeconds = field(default_factory=CallSeconds)

    def __call__(
        self, gm: fx.GraphModule, inputs: Sequence[Any], budget_bytes: int, account_of: AccountOf
    ) -> tuple[Callable[..., Any], Partition]:
        """Compile a graph.

        Args:
            gm: The graph, as dynamo traced it.
            inputs: Its example inputs.
            budget_bytes: Largest peak of the batch, weights and inputs included.
            account_of: Counts what is in memory beside the graph.

        Returns:
            The compiled function and the partition of its graphs.

        Raises:
            InfeasibleBudgetError: If no plan fits.
        """
        parts = partial(
            Partition,
            budget_bytes,
            policy=self.policy,
            prices=self.prices,
            account_of=account_of,
            fused=self.options is not None,
        )
        if self.options is not None:
            return _by_inductor(gm, inputs, parts, self.options)
        partition = parts(limit_bytes=budget_bytes)
        made = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True)
        return made(gm, inputs), partition


def _by_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], parts: Callable[..., Partition], options: Mapping[str, Any]
) -> tuple[Callable[..., Any], Partition]:
    limit: int | None = None
    taken_bytes: list[int] = []
    for _ in range(_ATTEMPTS):
        partition = parts(limit_bytes=limit)
        try:
            with inductor_with(partition, partition.scheduled, options):
                made: Any = compile_fx(gm, inputs)
            return made, partition
        except Exception:
            if not partition.too_large:
                raise
        if partition.plan is not None:
            taken_bytes.append(partition.peak_bytes)
        if partition.is_least:
            break
        limit = _corrected(partition)
    raise _infeasible(partition.budget_bytes, min(taken_bytes))


def _infeasible(budget_bytes: int, least_bytes: int) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(
        f"No plan of the compiled graph fits the budget of {format_bytes(budget_bytes)}: its kernels, as inductor puts "
        f"them in order, take {format_bytes(least_bytes)} at least.",
        f"Raise memory_budget to {format_roomy(least_bytes)}; or use a smaller batch.",
        least_peak_bytes=least_bytes,
    )


def _corrected(partition: Partition) -> int:
    """The next limit of the trace, after graphs that take too much."""
    assert partition.account is not None
    standing = partition.account.standing.resident_bytes
    if partition.plan is None:
        return partition.budget_bytes
    room, planned = partition.budget_bytes - standing, partition.plan.peak_bytes - standing
    return standing + int(_SAFETY * planned * room / max(partition.peak_bytes - standing, 1))
