"""The recovery schedule as plain data: typed, and as YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import yaml

from ctdr_lightning.basics import files
from ctdr_lightning.basics.checks import boolean, from_mapping, one_of, real, whole
from ctdr_lightning.basics.errors import CheckpointError, ConfigError

_NOTES = {
    "batchnorm_batches": "training batches for BatchNorm statistics, after every cut and at an epoch's end; 0: never",
    "phases": "fine-tuning after a cut, one after the other; afterwards everything trains at the model's own rate",
    "epochs": "length of the phase",
    "train": "all, factors, batchnorm, or patterns of parameter names such as ['head.*']",
    "lr_scale": "the optimizer's learning rate is multiplied by this",
    "warmup_epochs": "the scale rises linearly from zero over this many epochs",
    "layers_per_stage": "layers per cut, the most tolerant first, made when the metric is back; null: all at once",
    "cut_epochs": "or cut an equal share of the layers at each of these epochs; auto: all, once their spectra settled",
    "monitor": "name of a logged validation metric",
    "mode": "max or min: which way the metric is better",
    "reference": "the dense model's metric: a number, or 'measure': validate the dense model before the first cut",
    "tolerance": "recovered: no worse than the reference by more than this",
    "max_drop": "roll the last stage back when it ends worse than the reference by more than this; null: never",
    "stop_when_recovered": "stop training once the last stage has recovered",
    "distill": "learn from the dense model as well; null: no",
}  # fmt: skip


@dataclass(frozen=True)
class Phase:
    """A stretch of fine-tuning after a cut.

    Args:
        epochs: Length, at least 1.
        train: ``"all"``, ``"factors"``, ``"batchnorm"``, or ``fnmatch`` patterns of parameter names; the rest freezes.
        lr_scale: The optimizer's own learning rate is multiplied by this.
        warmup_epochs: The scale rises linearly from zero over this many epochs.
    """

    epochs: int = 1
    train: str | Sequence[str] = "all"
    lr_scale: float = 1.0
    warmup_epochs: float = 0.0

    def __post_init__(self) -> None:
        whole("phase.epochs", self.epochs, least=1)
        real("phase.lr_scale", self.lr_scale, above=0)
        real("phase.warmup_epochs", self.warmup_epochs, least=0)
        if self.warmup_epochs > self.epochs:
            raise ConfigError(
                f"phase.warmup_epochs={self.warmup_epochs} is longer than phase.epochs={self.epochs}.",
                "Warm up within the phase.",
            )
        _check_train(self.train)


_PHASE = frozenset(field.name for field in fields(Phase))


def _check_train(train: Any) -> None:
    patterns = [train] if isinstance(train, str) else train
    if not isinstance(patterns, Sequence) or not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise ConfigError(
            f"phase.train={train!r} names nothing to train.", "Write 'all', 'factors', 'batchnorm' or name patterns."
        )


@dataclass(frozen=True)
class Distillation:
    """Learning from the dense model's outputs in addition to the labels (Hinton et al., arXiv:1503.02531).

    Args:
        weight: Share of the teacher's term in the loss, in ``(0, 1]``.
        temperature: Both sides' logits are divided by this, and the term multiplied by its square.
        module: Dotted name of the submodule whose output are the logits; empty: the LightningModule's ``forward``.
        keep: Where the teacher waits: ``"host"`` (moved to the device for its forward), ``"bf16"`` or ``"device"``.
    """

    weight: float = 0.5
    temperature: float = 4.0
    module: str = ""
    keep: Literal["host", "bf16", "device"] = "host"

    def __post_init__(self) -> None:
        real("distill.weight", self.weight, above=0, most=1)
        real("distill.temperature", self.temperature, above=0)
        one_of("distill.keep", self.keep, ("host", "bf16", "device"))
        if not isinstance(self.module, str):
            raise ConfigError(f"distill.module={self.module!r} is not a name.", "Write the submodule's dotted name.")


@dataclass(frozen=True)
class Recovery:
    """Schedule that recovers accuracy after decomposition.

    One-shot by default: all layers are cut at the start. Staged with ``layers_per_stage`` (the next layers are cut
    when the metric is back within ``tolerance``, or when the phases are over) or with ``cut_epochs``. With
    ``cut_epochs="auto"`` an untrained network is trained densely first.

    Args:
        batchnorm_batches: Training batches from which BatchNorm statistics are re-estimated after every cut and at the
            end of every epoch, before its validation; 0: never.
        phases: Fine-tuning after every cut; afterwards everything trains at the model's own learning rate.
        layers_per_stage: Layers per cut, the most tolerant first; None: all at once.
        cut_epochs: Epochs at which an equal share of the layers is cut; ``"auto"``: all layers are cut once, before the
            first epoch at which their spectra have settled (`decisions.settled`), with ranks and factors of that
            moment.
        monitor: Name of a logged validation metric.
        mode: Whether more (``"max"``) or less (``"min"``) of it is better.
        reference: The dense model's metric, or ``"measure"``: the dense model is validated before the first cut.
        tolerance: Recovered means no worse than the reference by more than this.
        max_drop: A stage that ends worse than the reference by more than this is rolled back, and is the last one.
        stop_when_recovered: Stop training once the last stage has recovered.
        distill: Learn from the dense model as well.

    Raises:
        ConfigError: If a value is out of range or two of them contradict each other.
    """

    batchnorm_batches: int = 20
    phases: Sequence[Phase] = (Phase(epochs=3),)
    layers_per_stage: int | None = None
    cut_epochs: Sequence[int] | Literal["auto"] | None = None
    monitor: str | None = None
    mode: Literal["max", "min"] = "max"
    reference: float | Literal["measure"] | None = None
    tolerance: float = 0.005
    max_drop: float | None = None
    stop_when_recovered: bool = True
    distill: Distillation | None = None

    def __post_init__(self) -> None:
        whole("recovery.batchnorm_batches", self.batchnorm_batches, least=0)
        one_of("recovery.mode", self.mode, ("max", "min"))
        real("recovery.tolerance", self.tolerance, least=0)
        boolean("recovery.stop_when_recovered", self.stop_when_recovered)
        object.__setattr__(self, "phases", _items("phases", self.phases, Phase))
        if self.distill is not None:
            object.__setattr__(self, "distill", from_mapping(Distillation, self.distill, "recovery.distill"))
        self._check_stages()
        self._check_metric()

    def _check_stages(self) -> None:
        if self.layers_per_stage is not None:
            whole("recovery.layers_per_stage", self.layers_per_stage, least=1)
        if self.cut_epochs is None:
            return
        if self.layers_per_stage is not None:
            raise ConfigError(
                "recovery.layers_per_stage and recovery.cut_epochs are both given.",
                "Give layers_per_stage (cut when recovered) or cut_epochs (cut equal shares then), not both.",
            )
        if self.warms_up:
            self._check_warm_up()
        else:
            self._check_cut_epochs()

    def _check_cut_epochs(self) -> None:
        if isinstance(self.cut_epochs, str):
            problem = f"recovery.cut_epochs={self.cut_epochs!r} is not known."
            raise ConfigError(problem, 'Write "auto", or epochs such as [0, 3, 6].')
        epochs = _items("cut_epochs", self.cut_epochs, int)
        object.__setattr__(self, "cut_epochs", epochs)
        for epoch in epochs:
            whole("recovery.cut_epochs", epoch, least=0)
        if not epochs or list(epochs) != sorted(set(epochs)):
            raise ConfigError(f"recovery.cut_epochs={list(epochs)} does not rise.", "Write epochs such as [0, 3, 6].")

    def _check_warm_up(self) -> None:
        if self.distill is not None:
            raise ConfigError(
                'recovery.distill is given with cut_epochs="auto": the teacher would be the untrained network.',
                "Leave distill out, or cut a trained network.",
            )

    def _check_metric(self) -> None:
        if self.monitor is not None and (not isinstance(self.monitor, str) or not self.monitor):
            raise ConfigError(f"recovery.monitor={self.monitor!r} is not a name.", "Write the logged metric's name.")
        if self.max_drop is not None:
            real("recovery.max_drop", self.max_drop, least=0)
        if self.reference is not None and self.reference != "measure":
            real("recovery.reference", self.reference)
        if self.reference is not None and self.monitor is None:
            raise ConfigError("recovery.reference is given without recovery.monitor.", "Name the metric it is for.")
        if self.max_drop is not None and self.reference is None:
            raise ConfigError("recovery.max_drop is given without recovery.reference.", "Add reference='measure'.")

    @property
    def warms_up(self) -> bool:
        """Whether the network is trained densely until the spectra of its layers have settled."""
        return isinstance(self.cut_epochs, str) and self.cut_epochs == "auto"

    @property
    def staged(self) -> bool:
        """Whether layers are cut while training runs."""
        return self.layers_per_stage is not None or self.cut_epochs is not None

    def to_dict(self) -> dict[str, Any]:
        """The schedule as plain dicts, lists, strings and numbers."""
        plain = asdict(self)
        plain["phases"] = [{**phase, "train": _plain_train(phase["train"])} for phase in plain["phases"]]
        plain["cut_epochs"] = list(self.cut_epochs) if isinstance(self.cut_epochs, tuple) else self.cut_epochs
        return plain

    def save(self, path: str | Path) -> None:
        """Write the schedule as YAML with a note to every entry: a file to edit and to give as ``recovery=``.

        Example:
            >>> import tempfile, os
            >>> path = os.path.join(tempfile.mkdtemp(), "recovery.yaml")
            >>> Recovery().save(path)
            >>> Recovery.read(path) == Recovery()
            True
        """
        files.write_text(path, annotated_yaml(self.to_dict()))

    @classmethod
    def read(cls, value: Recovery | Mapping[str, Any] | str | Path | bool | None) -> Recovery | None:
        """Parse the callback's ``recovery=``.

        Args:
            value: A schedule, its fields, a YAML file, True for the defaults, False or None for no recovery.

        Raises:
            ConfigError: If it holds an unknown or a wrong entry.
            CheckpointError: If the file cannot be read or is not YAML.
        """
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, str | Path):
            if not is_file(value):
                problem = f"recovery={str(value)!r} is not a file."
                raise ConfigError(problem, "Write one: Recovery().save(path); or recovery=True for the defaults.")
            value = read_yaml(value)
        of_phase = {key: value[key] for key in value if key in _PHASE} if isinstance(value, Mapping) else {}
        if of_phase:
            problem = f"recovery has no entry {', '.join(of_phase)}: each of its phases has."
            raise ConfigError(problem, f"Write recovery={{'phases': [{of_phase}]}}.")
        return from_mapping(cls, value, "recovery")


def is_file(path: str | Path) -> bool:
    """Whether a path leads to a file; False for text that no path can be."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def _items(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
        raise ConfigError(f"recovery.{name}={values!r} is not a list.", f"Write a list of {kind.__name__}.")
    if kind is int:
        return tuple(values)
    return tuple(from_mapping(kind, value, f"recovery.{name}[{index}]") for index, value in enumerate(values))


def _plain_train(train: str | Sequence[str]) -> str | list[str]:
    return train if isinstance(train, str) else list(train)


def read_yaml(path: str | Path) -> Any:
    """Read a YAML file of plain values.

    Raises:
        CheckpointError: If it cannot be read or holds anything but plain values.
    """
    text = files.read_text(path)
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{str(path)!r} is not plain YAML: {error}.", "Write one afresh: Recovery().save(path)."
        ) from error


def annotated_yaml(plain: dict[str, Any]) -> str:
    """YAML of a schedule, each line followed by its meaning."""
    lines = []
    for line in yaml.safe_dump(plain, sort_keys=False, width=1000).splitlines():
        note = _NOTES.get(line.split(":")[0].strip(" -"))
        lines.append(f"{line}  # {note}" if note else line)
    return "\n".join(lines) + "\n"
