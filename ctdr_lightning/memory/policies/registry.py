"""Registry of policies, their declared properties, and their arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.registry import Registry
from ctdr_lightning.memory.plans.budget import Budget
from ctdr_lightning.memory.simulator.actions import Action, Actions, Compress, Keep, Offload, Recompute
from ctdr_lightning.memory.simulator.prepared import Prepared, prepared
from ctdr_lightning.memory.simulator.schedule import judge
from ctdr_lightning.memory.simulator.timeline import Timeline
from ctdr_lightning.memory.traces.trace import Trace

Choose = Callable[..., Actions | Timeline]
"""From a step and a budget, and options by name, to actions, or to the timeline of actions that were simulated.

Values that are not named keep their default (saved: keep). A policy without a plan that fits raises
``InfeasibleBudgetError`` or returns the closest plan.
"""


@dataclass(frozen=True)
class Policy:
    """A way to choose a plan, with its properties.

    Attributes:
        name: Its name.
        choose: The choice itself.
        uses: Kinds of actions that it can choose.
        exact: Whether its plans leave a step's results bit-identical whatever codecs the machine offers.
        clocked: Whether it stops by the clock, so that another run may find another plan.
        options: Its options, as a frozen dataclass of plain fields; None where it has none.

    Example:
        >>> from ctdr_lightning.memory import POLICIES
        >>> POLICIES["rotor"].with_options(n_slots=250).options
        RotorOptions(n_slots=250, most_stages=128)
    """

    name: str
    choose: Choose
    uses: frozenset[type[Action]] = frozenset({Keep, Recompute})
    exact: bool = True
    clocked: bool = False
    options: Any = None

    def __call__(self, step: Trace | Prepared, budget: Budget) -> Timeline:
        """Choose actions and simulate them, once.

        Args:
            step: The recorded step; prepared where more than one plan is made of it.
            budget: The plan's limits.

        Raises:
            ConfigError: If the budget allows fewer seconds than the plain step takes.
            InfeasibleBudgetError: If the policy finds nothing that fits.
        """
        step = prepared(step)
        _check_seconds(step.trace, budget)
        found = self.choose(step, budget, **({} if self.options is None else {"options": self.options}))
        return found if isinstance(found, Timeline) else judge(step, found)

    def with_options(self, **changes: Any) -> Policy:
        """The same policy with some options changed.

        Raises:
            ConfigError: If there is no such option.
        """
        known = self.option_values
        if unknown := changes.keys() - known.keys():
            raise ConfigError(
                f"Policy {self.name!r} has no option {sorted(unknown)[0]!r}.",
                f"Its options are: {', '.join(sorted(known)) or 'none'}.",
            )
        return replace(self, options=replace(self.options, **changes)) if changes else self

    @property
    def option_values(self) -> dict[str, int | float | str | bool]:
        """The options by name, as a plan's file holds them."""
        return {} if self.options is None else asdict(self.options)

    def works_on(self, trace: Trace) -> bool:
        """Whether it can do more than keep everything: moving needs links, compressing needs requested codecs."""
        away = (trace.links and Offload in self.uses) or (trace.asked_codecs and Compress in self.uses)
        return Recompute in self.uses or bool(away)


def _check_seconds(trace: Trace, budget: Budget) -> None:
    if budget.seconds is not None and not budget.seconds >= trace.seconds:
        raise ConfigError(
            f"Budget(seconds={budget.seconds:.6g}) allows less than the plain step takes, {trace.seconds:.6g} s: no "
            "plan is faster than keeping everything.",
            f"Allow at least {trace.seconds:.6g} seconds, or limit peak_bytes instead.",
        )


class PolicyRegistry(Registry[Policy]):
    """Policies by name; bare callables are registered as policies of which nothing is known."""

    def register(self, name: str, **facts: Any) -> Callable[[Choose], Choose]:  # type: ignore[override]
        """Return a decorator that registers a function as a policy.

        Args:
            name: Its name.
            facts: Its properties: the attributes of :class:`Policy`.

        Raises:
            ConfigError: If the name is taken.
        """

        def add(choose: Choose) -> Choose:
            super(PolicyRegistry, self).register(name)(Policy(name, choose, **facts))
            return choose

        return add

    def _entry(self, name: str, found: Any) -> Policy:
        return policy_of(found, name)


def policy_of(found: Policy | Choose, name: str = "") -> Policy:
    """Return a policy unchanged, and a bare callable as a policy of its own or the given name."""
    return found if isinstance(found, Policy) else Policy(name or getattr(found, "__name__", "custom"), found)


POLICIES = PolicyRegistry("policy", group="ctdr_lightning.policies")
