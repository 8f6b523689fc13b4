"""The one call: select layers, choose ranks, swap the layers, and report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.interrupts import interrupts_held
from ctdr_lightning.basics.progress_bar import one_bar
from ctdr_lightning.decomposition.algorithms.solvers import SOLVERS
from ctdr_lightning.decomposition.choose.batches import N_BATCHES, Batches, Step
from ctdr_lightning.decomposition.choose.by_layer import choose_by_layer
from ctdr_lightning.decomposition.choose.by_share import ELSEWHERE, Start
from ctdr_lightning.decomposition.choose.choices import Choices, checked
from ctdr_lightning.decomposition.choose.costs import CostModel
from ctdr_lightning.decomposition.choose.observe import with_given_shapes, with_shapes
from ctdr_lightning.decomposition.choose.rank import RankLike
from ctdr_lightning.decomposition.choose.request import MethodLike, Request
from ctdr_lightning.decomposition.choose.select import Layer, find_layers
from ctdr_lightning.decomposition.choose.uncovered import staying_weights, without_crumbs
from ctdr_lightning.decomposition.layers.attention import opened
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.report import Report, layer_report, n_parameters, warn_of_losses
from ctdr_lightning.decomposition.trials.bench import Bench, Trial


def decompose(
    model: nn.Module,
    rank: RankLike | Mapping[str, RankLike] = 0.5,
    method: MethodLike | Mapping[str, MethodLike] = "auto",
    select: str | Sequence[str] | None = None,
    *,
    choices: Choices | Mapping[str, Any] | None = None,
    allocate: str | None = "auto",
    solver: str = "gram",
    multiple: int = 1,
    example_input: Any = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    data: Iterable[Any] | None = None,
    n_batches: int = N_BATCHES,
    step: Step | None = None,
    optimizer: str = "adam",
    recompute: bool = False,
    measure: bool = True,
    progress: bool = True,
) -> Report:
    """Replace layers of a model by smaller chains of layers, in place.

    Layers already factorized are left alone, so calling it twice does nothing more.

    Args:
        model: Any module; itself not a layer.
        rank: Share of the parameters of all layers together (float), spent where the loss rises least; a rank (int),
            ranks (tuple, input side first), ``"vbmf"``, ``"error=0.05"``, ``"energy=0.99"``, or a mapping from layer
            pattern to any of these (exact name, glob, ``re:`` expression; the most specific wins), where a float is
            each layer's own share.
        method: Method name, several to choose from, a mapping from pattern to these, or ``"auto"``: the least error at
            equal parameters among Tucker, spatial and plain SVD.
        select: Patterns of the layers to take; ``!`` leaves out. None takes all; a share of layers that together hold
            under 5 % of the model's parameters is then not taken.
        choices: An earlier report's ``choices``, or their ``to_dict()``: applied as they are, no weight is looked at
            to decide; ``rank``, ``method`` and ``select`` are not read.
        allocate: The resource that a float ``rank`` is a share of: ``"loss"`` (parameters, distributed by ``data``),
            ``"parameters"``, ``"flops"``, ``"memory"`` or ``"seconds"``; None gives every layer the same share of its
            own parameters. ``"auto"`` is ``"loss"`` with data and ``"parameters"`` without.
        solver: Registered solver name.
        multiple: Ranks are rounded down to a multiple of this; 8 suits tensor cores.
        example_input: A batch as in training. Its shapes decide, layer by layer, whether factorizing pays: a layer that
            would need more memory, or run slower, stays dense. A tensor, positional arguments, or a mapping of
            keywords.
        input_shapes: The same from shapes alone, by layer name, batch included.
        data: Batches as in training: tensors, mappings of keyword arguments, or tuples whose first entry is the
            input. They tell how much the loss minds each layer's error, the last factors are refitted to the dense
            outputs on them, BatchNorm statistics follow, of several allocations the one whose outputs are nearest to
            the dense model's is taken, and all its factors are refined towards these.
        n_batches: How many batches of ``data`` are used; fewer where they are large. Eight are looked at for every
            allocation, the others serve the refinement.
        step: Runs a model on a batch, ``step(model, batch)``, and gives a scalar loss or the model's outputs. None
            calls the model on the batch's input; without a loss, gradients are those of labels drawn from the outputs.
        optimizer: Whose state counts as memory: ``"adam"``, ``"adamw"``, ``"sgd"``, ``"momentum"`` or ``"rmsprop"``.
        recompute: Whether activations inside factorized layers will be recomputed: they then cost time, not memory.
        measure: Whether, where shapes are known, a micro-benchmark on the layer's device may refuse a factorization
            that runs slower. False insists.
        progress: Whether to show a progress bar when it takes over two seconds.

    Returns:
        The report, one row a layer.

    Raises:
        ConfigError: If an argument cannot be used, or there is nothing to decompose.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        >>> decompose(model, rank=8, select="0").layers[0].ranks
        (8,)
    """
    SOLVERS[solver]
    n_before = n_parameters(model)
    shaped = example_input is not None or input_shapes is not None
    costs = CostModel(optimizer, recompute, measure, gates=shaped)
    with opened(model), one_bar(progress):
        layers = _taken(model, rank, select) if choices is None else find_layers(model)
        if example_input is not None:
            layers = with_shapes(model, layers, example_input)
        elif input_shapes is not None:
            layers = with_given_shapes(layers, input_shapes)
        if choices is not None:
            rank, method, allocate = 0.5, "auto", None  # not read
        resource = _resource(allocate, rank, data is not None)
        request = Request.read([layer.name for layer in layers], rank, method, resource, multiple, costs, progress)
        batches = Batches.draw(data, n_batches, step) if data is not None else None
        bench = Bench(model, layers, request, batches, solver)
        layers = list(bench.noted.values())
        if choices is None:
            _check_known(resource, layers)
        trial = bench.refined(_tried(bench, choices, request, data is not None))
        rows = [layer_report(x, trial.choices.layers[x.name], trial.layers.get(x.name), costs) for x in layers]
        with interrupts_held():  # Ctrl-C comes before the cut or after it
            bench.adopt(trial)
        closed = {row.name: "" if row.reason == ELSEWHERE else row.reason for row in rows}
        staying = staying_weights(model, closed)
    asked = _asked(rank, resource, layers) if choices is None else None
    report = Report(tuple(rows), n_before, n_parameters(model), trial.divergence, asked, staying)
    warn_of_losses(report, _last_of(model, layers))
    return report


def _taken(model: nn.Module, rank: object, select: str | Sequence[str] | None) -> list[Layer]:
    """The layers that a rank is meant for."""
    layers = find_layers(model, select)
    return without_crumbs(model, layers) if select is None and isinstance(rank, float) else layers


def _last_of(model: nn.Module, layers: Sequence[Layer]) -> Layer | None:
    """The model's last layer, where it is among these."""
    name = find_layers(model)[-1].name
    return next((layer for layer in layers if layer.name == name), None)


def _tried(bench: Bench, choices: Choices | Mapping[str, Any] | None, request: Request, has_data: bool) -> Trial:
    """Choose, and make the factors: refitted and refined where there is data, plain elsewhere."""
    layers = list(bench.noted.values())
    if choices is not None:
        given = choices if isinstance(choices, Choices) else Choices.from_dict(choices)
        return bench.trial(checked(given, layers))
    if request.allocate is None:
        return bench.trial(choose_by_layer(layers, request), Start(covariance=has_data))
    return bench.best(next(iter(request.specs.values())).value, request.allocate)


def _resource(allocate: str | None, rank: object, has_data: bool) -> str | None:
    """The resource of which a share is spent over all layers; None where each layer is chosen by itself."""
    if allocate == "loss" and not has_data:
        raise ConfigError('allocate="loss" needs data.', 'Give data=loader, or write allocate="parameters".')
    if allocate == "auto":
        return "parameters" if isinstance(rank, float) else None
    return "parameters" if allocate == "loss" else allocate


def _check_known(allocate: str | None, layers: Sequence[Layer]) -> None:
    bare = next((layer.name for layer in layers if any(p.is_meta for p in layer.module.parameters())), None)
    if bare is not None:
        raise ConfigError(
            f"the weights of layer {bare!r} are on the meta device, so that no ranks can be chosen by them.",
            "Give choices= of an earlier report, or decompose once the weights are there.",
        )
    if allocate not in (None, "parameters") and all(layer.calls is None for layer in layers):
        raise ConfigError(f"allocate={allocate!r} needs the layers' input shapes.", "Give example_input=.")


def _asked(rank: object, resource: str | None, layers: Sequence[Layer]) -> float | None:
    """The share of the parameters that is asked for; None where it is of something else, or an earlier call's."""
    fresh = not any(isinstance(layer.module, FactorizedLayer) for layer in layers)
    return rank if isinstance(rank, float) and resource in (None, "parameters") and fresh else None
