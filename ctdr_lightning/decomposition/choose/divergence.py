"""Distance of a changed model's outputs from the dense model's, for outputs of any kind.

Logits (found by name, by class labels in the batch, or as log-probabilities) and probabilities are compared by the
mean Kullback-Leibler divergence KL(dense || changed) in nats. Other outputs are compared by half the squared error over
the variance of the dense outputs: the KL of two Gaussians of that variance. Both are 0 where nothing changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctdr_lightning.basics.nests import leaves_of
from ctdr_lightning.basics.torch_private import tree_leaves
from ctdr_lightning.decomposition.choose.batches import Batches, untouched

Kind = Literal["logits", "probabilities", "shares", "values"]
Output = tuple[str, Tensor, Kind, int]
_SMALL = 1e-6


class Judge:
    """Remembers the dense model's outputs on a few batches, and compares a changed model's with them.

    Args:
        model: Dense; run in evaluation mode, left untouched.
        batches: The judging ones are run.
    """

    def __init__(self, model: nn.Module, batches: Batches) -> None:
        self._batches = batches
        self._dense = [outputs_of(model, batches, batch) for batch in batches.judging]

    def divergence(self, model: nn.Module) -> float:
        """Mean divergence over the judging batches, in nats; infinite where an output is not finite."""
        total = 0.0
        for batch, dense in zip(self._batches.judging, self._dense, strict=True):
            found = outputs_of(model, self._batches, batch)
            pairs = list(zip(dense, found, strict=False))
            total += sum(_between(d, f[1]) for d, f in pairs) / max(len(pairs), 1)
        mean = total / len(self._dense)
        return mean if mean == mean else float("inf")

    def spread(self) -> float:
        """Mean divergence of the dense outputs from their own mean, in nats: small where the model knows little yet."""
        outputs = [output for found in self._dense for output in found]
        return sum(_between(output, _mean_of(output)) for output in outputs) / max(len(outputs), 1)


def outputs_of(model: nn.Module, batches: Batches, batch: Any) -> list[Output]:
    """Every tensor that a step's last module calls give, with its name, kind and class axis."""
    with untouched(model, training=False), watched_outputs(model) as given:
        batches.step(model, batch)
    found: list[Output] = []
    for name, tensor in named_tensors(given):
        kind, axis = kind_of_output(name, tensor, batch)
        found.append((name, tensor.detach().float(), kind, axis))
    return found


@contextmanager
def watched_outputs(model: nn.Module) -> Iterator[list[Any]]:
    """Collect the outputs of the outermost calls of modules that hold parameters.

    A step may call the model itself, or several parts of it one after another. An output that a later call takes as
    its input is not the model's, so it is dropped.
    """
    given: list[Any] = []
    depth = 0

    def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal depth
        if depth == 0:
            taken = {id(leaf) for leaf in tree_leaves((args, kwargs))}
            given[:] = [g for g in given if not taken & {id(leaf) for leaf in _leaves(g)}]
        depth += 1

    def leave(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            given.append(output)

    with ExitStack() as hooks:
        for module in model.modules():
            if next(module.parameters(), None) is not None:
                hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(leave, with_kwargs=True))
        yield given


def kind_of_output(name: str, tensor: Tensor, batch: Any) -> tuple[Kind, int]:
    """Kind of an output, and the axis of its classes."""
    tensor = tensor.detach()
    axis = _class_axis(tensor, batch)
    if axis is not None or "logits" in name:
        return "logits", -1 if axis is None else axis
    low, high = float(tensor.min()), float(tensor.max())
    wide = tensor.ndim > 1 and tensor.shape[-1] > 1
    if high <= 0 and wide and bool(((tensor.float().exp().sum(-1) - 1).abs() < 1e-3).all()):
        return "logits", -1
    if low >= 0 and high <= 1:
        sums_to_one = wide and bool(((tensor.float().sum(-1) - 1).abs() < 1e-3).all())
        return ("shares" if sums_to_one else "probabilities"), -1
    return "values", -1


def _class_axis(tensor: Tensor, batch: Any) -> int | None:
    """The axis of the classes: the one without which integer labels of the batch fit the output."""
    for leaf in leaves_of(batch):
        if not isinstance(leaf, Tensor) or leaf.dtype not in (torch.int64, torch.int32) or tensor.ndim < 2:
            continue
        for axis in (1, tensor.ndim - 1):
            if tensor.shape[axis] > 1 and leaf.shape == (*tensor.shape[:axis], *tensor.shape[axis + 1 :]):
                return axis
    return None


def _leaves(output: Any) -> list[Any]:
    return tree_leaves(dict(output) if isinstance(output, Mapping) else output)


def named_tensors(given: Sequence[Any]) -> list[tuple[str, Tensor]]:
    """The floating-point tensors of some outputs, by their key; of a mapping with logits these alone."""
    found = []
    for output in given:
        if isinstance(output, Mapping) and "logits" in output:
            output = {"logits": output["logits"]}
        named = output.items() if isinstance(output, Mapping) else [("", output)]
        for name, entry in named:
            leaves = [leaf for leaf in tree_leaves(entry) if isinstance(leaf, Tensor)]
            found += [(str(name), t) for t in leaves if t.is_floating_point() and t.numel() > 1]
    return found


@torch.no_grad()
def _between(dense: Output, changed: Tensor) -> float:
    return float(distance(dense, changed)) if dense[1].shape == changed.shape else float("inf")


def _mean_of(output: Output) -> Tensor:
    """The one prediction for all samples that is nearest to an output."""
    _, given, kind, axis = output
    if kind == "values":
        return given.mean().expand_as(given)
    if kind == "probabilities":
        return given.mean(0, keepdim=True).expand_as(given)
    others = [dim for dim in range(given.ndim) if dim != axis % given.ndim]
    shares = F.softmax(given, axis) if kind == "logits" else given
    mean = shares.mean(others, keepdim=True).expand_as(given)
    return mean.clamp_min(_SMALL).log() if kind == "logits" else mean


def distance(dense: Output, changed: Tensor) -> Tensor:
    """Mean divergence of an output from the dense model's, in nats; differentiable by the changed one.

    Args:
        dense: The dense model's output.
        changed: Of the same shape.
    """
    _, before, kind, axis = dense
    after = changed.float()
    if kind == "logits":
        p, q = F.log_softmax(before, axis), F.log_softmax(after, axis)
        return (p.exp() * (p - q)).sum(axis).mean()
    if kind == "shares":
        p, q = before.clamp_min(_SMALL), after.clamp_min(_SMALL)
        return (p * (p / q).log()).sum(axis).mean()
    if kind == "probabilities":
        p, q = before.clamp(_SMALL, 1 - _SMALL), after.clamp(_SMALL, 1 - _SMALL)
        return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).flatten(1).sum(1).mean()
    variance = before.var().clamp_min(1e-12)
    return (before - after).square().mean() / (2 * variance)
