"""One call from a memory budget to ranks and plan: the function twin of ``CTDRCallback(rank="auto")``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from itertools import count
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ctdr_lightning.basics.checks import real
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.gpu_memory import read_budget
from ctdr_lightning.basics.progress_bar import one_bar, track
from ctdr_lightning.decomposition.choose.batches import first_batches, set_aside
from ctdr_lightning.decomposition.choose.by_share import Start
from ctdr_lightning.decomposition.choose.choices import LayerChoice
from ctdr_lightning.decomposition.choose.uncovered import staying_weights
from ctdr_lightning.decomposition.report import LayerReport, Report, layer_report
from ctdr_lightning.decomposition.trials.bench import Bench, Trial, bench_of
from ctdr_lightning.joint.allowance import Allowance, AllowedDrop, AllowedLoss
from ctdr_lightning.joint.budget_fit import BudgetFit, MetricChange
from ctdr_lightning.joint.ladders import DENSE
from ctdr_lightning.joint.metric import MetricJudge, MetricLike, check_metric
from ctdr_lightning.joint.priced_choice import Limits, PricedChoice
from ctdr_lightning.joint.pricing import Account, Pricer, standing
from ctdr_lightning.joint.search import PATIENT, JointSearch
from ctdr_lightning.joint.twins import twin_with, unmoved
from ctdr_lightning.memory.holders.optimizer_bytes import optimizer_of, predict_for
from ctdr_lightning.memory.lazy.heads import LazyHeads
from ctdr_lightning.memory.lean.choice import LeanChoice
from ctdr_lightning.memory.lean.lean_step import LeanStep
from ctdr_lightning.memory.plans.plan import Plan
from ctdr_lightning.memory.simulator.actions import Recompute
from ctdr_lightning.memory.traces.trace import Trace

# Without a budget the ranks may cost so much. On ten networks a KL below it cost at most 0.3 points of accuracy, or
# 0.01 nats of a language model's loss, before any training; one of 0.005 cost up to 0.7 points.
USUAL_LOSS = 0.002
# Of four of them the outputs diverge from their own mean by 0.7 to 2.2 nats; before training by 2e-8 to 0.15, so that
# a cut would look harmless then.
USUAL_SHARE = 0.01
# Of a harmless divergence: candidates below it lose alike, and the faster one is wanted. Not tuned.
_NEGLIGIBLE_SHARE = 0.1
_REFINING_FLOPS = 3e11  # ten seconds or so of a core; an accelerator has its usual allowance


def fit_to_budget(
    model: nn.Module,
    step: Callable[[Any, Any], Tensor],
    batches: Iterable[Any],
    memory_budget: int | float | str | None = None,
    *,
    max_slowdown: float | None = None,
    max_loss: float | None = None,
    prefer_dense: bool = False,
    rounding: bool = True,
    tiles: bool = False,
    metric: MetricLike | None = None,
    method: str = "auto",
    select: str | Sequence[str] | None = None,
    optimizer: str | Optimizer = "adam",
    beside_bytes: int | Callable[[nn.Module], int] = 0,
    account: Account | None = None,
    given: BudgetFit | None = None,
    spare: Callable[[Callable[[Any, Any], Tensor], Trace, int, float], str] = lambda step, dense, budget, slowdown: "",
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
        max_slowdown: Longest step, in dense steps. None prefers 1.0: where the dense model fits under a plan that takes
            longer, layers are only cut if the step is no longer than that and the cut is harmless: at most 0.002 nats,
            and at most a hundredth of the divergence of the dense outputs from their own mean. Where nothing fits
            within the time, the time gives way. Without a budget it is 1.0.
        max_loss: Largest mean KL of the outputs to the dense model's, in nats, refined; without a budget as harmless.
        prefer_dense: Whether 1.25 is preferred: the dense model is left uncut where a plan of it takes no longer.
        rounding: Whether large linear layers may leave out their outputs where the dense step does not fit with them;
            their cross entropy is taken in chunks, which changes it by rounding. `BudgetFit.leaving_out` names them.
        tiles: Whether modules may run in tiles, with one more forward of each, where no plan of the dense step
            fits. `BudgetFit.tiles` names them.
        metric: Where given, ``max_loss`` is the largest drop of it from the dense model's, refined. A function of a
            model in evaluation mode and a batch that returns a number, higher is better, of which the mean over samples
            is taken; or a metric of torchmetrics, which is given the step's output and the batch's target. It is
            measured on batches that no factor is fitted to, where there is more than one.
        method: Decomposition method, or ``"auto"``.
        select: Patterns of the layers that may be factorized; None allows all.
        optimizer: The optimizer whose state counts as memory: a name such as ``"adam"``, or the optimizer itself.
        beside_bytes: Further bytes that are resident during each step and count in its peak, such as copies of buffers;
            a function of the candidate if they depend on its layers.
        account: In the place of ``optimizer`` and ``beside_bytes``: from a candidate's recorded step and the candidate
            to the account of a batch.
        given: An earlier answer, perhaps edited: its choices are priced, planned and timed anew, nothing else is tried.
        spare: From the step that is priced, its trace, the budget and a limit of time in dense steps to a means of the
            caller's that keeps both, such as smaller batches; empty for none. Asked where the dense model does
            not, before layers are cut.
        progress: Whether to show a progress bar.

    Returns:
        The choice, its costs, and all candidates. ``Tape(fit.plan)`` carries the plan out.

    Raises:
        ConfigError: If an argument cannot be used.
        InfeasibleBudgetError: If nothing fits, with the least peak and the KL at it; or if ``spare`` names a means.

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
    limits = _limits(model, memory_budget, max_slowdown, max_loss, PATIENT if prefer_dense else 1.0)
    account = account or standing(partial(predict_for, optimizer_of(optimizer, model.parameters())), beside_bytes)
    drawn = first_batches(batches)
    if not drawn:
        raise ConfigError("batches has no batch.", "Give a data loader, or a list of training batches.")
    drawn, unseen = set_aside(drawn) if metric is not None else (drawn, [])
    bar = track(count(), "choose ranks: candidates tried", enabled=progress)
    asked: dict[str, Any] = {"select": select, "method": method, "progress": progress, "flops": _refining_flops(model)}
    with one_bar(progress), bench_of(model, drawn, step, **asked) as bench:
        with unmoved(model), closing(bar):
            judge = MetricJudge(metric, model, [*bench.judging, *unseen], step) if metric is not None else None
            with unmoved(model):  # BatchNorm's statistics are as they were when the batches are looked at
                pricer = Pricer(model, step, drawn[0], account)
                pricer, lean = _lean_pricer(pricer, model, drawn[0], limits, tiles) if rounding else (pricer, None)
            forward = partial(_on_batch, pricer.step, drawn[0])
            allowance = _allowance(max_loss, limits, bench, judge)
            harmless = AllowedLoss(partial(_usual_loss, bench), bench.refined) if max_loss is None else allowance
            negligible = partial(_negligible_loss, bench)
            asks = cache(partial(spare, pricer.step, pricer.dense, limits.peak_bytes or 0))
            search = JointSearch(bench, forward, pricer, limits, allowance, harmless, negligible, asks, bar.__next__)
            found = _refined(bench, search, search.run() if given is None else search.given(given.choices, given.start))
        report = _report(bench, found, search.considered[DENSE.share, DENSE.resource].parameters)
        if found.trial is not None:
            bench.adopt(found.trial)
    fit = _told_lean(_fit(found, report, search, pricer, limits, bench, perf_counter() - begin_s), model, lean)
    return fit if judge is None or max_loss is None else replace(fit, metric=_change(judge, found, max_loss))


def _lean_pricer(
    pricer: Pricer, model: nn.Module, batch: Any, limits: Limits, tiles: bool
) -> tuple[Pricer, LeanChoice | None]:
    """The pricer of leaner steps, where the dense one has to be leaner."""
    lean = pricer.choose_lean(limits.peak_bytes, tiles=tiles)
    if lean is None:
        return pricer, None
    # all large layers: a head that is cut has another name
    step = LeanStep(None if lean.outputs is not None else (), lean.step.tiles)
    return Pricer(model, step.step(pricer.step), batch, pricer.account, pricer), lean


def _told_lean(fit: BudgetFit, model: nn.Module, lean: LeanChoice | None) -> BudgetFit:
    if lean is None:
        return fit
    names = LazyHeads(model).names if lean.outputs is not None else ()
    return replace(fit, leaving_out=names, tiles=lean.step.tiles)


def _refined(bench: Bench, search: JointSearch, found: PricedChoice) -> PricedChoice:
    """The answer with refined factors."""
    if found.trial is None:
        return found
    for new in found.trial.layers.values():
        new.zero_grad(set_to_none=True)
    refined = bench.refined(found.trial)
    return search.keep(replace(found, trial=refined).told(loss=refined.divergence))


def _refining_flops(model: nn.Module) -> float | None:
    return None if any(p.device.type != "cpu" for p in model.parameters()) else _REFINING_FLOPS


def _on_batch(step: Callable[[Any, Any], Tensor], batch: Any, model: nn.Module) -> Tensor:
    return step(model, batch)


def _limits(
    model: nn.Module,
    memory_budget: int | float | str | None,
    max_slowdown: float | None,
    max_loss: float | None,
    wish: float,
) -> Limits:
    slowdown = wish if max_slowdown is None else max_slowdown
    real("max_slowdown", slowdown, above=0)
    if max_loss is not None:
        real("max_loss", max_loss, least=0)
    if memory_budget is None:
        return Limits(None, slowdown)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return Limits(read_budget(memory_budget, device), slowdown, wished=max_slowdown is None)


def _allowance(max_loss: float | None, limits: Limits, bench: Bench, judge: MetricJudge | None) -> Allowance:
    if judge is None or max_loss is None:
        usual = max_loss is None and limits.peak_bytes is None
        return AllowedLoss(partial(_usual_loss, bench) if usual else lambda: max_loss, bench.refined)
    return AllowedDrop(max_loss, bench.refined, judge, partial(_metric_of, judge, bench.model))


def _usual_loss(bench: Bench) -> float:
    """The divergence of a harmless cut; none is, as far as outputs tell, before a network is trained."""
    return 0.0 if bench.looks_untrained else min(USUAL_LOSS, USUAL_SHARE * bench.spread)


def _negligible_loss(bench: Bench) -> float:
    return _NEGLIGIBLE_SHARE * _usual_loss(bench)


def _metric_of(judge: MetricJudge, model: nn.Module, trial: Trial) -> float:
    return judge.value(twin_with(model, trial.layers), trial.statistics)


def _change(judge: MetricJudge, found: PricedChoice, allowed: float) -> MetricChange:
    chosen = judge.dense if found.row.metric is None else found.row.metric
    return MetricChange(judge.name, judge.dense, chosen, allowed, judge.n_batches, judge.higher_is_better)


def _fit(
    found: PricedChoice,
    report: Report,
    search: JointSearch,
    pricer: Pricer,
    limits: Limits,
    bench: Bench,
    search_s: float,
) -> BudgetFit:
    assert found.plan is not None
    dense = search.considered[DENSE.share, DENSE.resource]
    return BudgetFit(
        choices=found.rung.choices,
        plan=found.plan,
        report=report,
        budget_bytes=limits.peak_bytes or 0,
        max_slowdown=limits.slowdown,
        dense_peak_bytes=dense.keep_peak_bytes,
        keep_peak_bytes=found.row.keep_peak_bytes,
        dense_s=pricer.dense.seconds,
        seconds=found.row.seconds,
        measured_slowdown=found.row.measured_slowdown,
        measured_peak_bytes=found.measured_peak_bytes,
        considered=tuple(search.considered.values()),
        start=found.trial.start if found.trial is not None else Start(),
        search_s=search_s,
        untrained=found.trial is not None and bench.looks_untrained,
        dense_step=search.dense_step,
    )


def _report(bench: Bench, found: PricedChoice, n_before: int) -> Report:
    """The outcome of each layer, and the plan's bytes inside it; the layers are still dense."""
    rows = []
    for layer in bench.layers:
        new = found.trial.layers.get(layer.name) if found.trial is not None else None
        dense = LayerChoice(reason=layer.refusal or "dense is enough")
        row = layer_report(layer, found.rung.choices.layers.get(layer.name, dense), new)
        rows.append(_with_plan(row, found.plan))
    staying = staying_weights(bench.model, {row.name: "" for row in rows})
    return Report(tuple(rows), n_before, found.row.parameters, found.row.loss, staying=staying)


def _with_plan(row: LayerReport, plan: Plan | None) -> LayerReport:
    assert plan is not None
    inside = [d for d in plan.decisions if d.module == row.name or d.module.startswith(f"{row.name}.")]
    saved = [d for d in inside if plan.trace.values[d.value].saves]
    freed = [d for d in saved if isinstance(d.action, Recompute)]
    saved_bytes, freed_bytes = (sum(d.n_bytes for d in some) for some in (saved, freed))
    again_s = math.fsum(d.seconds for d in freed)
    return replace(row, saved_bytes=saved_bytes, freed_bytes=freed_bytes, recompute_s=again_s)
