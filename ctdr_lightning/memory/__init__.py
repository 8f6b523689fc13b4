"""Record a step, plan what to keep, run it under the plan."""

from ctdr_lightning.memory.fake import record_fake
from ctdr_lightning.memory.max_batch import LargestBatch, max_batch
from ctdr_lightning.memory.plan import KEEP, RECOMPUTE, RECOMPUTE_EACH, Action, Plan
from ctdr_lightning.memory.planner import plan
from ctdr_lightning.memory.policies import POLICIES, Budget
from ctdr_lightning.memory.record import Recorder, record
from ctdr_lightning.memory.session import Session, signature_of
from ctdr_lightning.memory.simulate import Simulator, simulate
from ctdr_lightning.memory.tape import Tape
from ctdr_lightning.memory.timeline import Timeline
from ctdr_lightning.memory.trace import Trace

__all__ = [
    "KEEP",
    "POLICIES",
    "RECOMPUTE",
    "RECOMPUTE_EACH",
    "Action",
    "Budget",
    "LargestBatch",
    "Plan",
    "Recorder",
    "Session",
    "Simulator",
    "Tape",
    "Timeline",
    "Trace",
    "max_batch",
    "plan",
    "record",
    "record_fake",
    "signature_of",
    "simulate",
]
