"""The function that parts one joint graph: by a plan, or as torch does where that fits or where no plan can be made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ctdr_lightning.basics.errors import InfeasibleBudgetError, first_line
from ctdr_lightning.basics.torch_compiler import CustomPartitionerFn, fx_graph_cse, size_hint, torch_partition
from ctdr_lightning.basics.torch_private import tree_leaves
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.compiled.joint_graph import JointGraph
from ctdr_lightning.memory.compiled.joint_trace import JointTrace
from ctdr_lightning.memory.compiled.parted_graph import Graphs, parted
from ctdr_lightning.memory.planner import plan
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.recorder.call_seconds import CallSeconds
from ctdr_lightning.memory.traces.trace import Trace


class TooLarge(Exception):
    """A compilation ends early, because its graphs take more than their budget."""


# From a graph's trace and the bytes of the weights and buffers that it reads to the account of the batch.
AccountOf = Callable[[Trace, int], BatchAccount]


@dataclass
class Partition(CustomPartitionerFn):
    """Parts the joint graph of one compilation.

    Attributes:
        budget_bytes: Largest peak of the batch.
        limit_bytes: Largest peak of its trace, which knows of no fusion; None lets torch part the graph.
        policy: Name of the policy.
        prices: Seconds of calls, shared by the graphs of a model.
        account_of: Counts what is in memory beside the graph.
        fused: Whether the graphs go to a compiler that fuses their calls.
        account: The account of the batch; None before a graph was parted, or where it could not be planned.
        plan: The plan that was made; None where torch parted the graph.
        peak_bytes: Peak of the batch: as the trace says, or as the compiler's schedules do.
        held_bytes: Bytes from the graph's forward to its backward, weights and buffers apart: the batch, and what the
            forward hands over.
        is_least: Whether no plan keeps the limit; the plan is then one of the least peak.
        symbolic: Whether sizes of the graph are not fixed.
        reason: Why the graph could not be planned, or the empty string.
    """

    budget_bytes: int
    limit_bytes: int | None
    policy: str
    prices: CallSeconds
    account_of: AccountOf
    fused: bool
    account: BatchAccount | None = None
    plan: Plan | None = None
    peak_bytes: int = 0
    held_bytes: int = 0
    is_least: bool = False
    symbolic: bool = False
    reason: str = ""
    _caller_bytes: int = 0

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Graphs:
        """Part a joint graph.

        Args:
            gm: The joint graph.
            joint_inputs: Its inputs, which torch's own function asks for.
            kwargs: Further arguments of torch's own function; of them ``num_fwd_outputs``, how many outputs the forward
                returns, and ``static_lifetime_input_indices``, which inputs are weights and buffers.

        Raises:
            TooLarge: If what the forward hands over takes more than the budget already.
            InfeasibleBudgetError: If no plan keeps the limit, and calls are not fused.
        """
        n_outputs: int = kwargs["num_fwd_outputs"]
        joint = self._joint(gm, n_outputs)
        if joint is None:
            return torch_partition(gm, joint_inputs, **kwargs)
        weight_bytes = joint.bytes_of_inputs(kwargs.get("static_lifetime_input_indices") or ())
        self.account, self._caller_bytes = self.account_of(joint.trace, weight_bytes), joint.caller_bytes
        if self.limit_bytes is None:
            found = torch_partition(gm, joint_inputs, **kwargs)
        else:
            self.plan = self._planned(self.account.standing)
            self.peak_bytes = self.account.peak_bytes(self.plan)
            found = parted(joint, self.plan.actions)
        handed_bytes = _handed_over_bytes(found[0], n_outputs)
        self.held_bytes = joint.trace.resident_bytes - weight_bytes + handed_bytes
        if self.fused:
            self._judge(self.account.standing.resident_bytes + handed_bytes)
        return found

    def _joint(self, gm: fx.GraphModule, n_forward_outputs: int) -> JointTrace | None:
        gm.graph.eliminate_dead_code()
        gm.graph = fx_graph_cse(gm.graph)  # as torch's own function does, so that both have the same calls
        gm.recompile()
        try:
            graph = JointGraph(gm, n_forward_outputs, fused=self.fused)
            joint = JointTrace(graph, self.prices, fused=self.fused)
        except Exception as error:  # operators of others and passes of the compiler may fail on fake tensors in any way
            self.reason = first_line(error)
            return None
        self.symbolic = graph.symbolic
        return joint

    def _planned(self, trace: Trace) -> Plan:
        try:
            return plan(trace, Budget(peak_bytes=self.limit_bytes), self.policy)
        except InfeasibleBudgetError as error:
            if not self.fused:
                raise
            self.is_least = True
            return plan(trace, Budget(peak_bytes=error.least_peak_bytes), self.policy)

    def scheduled(self, backward: bool, buffer_bytes: int) -> None:
        """The compiler has put a graph's kernels in order.

        Args:
            backward: Which of the two graphs it is.
            buffer_bytes: Peak of what it reads and may free, of what it makes, and of workspaces.

        Raises:
            TooLarge: If that is more than the budget.
        """
        if self.account is None:
            return
        standing_bytes = self.account.standing.resident_bytes
        if not backward:  # the schedule of the forward takes the place of what was known before it
            self.peak_bytes = 0
            standing_bytes += self.account.kept_bytes
        else:
            standing_bytes += self._caller_bytes
        self._judge(max(self.peak_bytes, standing_bytes + buffer_bytes, self.account.rest_bytes))

    def _judge(self, peak_bytes: int) -> None:
        self.peak_bytes = peak_bytes
        if self.too_large:
            raise TooLarge

    @property
    def too_large(self) -> bool:
        """Whether the graphs were found to take more than the budget."""
        return self.account is not None and self.peak_bytes > self.budget_bytes

    def uuid(self) -> None:
        """None: nothing of a compilation is kept by its inputs alone, as the plan is made from measured times."""
        return


def _handed_over_bytes(forward: fx.GraphModule, n_outputs: int) -> int:
    """Bytes of what a forward returns beyond its own outputs, which the backward will read; its inputs apart."""
    (output,) = forward.graph.find_nodes(op="output")
    handed = [node for node in output.args[0][n_outputs:] if isinstance(node, fx.Node) and node.op != "placeholder"]
    made = [value for node in handed for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return sum({t.untyped_storage()._cdata: _n_bytes(t) for t in made}.values())


def _n_bytes(tensor: Tensor) -> int:
    return int(size_hint(tensor.numel())) * tensor.element_size()
