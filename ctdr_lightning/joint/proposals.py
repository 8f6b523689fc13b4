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

# Halves and thirds; the search also looks between the last that misses and the first that fits. Below 1/16 every
# network that was tried lost over five points of accuracy.
SHARES = (0.75, 0.5, 0.33, 0.25, 0.17, 0.125, 0.0625)
RESOURCES = ("parameters", "seconds")


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
    """

    def __init__(self, chooser: RankChooser) -> None:
        self._chooser = chooser

    def propose(self, share: float, resource: str) -> Proposal | None:
        """What a share of a resource buys, judged by all the evidence there is; None where nothing is that cheap."""
        try:
            start, choices = self._chooser.proposals(share, resource)[-1]
        except ConfigError:
            return None
        return Proposal(share, resource, choices, start) if choices.factorized else None

    def best(self, proposal: Proposal) -> Trial:
        """The trial of least loss over all ways to judge errors, at a proposal's share."""
        return self._chooser.best(proposal.share, proposal.resource)

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
