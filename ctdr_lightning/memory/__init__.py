"""Record a step, plan it, run it under the plan."""

from ctdr_lightning.memory.compiled.backend import CompileBackend
from ctdr_lightning.memory.guide.session import Session
from ctdr_lightning.memory.guide.step_kinds import signature_of
from ctdr_lightning.memory.largest_batch import LargestBatch, max_batch
from ctdr_lightning.memory.lazy.heads import LazyHeads
from ctdr_lightning.memory.planner import plan
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.policies import POLICIES, Budget
from ctdr_lightning.memory.recorder.fake import record_fake
from ctdr_lightning.memory.recorder.recorder import Recorder, record
from ctdr_lightning.memory.simulator.actions import KEEP, RECOMPUTE, RECOMPUTE_EACH, Action
from ctdr_lightning.memory.simulator.prepared import Prepared
from ctdr_lightning.memory.simulator.schedule import simulate
from ctdr_lightning.memory.simulator.simulator import Simulator
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.tape.tape import Tape
from ctdr_lightning.memory.tiles.tiled_modules import TiledModules
from ctdr_lightning.memory.traces.trace import Trace

__all__ = [
    "KEEP",
    "POLICIES",
    "RECOMPUTE",
    "RECOMPUTE_EACH",
    "Action",
    "Budget",
    "CompileBackend",
    "LargestBatch",
    "LazyHeads",
    "Plan",
    "Prepared",
    "Recorder",
    "Session",
    "Simulator",
    "Tape",
    "TiledModules",
    "Timeline",
    "Trace",
    "max_batch",
    "plan",
    "record",
    "record_fake",
    "signature_of",
    "simulate",
]
