"""Learning from the dense model's outputs in addition to the labels (Hinton et al., arXiv:1503.02531).

Reproduced: the softened cross-entropy, scaled by the square of the temperature. Left out: hints from inner layers.
Costs one forward of the dense model a step and its weights' memory, both logged.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ctdr_lightning.basics.duplicate import duplicate
from ctdr_lightning.basics.errors import CheckpointError, ConfigError
from ctdr_lightning.basics.units import GIB
from ctdr_lightning.memory.values.tensors import own_part
from ctdr_lightning.recovery.schedule import Distillation


class Teacher:
    """The dense model, or the part of it whose output are the logits.

    Args:
        model: The model before its layers are cut; copied.
        options: The outputs to learn from, and the device of the copy.
        copied: Whether the model is to be copied; else it is the teacher's own.

    Raises:
        ConfigError: If ``options.module`` names no submodule.
    """

    def __init__(self, model: nn.Module, options: Distillation, *, copied: bool = True) -> None:
        self.options = options
        part = _part(model, options.module)
        self.net = (duplicate(part) if copied else part).requires_grad_(False).eval()
        if options.keep == "bf16":
            self.net.to(torch.bfloat16)
        self.seconds = 0.0
        self.loss: Tensor | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of its parameters and buffers; of sharded ones, those of this process."""
        return sum(own_part(t).nbytes for t in (*self.net.parameters(), *self.net.buffers()))

    def logs(self) -> dict[str, float | Tensor]:
        """Cost and loss of the teacher, for the loggers."""
        said = {} if self.loss is None else {"ctdr/distill_loss": self.loss}
        return {"ctdr/teacher_gib": self.n_bytes / GIB, "ctdr/teacher_s": self.seconds, **said}

    def around(self, module: nn.Module, step: Callable[[], Any]) -> Any:
        """Run a training step and blend the teacher's term into its loss.

        Args:
            module: The student.
            step: Its step; returns a loss or a dict with one.

        Returns:
            The step's output with the blended loss.

        Raises:
            ConfigError: If the step never called the part to listen to.
        """
        heard: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
        part = _part(module, self.options.module)
        hook = part.register_forward_hook(
            lambda _, args, kwargs, out: heard.append((args, kwargs, out)), with_kwargs=True
        )
        try:
            output = step()
        finally:
            hook.remove()
        if output is None:
            return None
        if not heard:
            raise ConfigError(
                f"distill.module={self.options.module!r}: training_step did not call it.",
                f"Name the submodule that gives the logits: {', '.join(name for name, _ in module.named_children())}.",
            )
        args, kwargs, logits = heard[-1]
        return self._blend(output, logits, self._answer(args, kwargs, logits))

    @torch.no_grad()
    def _answer(self, args: tuple[Any, ...], kwargs: dict[str, Any], like: Any) -> Tensor:
        start_s = perf_counter()
        device = _logits(like).device
        if any(tensor.device != device for tensor in (*self.net.parameters(), *self.net.buffers())):
            self.net.to(device)
        enabled = self.options.keep == "bf16" or torch.is_autocast_enabled(device.type)
        with torch.autocast(device.type, torch.bfloat16 if self.options.keep == "bf16" else None, enabled=enabled):
            answer = _logits(self.net(*args, **kwargs))
        if self.options.keep == "host":
            self.net.cpu()
        self.seconds = perf_counter() - start_s
        return answer

    def _blend(self, output: Any, student: Any, teacher: Tensor) -> Any:
        loss = output["loss"] if isinstance(output, dict) else output
        term = softened(_logits(student), teacher, self.options.temperature)
        self.loss = term.detach()
        blended = (1 - self.options.weight) * loss + self.options.weight * term
        return {**output, "loss": blended} if isinstance(output, dict) else blended

    def state_dict(self) -> dict[str, Tensor]:
        """Its weights on the host; whole ones, so that every process has to ask where they are sharded."""
        return {name: _whole(tensor).cpu() for name, tensor in self.net.state_dict().items()}

    def load_state_dict(self, state: Any) -> None:
        """Take the weights of a checkpoint's teacher.

        Raises:
            CheckpointError: If they do not fit.
        """
        try:
            self.net.load_state_dict(state)
        except (RuntimeError, TypeError, AttributeError, KeyError) as error:
            raise CheckpointError(
                "The checkpoint's teacher does not fit the model.", "Build the architecture that was saved."
            ) from error


def softened(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Divergence of softened class distributions, the mean over the batch, times the squared temperature.

    Args:
        student: Logits, classes in the last dimension.
        teacher: Logits of the same shape.
        temperature: Both are divided by it.
    """
    log_p = functional.log_softmax(student.float() / temperature, dim=-1).flatten(0, -2)
    log_q = functional.log_softmax(teacher.float() / temperature, dim=-1).flatten(0, -2)
    return functional.kl_div(log_p, log_q, reduction="batchmean", log_target=True) * temperature**2


def _part(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        close = ", ".join(child for child, _ in model.named_children())
        raise ConfigError(f"distill.module={name!r} is not in the model.", f"Children: {close}.") from None


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _logits(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"distill.module gives {type(output).__name__}, not logits.", "Name the submodule that returns the logits."
        )
    return found
