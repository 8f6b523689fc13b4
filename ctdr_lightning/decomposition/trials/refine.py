"""Refine: all factors of a compressed network together, a few gradient steps towards the dense network's outputs.

Paper: the block refinement of AA-SVD (arXiv 2604.02119), and knowledge distillation (Hinton et al., arXiv 1503.02531)
without labels. Reproduced: the factors alone are moved, the target is the dense network's output on a few batches.
Changed: the whole network is one block, and the distance is that by which allocations are judged (`choose.divergence`);
terms for the layers' own outputs were tried and left out (C, R and G came out within 5 % with them, at 1.4 times the
time). Adam's step is a share of each factor's root mean square, since the two factors of a layer may have any scale
between them. The divergence is measured on held-out batches: after every round the best factors are kept,
or restored. This is no training: no label, no augmentation, no random state, BatchNorm and dropout as in evaluation.
Complexity: forward and backward of the compressed network a step, at most 200 steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Adam

from ctdr_lightning.basics.interrupts import put_back_after
from ctdr_lightning.basics.progress_bar import track
from ctdr_lightning.decomposition.choose.batches import Batches, untouched
from ctdr_lightning.decomposition.choose.divergence import (
    Judge,
    Output,
    distance,
    named_tensors,
    outputs_of,
    watched_outputs,
)
from ctdr_lightning.decomposition.layers.factorized import FactorizedLayer
from ctdr_lightning.decomposition.trials.refit import Statistics, set_statistics

_log = logging.getLogger(__name__)

# Ten rounds of twenty steps: on G at x4 the divergence fell from .103 to .050 in four rounds and to .041 in eight.
_ROUNDS, _ROUND_STEPS = 10, 20
# Share of a factor's root mean square that its entries move by in a step. .003 to .004 made no round worse on R;
# .01 doubled the divergence at first, .03 did not come back, though on G .03 was best: so it grows while it pays.
_RATE, _FASTER, _SLOWER = 0.004, 1.5, 0.3
# Two rounds in a row that win less, as a share or in nats, end it.
_LEAST_GAIN, _LEAST_NATS, _MOST_POOR = 0.01, 1e-4, 2
_FINE = 3e-4  # nats: nothing is left to win
# Operations that may be spent: under a minute of one core, of an accelerator.
_PROCESSOR_FLOPS, _ACCELERATOR_FLOPS = 1e12, 5e14
_ANSWER_BYTES = 256 << 20
_EPSILON = 1e-12


class Answers:
    """The dense network's outputs on the batches to refine on, as far as there is room for them.

    Args:
        model: Dense, left untouched.
        batches: The fitting ones and those beyond are run, never the judging ones.
    """

    def __init__(self, model: nn.Module, batches: Batches) -> None:
        self.batches = batches
        self.pairs: list[tuple[object, list[Output]]] = []
        n_bytes = 0
        for batch in (*batches.fitting, *batches.more):
            given = outputs_of(model, batches, batch)
            n_bytes += sum(4 * tensor.numel() for _, tensor, _, _ in given)
            if self.pairs and n_bytes > _ANSWER_BYTES:
                break
            self.pairs.append((batch, given))


def refine(
    model: nn.Module,
    layers: Mapping[str, FactorizedLayer],
    answers: Answers,
    judge: Judge,
    settle: Callable[[], Statistics],
    before: tuple[float, Statistics],
    n_rounds: int,
    progress: bool = True,
) -> tuple[float, Statistics]:
    """Move all factors of a model's layers towards the dense network's outputs, in place.

    Args:
        model: The compressed network, its BatchNorm statistics as they shall be.
        layers: Its factorized layers by name; nothing else is changed.
        answers: Outputs of the dense network.
        judge: Measures on other batches.
        settle: Gives BatchNorm layers the running statistics of the present factors, and returns these: else a
            network that is near in evaluation is far once it trains.
        before: The divergence that the judge finds now, and these statistics now.
        n_rounds: As many as `rounds_worth` says.
        progress: Whether to show a progress bar.

    Returns:
        The same afterwards; where nothing was won, ``before``, and every factor is as it was.
    """
    factors = factors_of(layers)
    found = Best(*before, factors)
    rounds = track(range(n_rounds), "refine", total=n_rounds, enabled=progress)
    try:
        with _alone_open(model, factors), torch.no_grad(), closing(rounds):
            _descend(model, found, answers, lambda: (settle(), judge.divergence(model)), rounds, n_rounds)
    except RuntimeError as error:  # out of memory, or layers without a backward in evaluation mode (cuDNN's LSTM)
        _log.info("CTDR: the factors are not refined (%s).", error)
    finally:
        found.put_back()
    return found.divergence, found.statistics


def rounds_worth(
    layers: Mapping[str, FactorizedLayer],
    batches: Batches,
    divergence: float,
    step_flops: float,
    flops: float | None = None,
) -> int:
    """Number of rounds of steps that are worth their time; 0 if there is nothing to gain, or to judge by.

    Args:
        layers: The factorized layers.
        batches: Batches for the steps and for the judge.
        divergence: The judge's present value.
        divergence: The judge's present value.
        divergence: The judge's present value.
        step_flops: Operations of one step, forward and backward.
        flops: Operations that may be spent; None for those of a minute of a core, or of an accelerator.
    """
    factors = factors_of(layers)
    if not factors or batches.fitting is batches.judging or not _FINE < divergence < math.inf:
        return 0
    return min(_ROUNDS, int((flops or _flops(factors)) / (_ROUND_STEPS * max(step_flops, 1.0))))


def factors_of(layers: Mapping[str, FactorizedLayer]) -> list[nn.Parameter]:
    """Every parameter of some factorized layers once: factors and biases."""
    return list(dict.fromkeys(parameter for layer in layers.values() for parameter in layer.parameters()))


def _descend(
    model: nn.Module,
    found: Best,
    answers: Answers,
    measure: Callable[[], tuple[Statistics, float]],
    rounds: Iterable[int],
    n_rounds: int,
) -> None:
    descent, rate, n_poor = _Descent(found.factors), _RATE, 0
    for number in rounds:
        for step in range(number * _ROUND_STEPS, (number + 1) * _ROUND_STEPS):
            gradients = _gradients(model, answers, step, found.factors)
            if gradients is None:
                return
            descent.step(gradients, rate * (1 + math.cos(math.pi * step / (n_rounds * _ROUND_STEPS))) / 2)
        last = found.divergence
        better = found.offer(*measure())
        n_poor = 0 if last - found.divergence > max(_LEAST_GAIN * last, _LEAST_NATS) else n_poor + 1
        if n_poor == _MOST_POOR or found.divergence < _FINE:
            return
        rate *= _FASTER if better else _SLOWER
        if not better:
            found.put_back()
            set_statistics(model, found.statistics)
            descent = _Descent(found.factors)


def _gradients(model: nn.Module, answers: Answers, number: int, factors: Sequence[Tensor]) -> list[Tensor] | None:
    """Gradients of the divergence on one batch; None if there is none, or it is not finite."""
    batch, dense = answers.pairs[number % len(answers.pairs)]
    with untouched(model, training=False, gradients=True), watched_outputs(model) as given:
        answers.batches.step(model, batch)
        now = [tensor for _, tensor in named_tensors(given)]
        pairs = [(d, n) for d, n in zip(dense, now, strict=False) if d[1].shape == n.shape and n.requires_grad]
        if not pairs:
            return None
        total = torch.stack([distance(d, n) for d, n in pairs]).sum()
        found = torch.autograd.grad(total, list(factors), allow_unused=True)
    whole = [torch.zeros_like(f) if g is None else g for f, g in zip(factors, found, strict=True)]
    return whole if all(bool(torch.isfinite(g).all()) for g in whole) else None


@dataclass
class Best:
    """The best factors so far, with the divergence and the running statistics that belong to them."""

    divergence: float
    statistics: Statistics
    factors: Sequence[Tensor]
    kept: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._keep()

    def offer(self, statistics: Statistics, divergence: float) -> bool:
        """Keep the factors as they are now where they are better."""
        better = divergence < self.divergence
        if better:
            self.divergence, self.statistics = divergence, statistics
            self._keep()
        return better

    def _keep(self) -> None:
        self.kept = [factor.detach().clone() for factor in self.factors]

    def put_back(self) -> None:
        """Make the factors the best ones again."""
        self.take(self.kept)

    @torch.no_grad()
    def take(self, values: Sequence[Tensor]) -> None:
        """Give the factors other values, which are not offered by that."""
        for factor, value in zip(self.factors, values, strict=True):
            factor.copy_(value)


class _Descent:
    """Adam with steps that are shares of each factor's root mean square, in single precision at least."""

    def __init__(self, factors: Sequence[Tensor]) -> None:
        self.factors = factors
        self._masters = [factor.detach().float().clone() for factor in factors]
        self._sizes = [max(float(m.square().mean().sqrt()), 1e-3) for m in self._masters]
        self._adam = Adam([{"params": [master]} for master in self._masters], eps=_EPSILON)

    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        """Move every factor once."""
        rows = zip(self._adam.param_groups, self._sizes, self._masters, gradients, strict=True)
        for group, size, master, gradient in rows:
            group["lr"], master.grad = rate * size, gradient.float()
        self._adam.step()
        for factor, master in zip(self.factors, self._masters, strict=True):
            factor.copy_(master)


@contextmanager
def _alone_open(model: nn.Module, factors: Sequence[Tensor]) -> Iterator[None]:
    """Let autograd see the factors and no other parameter."""
    before = [(p, p.requires_grad) for p in model.parameters()]

    def put_back() -> None:
        for parameter, needed in before:
            parameter.requires_grad_(needed)

    with put_back_after(put_back):
        for parameter, _ in before:
            parameter.requires_grad_(False)
        for factor in factors:
            factor.requires_grad_(True)
        yield


def _flops(factors: Sequence[Tensor]) -> float:
    return _PROCESSOR_FLOPS if factors[0].device.type == "cpu" else _ACCELERATOR_FLOPS
