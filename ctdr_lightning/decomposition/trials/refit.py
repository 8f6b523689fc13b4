"""Refit: the last factor of every factorized layer by least squares, in the order in which the layers run.

Paper: the idea of AA-SVD (arXiv 2604.02119): fit a layer's factors to the dense network's outputs on the inputs that
really reach it in the compressed network. Reproduced: compressed inputs, dense outputs, layer after layer. Changed:
only the last factor is fitted, which is linear and so has a closed form; rows are centred where a bias or a BatchNorm
behind takes the mean up; the ridge pulls towards the factor that is there, not towards zero; a held-out fifth of the
rows must agree. BatchNorm statistics move by the difference that the same batch shows between the two networks, which
needs far fewer batches than new averages. Left out: block-wise refinement, layers that run several times a step,
weights that others than an embedding and its twins share.
Complexity: one forward of the dense network and one of the compressed, O(rows f^2 + f^3) a layer of f hidden channels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ctdr_lightning.decomposition.choose.batches import Batches, merged, untouched
from ctdr_lightning.decomposition.choose.select import Layer
from ctdr_lightning.decomposition.choose.sensitivity import channel_rows
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.methods import METHODS
from ctdr_lightning.decomposition.shapes.geometry import Geometry
from ctdr_lightning.decomposition.shapes.layer_kinds import weight_of

# Of the mean energy of the hidden channels.
_RIDGE = 1e-3
_MOST_ROWS = 16_384
_TARGET_BYTES = 512 << 20  # for all layers' dense outputs together
_NEVER_MORE = 4.0  # no variance is corrected by more than this factor: a nearly dead channel's ratio is noise

Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
Statistics = dict[str, tuple[Tensor, Tensor]]


class DenseRecord:
    """The dense network's outputs on one batch, layer by layer, as far as a refit needs them.

    Args:
        model: Dense, left untouched.
        layers: The layers that may be refitted.
        batches: The fitting ones are merged into one.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], batches: Batches) -> None:
        self.batch, self.step = merged(batches.fitting), batches.step
        self.targets: dict[str, tuple[Tensor, Tensor]] = {}
        self.absorbed: set[str] = set()
        self.statistics: Statistics = {}
        self._calls: dict[str, int] = {}
        self._recent: deque[tuple[str, Tensor]] = deque(maxlen=4)  # kept alive, so that no id is used again
        open_layers = [layer for layer in layers if layer.geometry is not None and _fittable(layer, layer.geometry)]
        most = _TARGET_BYTES // max(sum(4 * g.out_size for layer in open_layers if (g := layer.geometry)), 1)
        with ExitStack() as hooks, untouched(model, training=False), _norm_inputs(model, self._note_norm):
            for layer in open_layers:
                hooks.enter_context(layer.module.register_forward_hook(self._note(layer, most)))
            self.step(model, self.batch)
        self._recent.clear()
        for name, calls in self._calls.items():
            if calls > 1:
                self.targets.pop(name, None)

    def _note(self, layer: Layer, most: int) -> Callable[..., None]:
        geometry = layer.geometry
        assert geometry is not None

        def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
            self._calls[layer.name] = self._calls.get(layer.name, 0) + 1
            self._recent.append((layer.name, output))
            rows = channel_rows(geometry, output)
            chosen = _sample(len(rows), min(most, _MOST_ROWS), rows.device)
            self.targets[layer.name] = chosen, rows[chosen].float()

        return hook

    def _note_norm(self, name: str, _norm: Norm, x: Tensor) -> None:
        self.absorbed |= {layer for layer, output in self._recent if output is x}
        self.statistics.setdefault(name, _statistics(x))


@torch.no_grad()
def refit(model: nn.Module, factorized: Mapping[str, FactorizedLayer], record: DenseRecord) -> Statistics:
    """Fit the last factors of a model's layers, in place.

    Args:
        model: The compressed network; its buffers are left as they were.
        factorized: Its factorized layers, by the names that the record knows.
        record: Record of the dense network.

    Returns:
        Running mean and variance that its BatchNorm layers should have, by name.
    """
    corrected: Statistics = {}
    if not factorized and not record.statistics:
        return corrected

    def correct(name: str, norm: Norm, x: Tensor) -> None:
        if norm.running_mean is None or norm.running_var is None or name in corrected or name not in record.statistics:
            return
        (mean, variance), (dense_mean, dense_variance) = _statistics(x), record.statistics[name]
        ratio = (variance / dense_variance.clamp_min(1e-12)).clamp(1 / _NEVER_MORE**2, _NEVER_MORE)
        norm.running_mean += (mean - dense_mean).to(norm.running_mean)
        norm.running_var *= ratio.to(norm.running_var)
        corrected[name] = norm.running_mean.clone(), norm.running_var.clone()

    with ExitStack() as hooks, untouched(model, training=False), _norm_inputs(model, correct):
        for name, layer in factorized.items():
            if name in record.targets:
                last = layer.factor_layers[-1]
                hooks.enter_context(last.register_forward_pre_hook(_fitting(name, layer, record)))
        record.step(model, record.batch)
    return corrected


@torch.no_grad()
def set_statistics(model: nn.Module, statistics: Statistics) -> None:
    """Give BatchNorm layers the running statistics that `refit` returned."""
    for name, (mean, variance) in statistics.items():
        norm: Any = model.get_submodule(name)
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)


def _fitting(name: str, layer: FactorizedLayer, record: DenseRecord) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
        chosen, target = record.targets[name]
        fit_last_factor(layer, args[0], chosen, target, absorbed=name in record.absorbed)

    return hook


def fit_last_factor(layer: FactorizedLayer, hidden: Tensor, chosen: Tensor, target: Tensor, absorbed: bool) -> None:
    """Fit the last factor, and the bias where there is one.

    Args:
        layer: Changed in place.
        hidden: Input of its last factor.
        chosen: Rows (output positions over the whole batch) that are fitted, shape (n,).
        target: The dense layer's outputs there, shape (n, out).
        absorbed: Whether the next layer removes the outputs' mean.
    """
    factor, module = layer.factor_geometries[-1], layer.factor_layers[-1]
    design = _design(factor, hidden, chosen) if METHODS[layer.method].chained else hidden[chosen].float()
    weight = factor.canonical(weight_of(module).detach()).float()
    start = weight.flatten(2)
    centred = absorbed or layer.bias is not None
    wanted = target.reshape(len(target), design.shape[1], -1)
    shared = design.shape[1] != start.shape[0]  # a train's last core runs once an entry of the other modes
    offset = wanted.mean(0) if centred else torch.zeros_like(wanted[0])
    middle = design.mean(0) if centred else torch.zeros_like(design[0])
    found = _least_squares(design - middle, wanted - offset, start, shared)
    if found is None:
        return
    weight_of(module).copy_(factor.native(found.reshape(weight.shape)))
    if (bias := layer.bias) is not None:
        product = middle @ found[0].T if shared else torch.einsum("gf,gof->go", middle, found)
        bias.copy_((offset - product).flatten())


def _least_squares(design: Tensor, wanted: Tensor, start: Tensor, shared: bool) -> Tensor | None:
    """Weights (g, out, f) for rows (n, g, f) and (n, g, out); None where the held-out rows say that nothing is won."""
    if shared:
        design, wanted = design.flatten(0, 1)[:, None], wanted.flatten(0, 1)[:, None]
    n_fitted = max(len(design) * 4 // 5, 1)
    rest = wanted - torch.einsum("ngf,gof->ngo", design, start)
    x, y = design[:n_fitted].double(), rest[:n_fitted].double()
    gram = torch.einsum("ngi,ngj->gij", x, x)
    energy = gram.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)
    gram += _RIDGE * energy[:, None, None] * torch.eye(gram.shape[-1]).to(gram)
    change = torch.linalg.solve(gram, torch.einsum("ngi,ngo->gio", x, y)).mT.to(start)
    held_out, left = design[n_fitted:], rest[n_fitted:]
    if not bool(torch.isfinite(change).all()) or not len(held_out):
        return None
    better = left - torch.einsum("ngf,gof->ngo", held_out, change)
    return start + change if float(better.square().sum()) < float(left.square().sum()) else None


def _design(factor: Geometry, hidden: Tensor, chosen: Tensor) -> Tensor:
    """Inputs that the factor's weight multiplies at the chosen output positions, shape (n, groups, in * taps)."""
    if factor.n_taps == 1:
        rows = channel_rows(factor, hidden)[chosen]
        return rows.reshape(len(chosen), factor.groups, -1).float()
    windows = _windows(factor, hidden)  # (batch, channels, *axes, *taps), a view
    axes = windows.shape[2 : 2 + factor.n_axes]
    place = torch.unravel_index(chosen, (len(windows), *axes))
    rows = windows.movedim(1, 1 + factor.n_axes)[place]  # (n, channels, *taps)
    return rows.reshape(len(chosen), factor.groups, -1).float()


def _windows(factor: Geometry, x: Tensor) -> Tensor:
    """The window of x under the kernel at each output position, for convolutions and transposed ones."""
    x = x if x.ndim == factor.n_axes + 2 else x[None]
    pads: list[tuple[int, int]] = []
    for axis, (size, step) in enumerate(zip(factor.kernel, factor.dilation, strict=True)):
        reach = step * (size - 1)
        if factor.padding == "same":
            pads.append((reach // 2, reach - reach // 2))
        else:
            pad = 0 if isinstance(factor.padding, str) else factor.padding[axis]
            extra = factor.output_padding[axis] if factor.transposed else 0
            pads.append((reach - pad, reach - pad + extra) if factor.transposed else (pad, pad))
    strides = factor.stride
    if factor.transposed:
        x, strides = _spread(x, factor.stride), (1,) * factor.n_axes
    flat = [side for pair in reversed(pads) for side in pair]
    mode = "constant" if factor.padding_mode == "zeros" else factor.padding_mode
    x = F.pad(x, flat, mode=mode)
    for axis, (size, step, stride) in enumerate(zip(factor.kernel, factor.dilation, strides, strict=True)):
        x = x.unfold(2 + axis, step * (size - 1) + 1, stride)[..., ::step]
    return x.flip(tuple(range(-factor.n_axes, 0))) if factor.transposed else x


def _spread(x: Tensor, strides: Sequence[int]) -> Tensor:
    """Zeros between the entries of each axis, as a transposed convolution sees its input."""
    sizes = [(size - 1) * step + 1 for size, step in zip(x.shape[2:], strides, strict=True)]
    wide = x.new_zeros(*x.shape[:2], *sizes)
    index: tuple[Any, ...] = (..., *(slice(None, None, step) for step in strides))
    wide[index] = x
    return wide


def _fittable(layer: Layer, geometry: Geometry) -> bool:
    """Whether a layer's outputs say enough to fit its weight: where others share it, if it is the embedding.

    A GPT on 2,000 words, tied, at 1/4: .167 nats unfitted, .142 by the embedding's outputs, .168 to .33 by the head's,
    .167 by both, weighed by their gradients.
    """
    return not layer.twins or geometry.lookup


def _sample(n_rows: int, most: int, device: torch.device) -> Tensor:
    """Some rows in random order, the same in every run."""
    order = torch.randperm(n_rows, generator=torch.Generator().manual_seed(0))
    return order[:most].to(device)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel, in two passes: ``torch.var_mean`` takes six times as long on a processor."""
    rows = x.detach().float().reshape(*x.shape[:2], -1)
    mean = rows.mean(2).mean(0)
    return mean, (rows - mean[:, None]).square_().mean(2).mean(0)


@contextmanager
def _norm_inputs(model: nn.Module, note: Callable[[str, Norm, Tensor], None]) -> Iterator[None]:
    """Hear of every input of a BatchNorm layer, by the layer's name."""

    def listen(name: str, norm: Norm) -> Any:
        return norm.register_forward_pre_hook(lambda _module, args: note(name, norm, args[0]) if args else None)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, Norm):
                hooks.enter_context(listen(name, module))
        yield
