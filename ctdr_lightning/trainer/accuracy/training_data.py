"""Decomposition by the training data, before training starts: on a silent copy, with batches drawn as in fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from ctdr_lightning.basics.duplicate import duplicate
from ctdr_lightning.basics.errors import ConfigError, first_line
from ctdr_lightning.basics.nests import map_leaves
from ctdr_lightning.basics.torch_private import tree_map_only
from ctdr_lightning.decomposition import Report, decompose
from ctdr_lightning.decomposition.choose.batches import N_BATCHES, first_batches
from ctdr_lightning.trainer.accuracy import rehearsal
from ctdr_lightning.trainer.accuracy.loader_classes import loader_classes_kept
from ctdr_lightning.trainer.randomness import isolated
from ctdr_lightning.trainer.structure import match_structure


class TrainingData:
    """The training batches of a trainer that is about to fit.

    Lightning builds the loaders after `Callback.setup`; ``fit_loop.setup_data`` builds them earlier, as it does for
    ``trainer.estimated_stepping_batches``. Where that fails (loaders that need ``LightningModule.setup``, which runs
    later), or a step cannot be run, layers are chosen by their weights, with a warning.

    Args:
        trainer: In ``setup`` of a fit. All ranks make this object.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._problem = ""
        try:
            with loader_classes_kept():
                trainer.fit_loop.setup_data()
        except Exception as error:
            self._problem = f"the training data cannot be loaded yet ({first_line(error)})"

    def decompose(self, module: LightningModule, options: Mapping[str, Any], change: bool) -> Report:
        """Decompose a module, by its training batches where these can be had.

        Args:
            module: Changed in place where ``change``.
            options: For `decompose`.
            change: Whether the module itself is to be decomposed, or only the choices are wanted.

        Raises:
            ConfigError: If the options do not fit the module.
        """
        if not module.automatic_optimization:
            self._problem = "under manual optimization a training step cannot be run alone"
        if not self._problem:
            try:
                with isolated():
                    return self._on_a_copy(module, options, change)
            except ConfigError:
                raise
            except Exception as error:
                self._problem = f"a training step cannot be run on a copy ({first_line(error)})"
        if options.get("allocate") == "loss":
            raise ConfigError(f'allocate="loss" needs training data, but {self._problem}.', 'Write allocate="auto".')
        rank_zero_warn(f"CTDR: {self._problem}; ranks are chosen by the weights alone.")
        return decompose(module if change else duplicate(module), **options)

    def _on_a_copy(self, module: LightningModule, options: Mapping[str, Any], change: bool) -> Report:
        trainer = self._trainer
        double = rehearsal.rehearse(module, trainer).to(trainer.strategy.root_device)
        _run_uncompiled(double)
        vars(double)["all_gather"] = _alone  # only rank 0 decides: no other rank would answer
        drawn = rehearsal.training_batches(trainer, double, N_BATCHES)
        batches = first_batches(_as_the_weights(double, batch) for batch in drawn)
        if not batches:
            raise LookupError("an epoch has no batch")
        report = self._decomposed(double, list(enumerate(batches)), partial(_step, trainer), options)
        if change:
            state = double.state_dict()
            match_structure(module, state)
            module.load_state_dict(state)
        return report

    def _decomposed(
        self, double: LightningModule, batches: Sequence[Any], step: Callable[[Any, Any], Any], options: Any
    ) -> Report:
        return decompose(double, data=batches, step=step, **options)


def _run_uncompiled(double: LightningModule) -> None:
    """Take compiled methods off a copy: they are bound to the module that it was copied from."""
    for name, value in list(vars(double).items()):
        if hasattr(value, "_torchdynamo_orig_callable"):
            del vars(double)[name]


def _step(trainer: Any, module: Any, numbered: tuple[int, Any]) -> Any:
    return rehearsal.run_step(module, trainer, "training_step", numbered[1], numbered[0])


def _alone(data: Any, *_: Any, **__: Any) -> Any:
    """``LightningModule.all_gather`` in a world of one."""
    return tree_map_only(Tensor, lambda tensor: tensor[None], data)


def _as_the_weights(module: LightningModule, batch: Any) -> Any:
    """A batch in the weights' precision: in ``setup`` these are not converted yet, the batch is."""
    kinds = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if len(kinds) != 1:
        return batch
    kind = kinds.pop()
    return map_leaves(lambda t: t.to(kind) if isinstance(t, Tensor) and t.is_floating_point() else t, batch)
