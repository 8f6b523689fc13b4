"""The function that parts one joint graph: by a plan, or as torch does where that fits or where no plan can be made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ctdr_lightning.basics.errors import InfeasibleBudgetError, first_line
from ctdr_lightning.basics.torch_compiler import CustomPartitionerFn, fx_graph_cse, size_hint, torch_partition
from ctdr_lightning.basics.torch_private import tree_leaves
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


@dataclass
class Partition(CustomPartitionerFn):
    """Parts the joint graph of one compilation.

    Attributes:
        budget_bytes: Largest peak of the step that the graph is.
        limit_bytes: Largest peak of its trace, which knows of no fusion; None lets torch part the graph.
        policy: Name of the policy.
        prices: Seconds of calls, shared by the graphs of a model.
        fused: Whether the graphs go to a compiler that fuses their calls.
        trace: The step; None before a graph was parted, or where it could not be planned.
        plan: The plan that was made; None where torch parted the graph.
        peak_bytes: Peak of the step: as the trace says, or as the compiler's schedules do.
        held_bytes: Bytes that the forward hands to the backward, its inputs apart.
        is_least: Whether no plan keeps the limit; the plan is then one of the least peak.
        symbolic: Whether sizes of the graph are not fixed.
        reason: Why the graph could not be planned, or the empty string.
    """

    budget_bytes: int
    limit_bytes: int | None
    policy: str
    prices: CallSeconds
    fused: bool
    trace: Trace | None = None
    plan: Plan | None = None
    peak_bytes: int = 0
    held_bytes: int = 0
    is_least: bool = False
    symbolic: bool = False
    reason: str = ""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Graphs:
        """Part a joint graph.

        Args:
            gm: The joint graph.
            joint_inputs: Its inputs, which torch's own function asks for.
            kwargs: Further arguments of torch's own function; of them ``num_fwd_outputs``, how many outputs the forward
                returns.

        Raises:
            TooLarge: If what the forward hands over takes more than the budget already.
            InfeasibleBudgetError: If no plan keeps the limit, and calls are not fused.
        """
        n_outputs: int = kwargs["num_fwd_outputs"]
        joint = self._joint(gm, n_outputs)
        if joint is None or self.limit_bytes is None:
            found = torch_partition(gm, joint_inputs, **kwargs)
        else:
            self.plan = self._planned(joint.trace)
            self.peak_bytes = self.plan.peak_bytes
            found = parted(joint, self.plan.actions)
        self.held_bytes = _handed_over_bytes(found[0], n_outputs)
        if joint is not None and joint.trace.resident_bytes + self.held_bytes > self.budget_bytes:
            self._refuse(joint.trace.resident_bytes + self.held_bytes)
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
        self.trace, self.symbolic = joint.trace, graph.symbolic
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
        if self.trace is None:
            return
        self.peak_bytes = max(self.peak_bytes if backward else 0, self.trace.resident_bytes + buffer_bytes)
        if self.peak_bytes > self.budget_bytes:
            self._refuse(self.peak_bytes)

    def _refuse(self, peak_bytes: int) -> None:
        self.peak_bytes = peak_bytes
        if self.fused:
            raise TooLarge

    @property
    def too_large(self) -> bool:
        """Whether the graphs were found to take more than the budget."""
        return self.trace is not None and self.peak_bytes > self.budget_bytes

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
