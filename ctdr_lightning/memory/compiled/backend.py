"""A backend of ``torch.compile``: graphs whose step stays within a budget of bytes.

Own work on AOTAutograd's joint graphs. The bytes are those of the compiled region's whole step: its weights and inputs,
their gradients, and everything in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ctdr_lightning.basics.torch_compiler import (
    CustomPartitionerFn,
    aot_autograd,
    boxed_nop,
    compile_fx,
    fx_graph_cse,
    partitioned_by,
)
from ctdr_lightning.memory.compiled.joint_graph import JointGraph
from ctdr_lightning.memory.compiled.joint_trace import JointTrace
from ctdr_lightning.memory.compiled.parted_graph import Graphs, parted
from ctdr_lightning.memory.planner import plan
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.recorder.call_seconds import CallSeconds


class Partition(CustomPartitionerFn):
    def __init__(self, memory_budget: int | float | str | None = None, policy: str = "auto") -> None:
        self.memory_budget, self.policy = memory_budget, policy
        self.plans: list[Plan] = []
        self._prices = CallSeconds()

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Graphs:
        gm.graph.eliminate_dead_code()
        gm.graph = fx_graph_cse(gm.graph)
        gm.recompile()
        joint = JointTrace(JointGraph(gm, kwargs["num_fwd_outputs"]), self._prices)
        made = plan(joint.trace, self.memory_budget, self.policy)
        self.plans.append(made)
        return parted(joint, made.actions)

    def uuid(self) -> Any:
        return None


class Backend:
    def __init__(self, memory_budget=None, policy="auto", engine="inductor"):
        self.partition = Partition(memory_budget, policy)
        self.engine = engine

    def __call__(self, gm, inputs, **_):
        if self.engine == "inductor":
            with partitioned_by(self.partition):
                return compile_fx(gm, inputs)
        return aot_autograd(fw_compiler=boxed_nop, partition_fn=self.partition, keep_inference_input_mutations=True)(gm, inputs)
