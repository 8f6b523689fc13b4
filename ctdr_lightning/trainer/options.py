"""The callback's arguments, checked before anything starts, and the same as primitives for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ctdr_lightning.basics.checks import boolean, known, real
from ctdr_lightning.basics.errors import CheckpointError, ConfigError, meant
from ctdr_lightning.basics.units import parse_budget, plain_number
from ctdr_lightning.decomposition import Choices
from ctdr_lightning.decomposition.choose.rank import RANK_RULES, RankSpec
from ctdr_lightning.joint.metric import name_of
from ctdr_lightning.memory import POLICIES
from ctdr_lightning.memory.holders.places import Places, codecs_of
from ctdr_lightning.recovery.schedule import Recovery, read_yaml
from ctdr_lightning.trainer.groups import Memory, Ranks, grouped

AUTO, IF_NEEDED = "auto", "if_needed"
# exact means to keep a budget that no plan of a whole step keeps
INSIDE, ELSEWHERE, IN_PARTS = "step in the backward", "elsewhere", "in parts"
STATE_ELSEWHERE = "optimizer's state elsewhere"
NORMS_IN_PARTS = "in parts, each normalised by itself"  # not exact, but it loses less than a cut


@dataclass(frozen=True, kw_only=True)
class CallbackOptions(Ranks, Memory):
    """The user's arguments, those of the groups beside the others; `CTDRCallback` documents each field.

    Raises:
        ConfigError: If an argument cannot be used.
    """

    memory_budget: int | float | str | None = None
    rank: Any = IF_NEEDED
    select: Any = None
    max_slowdown: float | None = None
    policy: str = "auto"
    recovery: Recovery | None = None
    verbose: bool = True

    def __post_init__(self) -> None:
        Ranks.__post_init__(self)
        Memory.__post_init__(self)
        self._check_rank()
        if self.max_slowdown is not None:
            real("max_slowdown", self.max_slowdown, above=0)
        known(POLICIES, "policy", self.policy)
        if self.memory_budget is not None:
            object.__setattr__(self, "memory_budget", plain_number(self.memory_budget))  # a checkpoint holds it
            parse_budget(self.memory_budget, total_bytes=1 << 62)
        self.places()
        boolean("verbose", self.verbose)
        self._check_choice_of_ranks()
        self._check_sub_batches()
        self._check_work()

    def _check_sub_batches(self) -> None:
        asked = self.sub_batches
        if asked is None:
            return
        if asked == "auto" and self.memory_budget is None:
            raise ConfigError('sub_batches="auto" needs a budget to fit.', "Give memory_budget, or a number.")
        reason = self.cuts_hindrance(asked)
        if reason:
            raise ConfigError(f"sub_batches={asked!r} is not supported here: {reason}.", "Leave one of the two out.")

    def cuts_hindrance(self, asked: int | str) -> str:
        """Another argument that excludes ``sub_batches``; empty if there is none.

        Args:
            asked: Requested number of sub-batches.
        """
        if self.optimizer_step is not None:
            return f"optimizer_step={self.optimizer_step!r} updates each parameter after its first gradient"
        if self.keep_gradients:
            return "keep_gradients=True asks for gradients that the first sub-batch replaces"
        if self.rank == AUTO:
            return 'rank="auto" chooses ranks with which the whole batch fits'
        if asked == "auto" and self.recovery is not None and self.recovery.distill:
            return "recovery.distill runs a teacher beside the step, whose bytes cannot be told beforehand"
        return ""

    def in_parts(self) -> CallbackOptions | None:
        """The same for batches in parts and dense layers; None where an argument speaks against either."""
        spoken = self.asks_for_cuts or self.sub_batches is not None or self.max_slowdown is not None
        if spoken or not self.rounding:
            return None
        if replace(self, rank=None, disk_folder=self._own_folder).cuts_hindrance("auto"):
            return None
        return replace(self, rank=None, sub_batches="auto", disk_folder=self._own_folder)

    def inside(self) -> CallbackOptions | None:
        """The same for dense layers and the optimizer's step in the backward; None where an argument speaks against."""
        spoken = self.optimizer_step is not None or self.optimizer_state is not None or self.keep_gradients
        if spoken or not self._may_move:
            return None
        return replace(self, rank=None, optimizer_step="in_backward", disk_folder=None)

    def elsewhere(self, device: str) -> CallbackOptions | None:
        """The same for dense layers and tensors that may wait in the host's memory, or in the given folder of a disk.

        None where there is neither, or an argument speaks against it.

        Args:
            device: Type of the device that the steps run on.
        """
        places = ["host"] * (device == "cuda") + ["disk"] * (self.disk_folder is not None)
        return replace(self, rank=None, offload=places) if places and self._may_move else None

    def state_elsewhere(self, device: str) -> CallbackOptions | None:
        """The same as `elsewhere`, and the optimizer's state waits in the first of the places; None as there."""
        found = self.elsewhere(device)
        spoken = self.optimizer_step is not None or self.optimizer_state is not None
        return replace(found, optimizer_state=found.offload[0]) if found and found.offload and not spoken else None

    @property
    def _own_folder(self) -> str | Path | None:
        """The folder of the optimizer's state; another is for saved tensors, which may not move without a choice."""
        return self.disk_folder if self.optimizer_state == "disk" else None

    @property
    def _may_move(self) -> bool:
        return self.fits_budget and not self.asks_for_cuts and self.max_slowdown is None

    def _check_work(self) -> None:
        """Refuse arguments that leave nothing to do: the defaults alone plan for no budget and cut no layer."""
        work = (
            *(self.memory_budget, self.choices, self.recovery, self.offload, self.optimizer_state),
            *(self.optimizer_step, self.sub_batches, self.max_slowdown),
        )
        if self.rank == IF_NEEDED and self.policy == "auto" and all(argument is None for argument in work):
            raise ConfigError(
                "neither memory_budget nor rank is given: there is nothing to plan and nothing to decompose.",
                'Write CTDRCallback(memory_budget="8GiB"), or CTDRCallback(rank=0.5).',
            )

    def _check_rank(self) -> None:
        if self.rank in (None, AUTO, IF_NEEDED):
            return
        ranks = self.rank if isinstance(self.rank, Mapping) else {"": self.rank}
        for pattern, rank in ranks.items():
            if isinstance(rank, bool) or not isinstance(rank, int | float | str | list | tuple):
                raise ConfigError(f"rank={rank!r} is not a rank.", 'Write 0.5, 16, "vbmf" or a mapping to these.')
            if isinstance(rank, str) and not pattern:
                _check_spelling(rank)
            RankSpec.parse(rank, f"rank[{pattern!r}]" if pattern else "rank")

    def _check_choice_of_ranks(self) -> None:
        if self.rank == AUTO and self.data is None:
            raise ConfigError('rank="auto" needs data.', 'Write data="train", or a share such as rank=0.5.')
        if self.max_loss is not None and not self.fits_budget:
            raise ConfigError(f"max_loss={self.max_loss} bounds the choice of ranks.", 'Write rank="auto" beside it.')

    def places(self) -> Places:
        """Places and codecs for saved tensors.

        Raises:
            ConfigError: If a name is not known.
        """
        # a folder may be given for the optimizer's state, or in case; `Places` refuses one without saved tensors in it
        for_others = "disk" not in (self.offload or ()) and (self.optimizer_state == "disk" or self._may_move)
        folder = None if for_others else self.disk_folder
        own = codecs_of(self.policy, budgeted=self.memory_budget is not None)
        codecs = own if self.codecs == "auto" else self.codecs
        return Places.read(self.offload, folder, codecs)

    @property
    def fits_budget(self) -> bool:
        """Whether ranks and plan are chosen together for the budget."""
        if self.rank != IF_NEEDED:
            return self.rank == AUTO
        others = self.policy != "auto" or self.offload is not None or self.sub_batches is not None
        return self.memory_budget is not None and self.data is not None and not others

    @property
    def prefers_dense(self) -> bool:
        """Whether layers are cut only if the dense model cannot be trained well enough within the budget."""
        return self.rank == IF_NEEDED

    @property
    def asks_for_cuts(self) -> bool:
        """Whether an argument speaks of cuts, so that one that cannot be made is an error."""
        spoken = (self.recovery, self.select, self.choices, self.max_loss, self.metric)
        return not self.prefers_dense or any(argument is not None for argument in spoken)

    @property
    def chooses_ranks(self) -> bool:
        """Whether the arguments other than ``choices`` decide on ranks."""
        return self.fits_budget or self.rank not in (None, IF_NEEDED)

    def decomposition(self) -> dict[str, Any] | None:
        """Arguments for `decompose`; None where nothing is decomposed."""
        if not self.chooses_ranks or self.choices is not None:
            return None
        rank = AUTO if self.fits_budget else self.rank
        asked = {"rank": rank, "method": self.method, "select": self.select, "allocate": self.allocate}
        return {**asked, "recompute": self.plans_memory, "measure": False}

    def read_choices(self) -> Choices | None:
        """The given choices, read from their file where they are one.

        Raises:
            CheckpointError: If the file cannot be read.
            ConfigError: If it holds no choices.
        """
        given = read_yaml(self.choices) if isinstance(self.choices, str) else self.choices
        return given if given is None or isinstance(given, Choices) else Choices.from_dict(given)

    @property
    def plans_memory(self) -> bool:
        """Whether steps run under a memory plan."""
        if self.memory_budget is not None:
            return True
        time_to_spend = self.chooses_ranks or self.choices is not None or (self.max_slowdown or 1.0) > 1
        return self.policy != "keep" and (self.policy != "auto" or time_to_spend)

    def to_dict(self) -> dict[str, Any]:
        """The arguments as primitives."""
        objects = {
            "recovery": self.recovery.to_dict() if self.recovery is not None else None,
            "metric": name_of(self.metric) if self.metric is not None else None,
        }
        names = [name for name in self.__dataclass_fields__ if name not in objects]
        return {name: _plain(getattr(self, name)) for name in names} | objects

    @classmethod
    def arguments(cls, plain: Any) -> dict[str, Any]:
        """The callback's arguments from the output of :meth:`to_dict`.

        Raises:
            CheckpointError: If it is something else.
        """
        if not isinstance(plain, Mapping) or not set(plain) <= set(cls.__dataclass_fields__):
            raise CheckpointError(
                "The checkpoint's CTDR options are damaged.",
                "Write CTDRCallback(...) out, as in the run that saved it.",
            )
        lost = {"metric", "max_loss"} if plain.get("metric") is not None else set()  # its name is no metric
        return grouped({name: value for name, value in plain.items() if name not in lost})


def _plain(value: Any) -> Any:
    if isinstance(value, Choices):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, Path):
        return str(value)
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _check_spelling(rank: str) -> None:
    """Refuse a text that begins with no known word; numbers in quotes have an error of their own."""
    word = rank.partition("=")[0].strip()
    known = (AUTO, IF_NEEDED, *RANK_RULES)
    if word in known or any(character.isdigit() for character in word):
        return
    names = ", ".join(f'"{name}"' for name in (IF_NEEDED, AUTO, "vbmf"))
    raise ConfigError(
        f"rank={rank!r} is not known.", f'{meant(word, known)}Write None, {names}, 0.5, 16 or "error=0.05".'
    )
