"""Candidates of the search: which ranks a share of the whole model buys, and the model that stands with them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.choose.choices import Choices
from ctdr_lightning.decomposition.choose.rank_search import Start
from ctdr_lightning.decomposition.chooser import RankChooser
from ctdr_lightning.decomposition.layers.surgery import replace_everywhere
from ctdr_lightning.decomposition.layers.tied import follow_owners
from ctdr_lightning.decomposition.trial import Trial
from ctdr_lightning.joint.twins import twin_of

# Halves and thirds; the search also looks between two of them. Below 1/16 every network that was tried lost over five
# points of accuracy.
SHARES = (0.75, 0.5, 0.33, 0.25, 0.17, 0.125, 0.0625)
RESOURCES = ("parameters", "seconds")
# The first candidate is tried in every way of judging errors, the others in the two that were best for the one before.
_KEPT_STARTS = 2


@dataclass(frozen=True)
class Proposal:
    """One way to factorize the model, nothing computed yet.

    Attributes:
        share: Share of the resource that all layers keep together; 1 is the dense model.
        resource: The resource; for the dense model "dense", for choices that were given "given".
        choices: What becomes of each layer.
        start: How the layers' errors were judged.
    """

    share: float
    resource: str
    choices: Choices
    start: Start | None = None


DENSE = Proposal(1.0, "dense", Choices({}))


class Proposer:
    """Makes candidates.

    Args:
        chooser: Knows the layers and what the batches tell of them.
        hurried: Whether every candidate is tried in one way alone, for models whose steps take seconds.
    """

    def __init__(self, chooser: RankChooser, hurried: bool = False) -> None:
        self._chooser, self._hurried = chooser, hurried
        self._best_first: tuple[Start, ...] = ()
        self._tried: dict[tuple[float, str], Trial] = {}

    @property
    def _starts(self) -> tuple[Start, ...]:
        return self._best_first or self._chooser.starts[::-1][: 1 if self._hurried else None]

    def propose(self, share: float, resource: str) -> Proposal | None:
        """What a share of a resource buys; None where nothing is that cheap.

        It is the best trial's choices where the share was tried, else those of the way to judge errors that was best so
        far; before anything was tried, of all the evidence there is.
        """
        tried = self._tried.get((share, resource))
        if tried is not None:
            return Proposal(share, resource, tried.choices, tried.start)
        start = self._starts[0]
        try:
            choices = self._chooser.proposal(share, resource, start)
        except ConfigError:
            return None
        return Proposal(share, resource, choices, start) if choices.factorized else None

    def best(self, proposal: Proposal) -> Trial:
        """The trial of least loss over the best ways to judge errors, at a proposal's share."""
        key = proposal.share, proposal.resource
        if key not in self._tried:
            self._tried[key] = self._best(proposal)
        return self._tried[key]

    def _best(self, proposal: Proposal) -> Trial:
        starts = self._starts[:_KEPT_STARTS] if self._tried else self._starts
        trials = self._chooser.trials(proposal.share, proposal.resource, starts)
        first = [trial.start for trial in trials]
        self._best_first = (*first, *(start for start in self._starts if start not in first))
        return trials[0]

    def exact(self, proposal: Proposal) -> Trial:
        """The trial of a proposal's own choices."""
        return self._chooser.try_out(proposal.choices, proposal.start)

    def refined(self, trial: Trial) -> Trial:
        """A trial with all its factors moved towards the dense outputs."""
        return self._chooser.refined(trial)

    def standing(self, trial: Trial) -> nn.Module:
        """A twin of the dense model in which a trial's layers stand."""
        twin = twin_of(self._chooser.model)
        swaps: dict[nn.Module, nn.Module] = {twin.get_submodule(name): new for name, new in trial.layers.items()}
        replace_everywhere(twin, swaps | follow_owners(twin, swaps))
        return twin
