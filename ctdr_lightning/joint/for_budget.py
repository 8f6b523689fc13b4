"""One call from a memory budget to ranks and plan: the function twin of ``CTDRCallback(rank="auto")``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ctdr_lightning.basics.checks import real
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.progress_bar import one_bar, track
from ctdr_lightning.basics.units import parse_bytes
from ctdr_lightning.decomposition.choose.batches import first_batches, set_aside
from ctdr_lightning.decomposition.choose.choices import LayerChoice
from ctdr_lightning.decomposition.choose.costs import OPTIMIZER_STATES
from ctdr_lightning.decomposition.choose.select import Layer
from ctdr_lightning.decomposition.chooser import rank_chooser
from ctdr_lightning.decomposition.trial import Trial
from ctdr_lightning.joint.allowance import Allowance, AllowedDrop, AllowedLoss
from ctdr_lightning.joint.budget_fit import BudgetFit, LayerCost, MetricChange
from ctdr_lightning.joint.metric import MetricJudge, MetricLike, check_metric
from ctdr_lightning.joint.pricing import Pricer
from ctdr_lightning.joint.proposals import DENSE, RESOURCES, SHARES, Proposer
from ctdr_lightning.joint.search import JointSearch, Limits, PricedChoice
from ctdr_lightning.joint.twins import unmoved
from ctdr_lightning.memory.plans.actions import Recompute

# Without a budget the ranks may cost so much: on five networks a KL below it cost at most 0.3 points of accuracy, or
# 0.011 nats of a language model's loss, before any training.
USUAL_LOSS = 0.005
_REFINING_FLOPS = 3e11  # ten seconds or so of a core; an accelerator has its usual allowance


def fit_to_budget(
    model: nn.Module,
    step: Callable[[Any, Any], Tensor],
    batches: Iterable[Any],
    memory_budget: int | float | str | None = None,
    *,
    max_slowdown: float = 1.0,
    max_loss: float | None = None,
    metric: MetricLike | None = None,
    method: str = "auto",
    select: str | Sequence[str] | None = None,
    optimizer: str | Optimizer = "adam",
    beside_bytes: int | Callable[[nn.Module], int] = 0,
    given: BudgetFit | None = None,
    progress: bool = True,
) -> BudgetFit:
    """Choose ranks and memory plan together, and factorize the model in place.

    Of the dense model and of allocations at several shares, each under its fastest plan, the one is taken whose outputs
    are nearest to the dense ones and whose step fits the budget and is not too slow. Dense plus recomputation is one
    of them. Modes, buffers, gradients and torch's random state are left as they were.

    Args:
        model: Trained and dense, in training mode, on its device.
        step: From the model and a batch to a scalar loss; it must run the model it is given.
        batches: Training batches, all of the first one's shapes at best; up to eight are looked at for every candidate,
            and up to 32 serve the refinement of the answer.
        memory_budget: Bytes that a step's true peak may reach, weights, gradients and optimizer state included:
            ``"8GiB"``, a number, or a fraction of the device's memory. None asks for the least peak within
            ``max_loss``.
        max_slowdown: Longest step, in dense steps.
        max_loss: Largest mean KL of the outputs to the dense model's, in nats, refined; without a budget 0.005.
        metric: Where given, ``max_loss`` is the largest drop of it from the dense model's, refined. A function of a
            model in evaluation mode and a batch that returns a number, higher is better, of which the mean over samples
            is taken; or a metric of torchmetrics, which is given the step's output and the batch's target. It is
            measured on batches that no factor is fitted to, where there is more than one.
        method: Decomposition method, or ``"auto"``.
        select: Patterns of the layers that may be factorized; None allows all.
        optimizer: Whose state counts as memory: a name such as ``"adam"``, or the optimizer itself.
        beside_bytes: What else stands in memory during each step and counts in its peak, such as copies of buffers;
            a function of the candidate where it depends on its layers.
        given: An earlier answer, perhaps edited: its choices are priced, planned and timed anew, nothing else is tried.
        progress: Whether to show a progress bar.

    Returns:
        What was chosen, what it costs, and what else was looked at. ``Tape(fit.plan)`` carries the plan out.

    Raises:
        ConfigError: When an argument cannot be used.
        InfeasibleBudgetError: When nothing fits; it names the least peak and the KL at it.

    Example:
        >>> net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        >>> batches = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(2)]
        >>> step = lambda net, batch: nn.functional.cross_entropy(net(batch[0]), batch[1])
        >>> fit = fit_to_budget(net, step, batches, "1MiB", max_slowdown=4.0)
        >>> fit.peak_bytes <= 2**20
        True
    """
    begin_s = perf_counter()
    check_metric(metric, max_loss)
    limits = _limits(model, memory_budget, max_slowdown, max_loss)
    drawn = first_batches(batches)
    if not drawn:
        raise ConfigError("batches has no batch.", "Give a data loader, or a list of training batches.")
    drawn, unseen = set_aside(drawn) if metric is not None else (drawn, [])
    bar = track(count(), "choose ranks", total=1 + len(RESOURCES) * len(SHARES), enabled=progress)
    asked: dict[str, Any] = {"select": select, "method": method, "progress": progress, "flops": _refining_flops(model)}
    chosen_from = rank_chooser(model, drawn, step, **asked)
    with one_bar(progress), chosen_from as chooser:
        with unmoved(model), closing(bar):
            held_out = [*chooser.judging, *unseen]
            judge = MetricJudge(metric, model, held_out, step) if metric is not None else None
            beside = beside_bytes if callable(beside_bytes) else lambda _candidate: beside_bytes
            with unmoved(model):  # BatchNorm's statistics are as they were when the batches are looked at
                pricer = Pricer(model, step, drawn[0], states_per_weight(optimizer), beside)
            forward = partial(_on_batch, step, drawn[0])
            proposer = Proposer(chooser, hurried=pricer.is_long)
            allowance = _allowance(max_loss, limits, proposer, judge)
            search = JointSearch(model, forward, pricer, proposer, limits, allowance, lambda: next(bar))
            found = search.run() if given is None else search.given(given.choices)
            if found.trial is not None:
                for new in found.trial.layers.values():
                    new.zero_grad(set_to_none=True)
                refined = chooser.refined(found.trial)
                found = search.keep(replace(found, trial=refined).told(loss=refined.divergence))
        if found.trial is not None:
            chooser.adopt(found.trial)
        layers = tuple(_layer_cost(layer, found) for layer in chooser.layers)
    fit = _fit(found, layers, search, pricer, limits, perf_counter() - begin_s)
    return fit if judge is None or max_loss is None else replace(fit, metric=_change(judge, found, max_loss))


def _refining_flops(model: nn.Module) -> float | None:
    return None if any(p.device.type != "cpu" for p in model.parameters()) else _REFINING_FLOPS


def _on_batch(step: Callable[[Any, Any], Tensor], batch: Any, model: nn.Module) -> Tensor:
    return step(model, batch)


def states_per_weight(optimizer: str | Optimizer) -> float:
    """Numbers that an optimizer keeps for each weight: 2 for Adam.

    Args:
        optimizer: A name, or an optimizer; one without state yet is tried on a dummy parameter.

    Raises:
        ConfigError: When the name is not known.
    """
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZER_STATES:
            raise ConfigError(
                f"optimizer={optimizer!r} is not known.",
                f"Valid names: {', '.join(OPTIMIZER_STATES)}; or give the optimizer itself.",
            )
        return float(OPTIMIZER_STATES[optimizer])
    state = {p: entries for p, entries in optimizer.state.items() if entries}
    if not state:
        side = 64
        dummy = nn.Parameter(torch.zeros(side, side))
        dummy.grad = torch.zeros(side, side)
        taken = signature(type(optimizer)).parameters  # AdamW's defaults hold an argument that only Adam takes
        trial = type(optimizer)([dummy], **{k: v for k, v in optimizer.defaults.items() if k in taken})
        trial.step()
        state = {dummy: trial.state[dummy]}
    kept = sum(t.numel() for entries in state.values() for t in entries.values() if isinstance(t, Tensor) and t.ndim)
    return kept / max(sum(p.numel() for p in state), 1)


def _limits(
    model: nn.Module, memory_budget: int | float | str | None, max_slowdown: float, max_loss: float | None
) -> Limits:
    real("max_slowdown", max_slowdown, above=0)
    if max_loss is not None:
        real("max_loss", max_loss, least=0)
    if memory_budget is None:
        return Limits(None, max_slowdown)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    return Limits(parse_bytes(memory_budget, total_bytes=total), max_slowdown)


def _allowance(max_loss: float | None, limits: Limits, proposer: Proposer, judge: MetricJudge | None) -> Allowance:
    if judge is None or max_loss is None:
        usual = USUAL_LOSS if limits.peak_bytes is None else None
        return AllowedLoss(usual if max_loss is None else max_loss, proposer.refined)
    return AllowedDrop(max_loss, proposer.refined, judge, partial(_metric_of, judge, proposer))


def _metric_of(judge: MetricJudge, proposer: Proposer, trial: Trial) -> float:
    return judge.value(proposer.standing(trial), trial.statistics)


def _change(judge: MetricJudge, found: PricedChoice, allowed: float) -> MetricChange:
    chosen = judge.dense if found.row.metric is None else found.row.metric
    return MetricChange(judge.name, judge.dense, chosen, allowed, judge.n_batches, judge.higher_is_better)


def _fit(
    found: PricedChoice,
    layers: tuple[LayerCost, ...],
    search: JointSearch,
    pricer: Pricer,
    limits: Limits,
    search_s: float,
) -> BudgetFit:
    assert found.plan is not None
    dense = search.considered[DENSE.share, DENSE.resource]
    return BudgetFit(
        choices=found.proposal.choices,
        plan=found.plan,
        loss=found.row.loss,
        budget_bytes=limits.peak_bytes or 0,
        max_slowdown=limits.slowdown,
        dense_peak_bytes=dense.keep_peak_bytes,
        keep_peak_bytes=found.row.keep_peak_bytes,
        dense_s=pricer.dense.seconds,
        seconds=found.row.seconds,
        measured_slowdown=found.row.measured_slowdown,
        measured_peak_bytes=found.measured_peak_bytes,
        parameters_before=dense.parameters,
        parameters_after=found.row.parameters,
        layers=layers,
        considered=tuple(search.considered.values()),
        search_s=search_s,
    )


def _layer_cost(layer: Layer, found: PricedChoice) -> LayerCost:
    assert found.plan is not None
    name, new = layer.name, found.trial.layers.get(layer.name) if found.trial is not None else None
    choice = found.proposal.choices.layers.get(name, LayerChoice(reason=layer.refusal or "dense is enough"))
    inside = [d for d in found.plan.decisions if d.module == name or d.module.startswith(f"{name}.")]
    saved = [d for d in inside if found.plan.trace.values[d.value].saves]
    dropped = [d for d in saved if isinstance(d.action, Recompute)]
    n_before = sum(p.numel() for p in layer.module.parameters())
    return LayerCost(
        name=name,
        kind=layer.kind,
        method=choice.method or "",
        ranks=choice.ranks,
        parameters_before=n_before,
        parameters_after=sum(p.numel() for p in new.parameters()) if new is not None else n_before,
        error=0.0 if math.isnan(choice.error) else choice.error,
        kept_bytes=sum(d.n_bytes for d in saved),
        freed_bytes=sum(d.n_bytes for d in dropped),
        recompute_s=math.fsum(d.seconds for d in dropped),
        reason=choice.reason,
    )
