"""Recovery: BatchNorm re-estimation, fine-tuning phases, distillation, stages and rollback."""

from __future__ import annotations

from ctdr_lightning.recovery.phases import TRAINED_PARAMETERS
from ctdr_lightning.recovery.schedule import Distillation, Phase, Recovery

__all__ = ["TRAINED_PARAMETERS", "Distillation", "Phase", "Recovery"]
