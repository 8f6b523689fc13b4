"""How far a candidate's outputs are from the dense model's: mean KL over a few batches, the loss that ranks cost.

Outputs are heard while the step runs, so that any step will do. Classes are the last axis of what the model returns,
or the second of an image's (N, C, H, W). BatchNorm uses batch statistics, as re-estimation will set them; dropout is
off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ctdr_lightning.basics.errors import ConfigError

Step = Callable[[Any, Any], Any]
_NORM = nn.modules.batchnorm._BatchNorm
_IMAGE_DIMS = 4


@torch.no_grad()
def outputs_of(model: nn.Module, step: Step, batches: Sequence[Any]) -> list[Tensor]:
    """The model's outputs on some batches, (..., classes) each, on the model's device.

    Args:
        model: Its buffers change as in any training step.
        step: Runs the model on a batch.
        batches: What ``step`` takes.

    Raises:
        ConfigError: When no module of the model returned a tensor with two axes.
    """
    with _judged(model):
        return [_heard(model, step, batch) for batch in batches]


def mean_kl(reference: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Mean KL(reference || found) over all rows, in nats.

    Args:
        reference: Outputs of the dense model, as from `outputs_of`.
        found: Outputs of a candidate on the same batches.
    """
    total, rows = 0.0, 0
    for dense, small in zip(reference, found, strict=True):
        log_p, log_q = _log_classes(dense), _log_classes(small)
        total += float(functional.kl_div(log_q, log_p, reduction="sum", log_target=True))
        rows += log_p.numel() // log_p.shape[-1]
    return max(total / max(rows, 1), 0.0)


def _log_classes(outputs: Tensor) -> Tensor:
    outputs = outputs.movedim(1, -1) if outputs.ndim == _IMAGE_DIMS else outputs
    if outputs.shape[-1] == 1:  # one number a row: a probability against its complement
        outputs = torch.cat((outputs, torch.zeros_like(outputs)), -1)
    return functional.log_softmax(outputs.double(), -1)


def _heard(model: nn.Module, step: Step, batch: Any) -> Tensor:
    """What the model itself returned last; where the step calls its children, what the last of them returned."""
    own: list[Tensor] = []
    children: list[Tensor] = []

    def hear(heard: list[Tensor]) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            tensor = next(_predictions(out), None)
            if tensor is not None:
                heard[:] = [tensor.detach()]

        return hook

    handles = [model.register_forward_hook(hear(own))]
    handles += [child.register_forward_hook(hear(children)) for child in model.children()]
    try:
        step(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    found = own or children
    if not found:
        raise ConfigError(
            f"step(model, batch) called no module of {type(model).__name__} that returns a tensor with two axes.",
            "Call model(inputs) in the step, and let it return the logits.",
        )
    return found[0]


def _predictions(out: Any) -> Iterator[Tensor]:
    """Floating tensors with at least two axes in what a module returned, logits by name first."""
    if isinstance(out, Tensor):
        if out.is_floating_point() and out.ndim > 1:
            yield out
        return
    logits = getattr(out, "logits", None)
    if isinstance(logits, Tensor):
        yield logits
    entries = out.values() if isinstance(out, Mapping) else out if isinstance(out, list | tuple) else ()
    for entry in entries:
        yield from _predictions(entry)


@contextmanager
def _judged(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, training in modes:
            module.training = training and isinstance(module, _NORM)
        yield
    finally:
        for module, training in modes:
            module.training = training
