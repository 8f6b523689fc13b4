"""The rarely used arguments of the callback, in two groups: the choice of ranks, and the means of the memory plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ctdr_lightning.basics.checks import boolean, known, real
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition import METHODS, Choices
from ctdr_lightning.decomposition.choose.allocate import RESOURCES
from ctdr_lightning.joint.metric import MetricLike, check_metric
from ctdr_lightning.memory.holders import HOLDERS
from ctdr_lightning.memory.tape.verifier import check_verify

OVER_BUDGET = ("auto", "raise", "least")
IN_8_BITS = "8bit"


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The choice of ranks: ``CTDRCallback(ranks=Ranks(...))``, or a mapping to these fields.

    Args:
        method: Decomposition method, or ``"auto"``: for each layer the one of least error at equal parameters.
        choices: A report's ``choices``, or their JSON or YAML file, in the place of ``rank``, ``method`` and
            ``select``.
        allocate: The resource that a float ``rank`` is a share of: ``"loss"`` (parameters, distributed by training
            data), ``"parameters"``, ``"flops"``, ``"memory"`` or ``"seconds"``; None gives every layer its own share;
            ``"auto"`` is ``"loss"`` where the data can be had when training is set up, else ``"parameters"``.
        data: ``"train"``: a few training batches tell how much the loss minds each layer's error, and the factors are
            refitted on them. They move no random state. None goes by the weights alone.
        max_loss: With ``rank="auto"``: largest mean KL to the dense outputs; without a budget 0.002 nats.
        metric: Where given, ``max_loss`` is the largest drop of it from the dense model's: a metric of torchmetrics,
            which is given the output and the target of training batches, or a function of the module and a batch that
            returns a number, higher is better.

    Raises:
        ConfigError: If a field cannot be used.

    Example:
        >>> Ranks(method="svd", allocate="parameters").data
        'train'
    """

    method: str = "auto"
    choices: Choices | dict[str, Any] | str | None = None
    allocate: str | None = "auto"
    data: str | None = "train"
    max_loss: float | None = None
    metric: MetricLike | None = None

    def __post_init__(self) -> None:
        for method in self.method if isinstance(self.method, list | tuple) else [self.method]:
            if method != "auto":
                known(METHODS, "method", method)
        if self.data not in ("train", None):
            raise ConfigError(f"data={self.data!r} is not known.", 'Write "train", or None to go by the weights alone.')
        if self.allocate not in ("auto", "loss", None):
            known(RESOURCES, "allocate", self.allocate)
        if self.allocate == "loss" and self.data is None:
            raise ConfigError('allocate="loss" needs data.', 'Write data="train", or allocate="parameters".')
        if self.max_loss is not None:
            real("max_loss", self.max_loss, least=0)
        check_metric(self.metric, self.max_loss)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Means by which steps keep the budget: ``CTDRCallback(memory=Memory(...))``, or a mapping to these fields.

    Args:
        offload: Places off the device for saved tensors: ``"host"``, ``"disk"``, or a list of these.
        disk_folder: Folder of the disk's files; None takes the system's folder for temporary files. Without
            ``offload``, tensors wait there only if a ``memory_budget`` cannot be kept otherwise.
        codecs: Codecs that may compress saved tensors: ``"exact"`` allows all that leave every gradient unchanged, a
            list of names allows these, None allows no codec; ``"auto"`` allows exact ones under a ``memory_budget``
            with policy ``"auto"`` on a processor, if the budget can be met and they make steps faster than
            recomputation alone, and with the policies ``"cdma"``, ``"cswap"`` and ``"gist"`` the codecs they are about.
        optimizer_state: Where the optimizers' state waits between their steps: ``"host"`` (of a GPU), ``"disk"``,
            ``"8bit"`` for the device in a quarter of its bytes (rounded), or None for the device.
        optimizer_step: ``"in_backward"`` updates each parameter as its gradient is ready and frees the gradient, with
            the same weights to the bit. None does so only where a ``memory_budget`` given alone needs the bytes.
        sub_batches: In how many parts each batch runs, one after the other, with the gradients of the whole up to
            rounding: a number, ``"auto"`` for the fewest that fit ``memory_budget``, or None for the whole batch.
        batch_norm_in_parts: Whether batches may run in parts though BatchNorm then normalises each part by itself, as
            it does under DDP on several GPUs. None allows parts of 16 samples or more, before layers are cut, where no
            exact means keeps a ``memory_budget`` given alone.
        rounding: Whether what changes results by rounding may be done unasked, where the budget needs it: large linear
            layers whose output is left out while its cross entropy is taken in chunks, modules that run in tiles, and
            batches in parts. False gives the results of a run without a budget, to the bit.
        keep_gradients: Whether the gradients of one step may be read in the next one's forward. True keeps them and
            counts their bytes; False frees them before the forward where the plan needs their bytes; None does so
            unless the module's own code reads them.
        over_budget: A step that cannot fit the budget is refused (``"raise"``), or run as small as it can be with one
            warning (``"least"``); ``"auto"`` refuses the first kind of step and runs later ones, such as a longer
            sequence in mid-epoch, and all kinds of a resumed run.
        retry_on_oom: Run a step that ran out of memory again, under a tighter plan and as if it had never failed; where
            that cannot be, the error says why.
        verify: Steps in which each dropped tensor that comes back is compared with the saved one: the ``"first"`` of
            each kind and one in 500 after it, ``"always"`` or ``"never"``. A tensor that differs is held from then on,
            and the step runs again; if it cannot, training stops with the reason.
        allow_untested: Accept a strategy or a kind of device that is not among the tested ones.

    Raises:
        ConfigError: If a field cannot be used.

    Example:
        >>> Memory(offload="disk", sub_batches=2).over_budget
        'auto'
    """

    offload: str | list[str] | None = None
    disk_folder: str | Path | None = None
    codecs: str | list[str] | None = "auto"
    optimizer_state: str | None = None
    optimizer_step: str | None = None
    sub_batches: int | str | None = None
    batch_norm_in_parts: bool | None = None
    rounding: bool = True
    keep_gradients: bool | None = None
    over_budget: str = "auto"
    retry_on_oom: bool = True
    verify: str = "first"
    allow_untested: bool = False

    def __post_init__(self) -> None:
        if self.optimizer_state not in (None, IN_8_BITS):
            known(HOLDERS, "optimizer_state", self.optimizer_state)
        self._check_optimizer_step()
        asked = self.sub_batches
        if asked not in (None, "auto") and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
            raise ConfigError(f"sub_batches={asked!r} is not a number of sub-batches.", 'Write 4, "auto" or None.')
        check_verify(self.verify)
        for name in ("rounding", "retry_on_oom", "allow_untested"):
            boolean(name, getattr(self, name))
        for name in ("batch_norm_in_parts", "keep_gradients"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise ConfigError(f"{name} must be True, False or None, got {value!r}.", "Write one of them.")
        if self.over_budget not in OVER_BUDGET:
            raise ConfigError(f"over_budget={self.over_budget!r} is not known.", f"Valid: {', '.join(OVER_BUDGET)}.")

    def _check_optimizer_step(self) -> None:
        if self.optimizer_step not in ("in_backward", None):
            raise ConfigError(
                f"optimizer_step={self.optimizer_step!r} is not known.",
                'Write "in_backward", or None to step after the backward.',
            )
        if self.optimizer_step is not None and self.optimizer_state is not None:
            raise ConfigError(
                f"optimizer_step={self.optimizer_step!r} and optimizer_state={self.optimizer_state!r} are given: state "
                "that waits elsewhere is brought back a chunk of parameters at a time, after the backward.",
                "Leave one of the two out.",
            )


GROUPS: Mapping[str, type[Ranks] | type[Memory]] = {"ranks": Ranks, "memory": Memory}


def grouped(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The callback's arguments from those of all groups side by side.

    Example:
        >>> grouped({"rank": 0.5, "method": "svd"})
        {'rank': 0.5, 'ranks': {'method': 'svd'}}
    """
    group_of = {field.name: name for name, group in GROUPS.items() for field in fields(group)}
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in group_of:
            found.setdefault(group_of[name], {})[name] = value
        else:
            found[name] = value
    return found


def changed(arguments: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The callback's arguments with some of them changed; a mapping changes single fields of its group."""
    found = {**arguments, **changes}
    for name in GROUPS:
        if isinstance(changes.get(name), Mapping):
            found[name] = {**arguments.get(name, {}), **changes[name]}
    return found
