"""Evidence from a few batches on each layer: the inputs' covariance, and the loss's sensitivity to output errors.

Fisher coefficient of a layer: ``E|g|^2 E|y|^2`` of its outputs y, g the loss's gradient by them, found by one backward
a batch. Its square root weighs the layer's barrier ``-log(1 - e^2)`` (see `allocate`). The root and the barrier are
both needed: sums of e^2 times the coefficient, or the coefficient without the root, cut one or two layers to rank 1,
because the loss of one destroyed layer is bounded (KL 2.0 at a quarter of a six-layer network, .001 with both).

Where the step gives no loss, a label is made up: drawn from the outputs where these are logits, else noise around them.
The gradient is then that of the true Fisher matrix.

Covariances are centred: in a network of ReLUs the inputs' mean holds most of their energy, and the bias, or the
BatchNorm behind, takes it up anyway. Second moments made e tiny and the barrier blind (C at x16: KL 1.1 for .24).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctdr_lightning.decomposition.algorithms.linalg import working
from ctdr_lightning.decomposition.choose.batches import Batches, untouched
from ctdr_lightning.decomposition.choose.divergence import Output, kind_of_output, named_tensors, watched_outputs
from ctdr_lightning.decomposition.choose.select import Layer
from ctdr_lightning.decomposition.shapes.geometry import Geometry
from ctdr_lightning.decomposition.shapes.layer_kinds import KINDS, kind_of

# Of the largest eigenvalue: 1e-2 to 1e-4 are told to be enough; smaller ones let the factors grow where no input was.
_REGULARIZATION = 1e-3
_GRADIENT_BATCHES = 4
# Inputs of a layer. The covariance of so many takes 128 MiB, its eigenvalues about 10 s on a core; that of a VGG's
# 25,088 takes 5 GiB, and its eigenvalues were not there after three minutes. Wider layers go by their weights.
_MOST_INPUTS = 4096


@dataclass
class _Sums:
    """Running sums over all calls of one layer."""

    calls: list[tuple[int, ...]] = field(default_factory=list)
    n_inputs: int = 0
    n_outputs: int = 0
    inputs: Tensor | float = 0.0
    moments: Tensor | float = 0.0
    outputs: Tensor | float = 0.0
    squares: float = 0.0
    gradient: float = 0.0


@dataclass(frozen=True)
class Evidence:
    """Evidence from batches on the layers, by name; a layer that no batch reached has no entry.

    Args:
        calls: Input shapes of one batch's calls.
        whitening: Cholesky factors (groups, in, in) of the centred covariance of the inputs' channels.
        fisher: Square roots of the Fisher coefficients, their mean over the layers 1; empty where no loss was found.
        batches: The batches themselves.
    """

    calls: Mapping[str, tuple[tuple[int, ...], ...]]
    whitening: Mapping[str, Tensor]
    fisher: Mapping[str, float]
    batches: Batches = field(repr=False)

    def noted(self, layers: Sequence[Layer]) -> list[Layer]:
        """The layers with their shapes, where these were not known, and their whitening."""
        return [
            replace(
                layer,
                calls=self.calls.get(layer.name, ()) if layer.calls is None else layer.calls,
                whitening=self.whitening.get(layer.name),
            )
            for layer in layers
        ]


def gather(model: nn.Module, layers: Sequence[Layer], batches: Batches) -> Evidence:
    """Run the fitting batches forward, and some of them backward.

    Args:
        model: In any mode; run in evaluation mode, so that dropout does not disturb; left untouched.
        layers: Its layers.
        batches: See `Batches.draw`.
    """
    sums = {layer.name: _Sums() for layer in layers if _geometry(layer) is not None}
    for number, batch in enumerate(batches.fitting):
        backward = number < _GRADIENT_BATCHES
        with untouched(model, training=False, gradients=backward), watched_outputs(model) as given:
            with _listening(layers, sums, first=number == 0) as outputs:
                result = batches.step(model, batch)
            if backward:
                _note_gradients(_loss(result, given, batch), outputs, sums)
    return Evidence(
        calls={name: tuple(s.calls) for name, s in sums.items()},
        whitening={
            layer.name: _whitening(sums[layer.name])
            for layer in layers
            if layer.geometry is not None and sums[layer.name].n_inputs > 1
        },
        fisher=_coefficients(layers, sums),
        batches=batches,
    )


def channel_rows(geometry: Geometry, x: Tensor) -> Tensor:
    """The channels of an input or output as rows, shape (n, channels)."""
    rows = x.movedim(-1 - geometry.n_axes, -1)
    return rows.reshape(-1, rows.shape[-1])


def whitening(covariance: Tensor) -> Tensor:
    """Cholesky factor L (groups, in, in) of a regularised covariance: ``||W L||`` measures the outputs' change."""
    values = torch.linalg.eigvalsh(covariance)
    top = values[:, -1].clamp_min(1e-30)
    # If the mean is far above the spread, rounding gives their difference eigenvalues below zero.
    ridge = _REGULARIZATION + 2 * (-values[:, 0] / top).clamp_min(0.0)
    eye = torch.eye(covariance.shape[-1]).to(covariance)
    return torch.linalg.cholesky(covariance / top[:, None, None] + ridge[:, None, None] * eye)


@contextmanager
def _listening(layers: Sequence[Layer], sums: Mapping[str, _Sums], first: bool) -> Iterator[list[tuple[str, Tensor]]]:
    """Add every call's input and output to the sums; list the outputs that a gradient can be asked for."""
    outputs: list[tuple[str, Tensor]] = []

    def listen(layer: Layer) -> Any:
        geometry, own = _geometry(layer), sums[layer.name]
        assert geometry is not None

        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            x = args[0] if args else next(iter(kwargs.values()))
            _note_call(geometry, own, x.detach(), output.detach(), first)
            if not torch.is_grad_enabled():
                return None
            kept = output if output.requires_grad else output.detach().requires_grad_()
            outputs.append((layer.name, kept))
            return kept.clone()  # an activation in place behind it must not write into the tensor that we ask about

        return layer.module.register_forward_hook(hook, with_kwargs=True)

    with ExitStack() as hooks:
        for layer in layers:
            if layer.name in sums:
                hooks.enter_context(listen(layer))
        yield outputs


def _note_call(geometry: Geometry, own: _Sums, x: Tensor, y: Tensor, first: bool) -> None:
    if first:
        own.calls.append(tuple(x.shape))
    precise = working(y.new_empty(0)).dtype if y.is_floating_point() else torch.float64
    if _has_covariance(geometry):
        rows = channel_rows(geometry, x).reshape(-1, geometry.groups, geometry.group_shape[1]).float()
        own.n_inputs += len(rows)
        own.inputs = own.inputs + rows.sum(0).to(precise)
        own.moments = own.moments + torch.einsum("ngi,ngj->gij", rows, rows).to(precise)
    rows = channel_rows(geometry, y).float()
    own.n_outputs += len(rows)
    own.outputs = own.outputs + rows.sum(0).to(precise)
    own.squares += float(rows.square().sum())


def _has_covariance(geometry: Geometry) -> bool:
    return not geometry.lookup and geometry.group_shape[1] <= _MOST_INPUTS


def _whitening(own: _Sums) -> Tensor:
    assert isinstance(own.inputs, Tensor)
    assert isinstance(own.moments, Tensor)
    mean = own.inputs / own.n_inputs
    return whitening(own.moments / own.n_inputs - mean[:, :, None] * mean[:, None, :])


def _loss(result: Any, given: Sequence[Any], batch: Any) -> Tensor | None:
    """The step's own loss, or one made up; None where nothing can be differentiated."""
    found = result
    if isinstance(result, Mapping) and "loss" in result:
        found = result["loss"]
    if isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad:
        return found.sum()
    made_up = [
        _made_up_loss((name, tensor, *kind_of_output(name, tensor, batch))) for name, tensor in named_tensors(given)
    ]
    return sum(made_up[1:], made_up[0]) if made_up else None


def _made_up_loss(output: Output) -> Tensor:
    """Minus the logarithm of the probability of a label drawn from the output itself."""
    _, tensor, kind, axis = output
    if kind == "logits":
        scores = F.log_softmax(tensor.float(), axis).movedim(axis, -1)
        scores = scores.reshape(-1, scores.shape[-1])
        labels = torch.multinomial(scores.detach().exp(), 1)
        return -scores.gather(1, labels).mean()
    noise = torch.randn_like(tensor, dtype=torch.float32)
    return (tensor.float() * noise).sum() / tensor.detach().float().std().clamp_min(1e-6) / max(len(tensor), 1)


def _note_gradients(loss: Tensor | None, outputs: Sequence[tuple[str, Tensor]], sums: Mapping[str, _Sums]) -> None:
    asked = [(name, y) for name, y in outputs if y.is_floating_point()]
    if loss is None or not loss.requires_grad or not asked:
        return
    found = torch.autograd.grad(loss, [y for _, y in asked], allow_unused=True)
    for (name, _), gradient in zip(asked, found, strict=True):
        if gradient is not None:
            sums[name].gradient += float(gradient.float().square().sum())


def _coefficients(layers: Sequence[Layer], sums: Mapping[str, _Sums]) -> dict[str, float]:
    """Roots of the coefficients; a weight that several layers share has the sum of theirs."""
    roots: dict[str, float] = {}
    for layer in layers:
        if layer.geometry is not None:
            total = sum(_coefficient(sums[name]) for name in (layer.name, *layer.twins) if name in sums)
            roots |= {layer.name: total**0.5} if total > 0 else {}
    mean = sum(roots.values()) / max(len(roots), 1)
    return {name: root / mean for name, root in roots.items()} if mean > 0 else {}


def _coefficient(own: _Sums) -> float:
    if not isinstance(own.outputs, Tensor):
        return 0.0
    mean = own.outputs / own.n_outputs
    energy = max(own.squares / own.n_outputs - float(mean.square().sum()), 0.0)
    return own.gradient * energy / len(mean)


def _geometry(layer: Layer) -> Geometry | None:
    """The geometry of a layer, also of one whose weight is another's."""
    kind = kind_of(layer.module) if layer.owner else None
    return layer.geometry if kind is None else KINDS[kind].geometry(layer.module)
