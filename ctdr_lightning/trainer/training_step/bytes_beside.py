"""The bytes beside the steps of a run: optimizers, kept gradients, copies; predicted first, measured then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule

from ctdr_lightning.basics.units import MIB
from ctdr_lightning.memory import Trace
from ctdr_lightning.memory.account.batch import BatchAccount, with_room
from ctdr_lightning.memory.guide.events import Event
from ctdr_lightning.memory.holders.optimizer_bytes import predict
from ctdr_lightning.memory.traces.optimizer import NO_OPTIMIZER
from ctdr_lightning.trainer.options import CallbackOptions
from ctdr_lightning.trainer.training_step.batch_meter import BatchMeter
from ctdr_lightning.trainer.training_step.events import ClosureMeasured, GradientsRead, RestGrew
from ctdr_lightning.trainer.training_step.optimizer.gradient_readers import gradient_reader
from ctdr_lightning.trainer.training_step.optimizer.resident import adds_up, gradient_sizes, local_bytes, state_bytes
from ctdr_lightning.trainer.training_step.retry.snapshot import MODULE, OPTIMIZERS, Snapshot
from ctdr_lightning.trainer.training_step.surprises import Surprises

# Grad norms, counters and the like: less is not worth another plan.
_NEGLIGIBLE_BYTES = MIB


class BytesBeside:
    """Keeps the account of everything but the recorded step.

    Args:
        options: The callback's.

    Attributes:
        optimizer: Bytes of the optimizers.
        kept_bytes: Gradients of the step before, which remain until the backward.
        copied_bytes: Copies for a retry, with room for larger ones.
        own_bytes: Copies of what a step in parts itself changes; may be set.
        held_bytes: Bytes of a GPU's allocator that nothing else explains: buckets of DDP, teachers, workspaces.
        surprises: Judges measured batches.
        rest_measured: Whether the optimizers' step was measured.
    """

    def __init__(self, options: CallbackOptions) -> None:
        self._options = options
        self.optimizer = NO_OPTIMIZER
        self.kept_bytes = self.copied_bytes = self._put_back_bytes = self._state_bytes = 0
        self._foreseen_bytes = self.own_bytes = 0
        self.held_bytes = self._weight_bytes = 0
        self.surprises = Surprises()
        self.rest_measured = False
        self._optimizers_seen: Any = None

    def look_ahead(self, trainer: Any, module: LightningModule) -> list[Event] | None:
        """Predict the bytes of the optimizers before they step; None where they and the weights are those of before."""
        sizes = [(id(o), [len(group["params"]) for group in o.param_groups]) for o in trainer.optimizers]
        if sizes == self._optimizers_seen:
            return None if _weight_bytes(module) == self._weight_bytes else []
        self._optimizers_seen, self.rest_measured = sizes, False
        self._state_bytes = state_bytes(trainer.optimizers)
        inside, n_steps = self._options.optimizer_step is not None, trainer.estimated_stepping_batches
        found = predict(trainer.optimizers, n_steps, inside=inside) or NO_OPTIMIZER
        self._foreseen_bytes = found.temporary
        self.optimizer = replace(found, state=max(found.state, self._state_bytes))
        reader = gradient_reader(module, trainer.callbacks) if self._options.keep_gradients is None else ""
        keeps = self._options.keep_gradients or bool(reader)
        gradient_bytes = local_bytes(p for p in module.parameters() if p.requires_grad)
        self.kept_bytes = gradient_bytes if keeps and module.automatic_optimization else 0
        # a step that frees gradients itself may be put back: those that it found wait for that until it is over
        self._put_back_bytes = gradient_bytes * (self._options.retry_on_oom and not module.automatic_optimization)
        return [GradientsRead(reader)] if reader else []

    def static_bytes(self, module: LightningModule) -> int:
        """Bytes in memory all along: weights, buffers, and those beside them."""
        beside_bytes = self.optimizer.state + self.optimizer.standing + self.surprises.counted_bytes + self.held_bytes
        self._weight_bytes = _weight_bytes(module)
        return self._weight_bytes + beside_bytes

    def account(self, step: Trace) -> BatchAccount:
        """The account of a batch that runs whole, from its step on its machine."""
        copied_bytes = self.copied_bytes + self.own_bytes + self._put_back_bytes + self.surprises.counted_bytes
        inside = self._options.optimizer_step is not None
        return BatchAccount(step.with_static(self.held_bytes), self.optimizer, inside, self.kept_bytes, copied_bytes)

    def account_of_part(self, step: Trace, module: LightningModule, inputs: Any) -> BatchAccount:
        """The account of a batch that could run in parts, before anything of it has run.

        Under accumulation it is one that adds to the gradients of earlier batches.

        Args:
            step: Of the part, on its machine.
            module: The model.
            inputs: The arguments of the part's step.
        """
        copied_bytes = self.own_bytes
        if self._options.retry_on_oom:
            roots = {MODULE: module, "batch": inputs, OPTIMIZERS: module.trainer.optimizers}
            # the retry comes to copy them, too
            copied_bytes += with_room(Snapshot(roots, set()).copied_bytes + self.own_bytes)
        account = replace(self.account(step), kept_bytes=0, copied_bytes=copied_bytes)
        return account.adding(gradient_sizes(module)) if adds_up(module.trainer) else account

    def unexplained_bytes(self, allocated_bytes: int) -> int:
        """Bytes of a GPU's allocator between two steps that neither the known tensors nor ``held_bytes`` explain.

        Args:
            allocated_bytes: In use, apart from the batch and the gradients.
        """
        known_bytes = self._weight_bytes + self._state_bytes + self.copied_bytes + self.held_bytes
        return allocated_bytes - known_bytes if allocated_bytes > known_bytes + _NEGLIGIBLE_BYTES else 0

    def copies(self, n_bytes: int) -> bool:
        """Count the copies of a step. Returns whether they are more than was planned for."""
        if n_bytes <= self.copied_bytes:
            return False
        self.copied_bytes = with_room(n_bytes)
        return True

    def stepped(self, trainer: Any, measured: BatchMeter | None) -> list[Event] | None:
        """Learn from an optimizer's step.

        Args:
            trainer: In training.
            measured: The batch, if it was measured.

        Returns:
            The new events; None if the step was as predicted.
        """
        before, self._state_bytes = self._state_bytes, state_bytes(trainer.optimizers)
        found = replace(self.optimizer, state=max(self.optimizer.state, self._state_bytes))
        new: list[Event] = []
        if measured is not None:
            self.rest_measured = True
            made = max(self._state_bytes - before, 0)
            temporary = measured.rest_bytes - made
            if measured.rest_tensor_bytes - made < self._foreseen_bytes:
                # a later step does more, with a workspace that no meta tensor has shown
                temporary = max(temporary, self._foreseen_bytes + measured.workspace_bytes)
            if temporary > found.temporary + _NEGLIGIBLE_BYTES:
                new.append(RestGrew(temporary))
                found = replace(found, temporary=temporary)
            if measured.beside_bytes > found.standing + _NEGLIGIBLE_BYTES:
                new.append(ClosureMeasured(measured.beside_bytes))
                found = replace(found, standing=measured.beside_bytes)
        if found == self.optimizer:
            return None
        self.optimizer = found
        return new


def _weight_bytes(module: LightningModule) -> int:
    return local_bytes((*module.parameters(), *module.buffers()))
