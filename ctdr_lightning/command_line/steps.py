"""One training step of a model that nobody wrote a step for: a LightningModule's own, or the forward and a sum."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ctdr_lightning.basics.errors import ConfigError, CTDRError, first_line
from ctdr_lightning.basics.torch_private import NEEDS_VALUES, tree_leaves, tree_map_only

Step = Callable[[nn.Module, Any], Tensor]


def step_of(model: nn.Module, *, spare: bool = False) -> Step:
    """The step to plan for: from a copy of the model and a batch to the loss.

    A LightningModule runs its own ``training_step``. Any other module is called: with a tensor, with a tuple's entries,
    or with a dict's as keywords; the loss is its output ``loss``, or else the sum of all outputs.

    Args:
        model: The model; the step runs a copy of it.
        spare: Whether a tuple may hold more than the forward takes, as a loader's pairs of image and label do.

    Raises:
        ConfigError: From the step, if the model does not accept the batch; with the model's error.
    """
    run = _training_step if _is_lightning(model) else partial(_forward, spare=spare)

    def step(twin: nn.Module, batch: Any) -> Tensor:
        try:
            return run(twin, batch)
        except (CTDRError, *NEEDS_VALUES):  # the recording has the better message for limits of fake tensors
            raise
        except Exception as error:  # somebody else's code: it may raise anything
            raise ConfigError(
                f"{type(model).__name__} does not take {_described(batch)}: {first_line(error)}.",
                "Compare --input with the arguments of its forward, or name a data module: --data module:callable.",
            ) from error

    return step


def _is_lightning(model: nn.Module) -> bool:
    """Whether it is a LightningModule; Lightning is not imported for the question."""
    return any(base.__name__ == "LightningModule" for base in type(model).__mro__)


def _training_step(twin: Any, batch: Any) -> Tensor:
    from ctdr_lightning.trainer.fake_trainer import attach_fake_trainer

    if not twin.automatic_optimization:
        raise ConfigError(
            f"{type(twin).__name__} uses manual optimization, so its training_step cannot be run alone.",
            "Plan the network that it trains: name a callable that returns it.",
        )
    attach_fake_trainer(twin)
    return _loss(twin.training_step(*(batch, 0)[: _n_taken(twin.training_step, 2)]), "training_step")


def _forward(twin: nn.Module, batch: Any, spare: bool) -> Tensor:
    if isinstance(batch, Mapping):
        return _loss(twin(**batch), "forward")
    if not isinstance(batch, tuple | list):
        return _loss(twin(batch), "forward")
    return _loss(twin(*(batch[: _n_taken(twin.forward, len(batch))] if spare else batch)), "forward")


def _n_taken(run: Callable[..., Any], n_given: int) -> int:
    """Number of the given positional arguments that a function takes."""
    kinds = [parameter.kind for parameter in inspect.signature(run).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return n_given
    taken = sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
    return min(taken, n_given)


def _loss(found: Any, of: str) -> Tensor:
    """The scalar to differentiate."""
    own = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
    if isinstance(own, Tensor):
        return own
    outputs = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outputs:
        raise ConfigError(
            f"{of} returned {_described(found)}, which holds no tensor that requires grad.", "Return the loss."
        )
    return sum(leaf.sum() for leaf in outputs)  # type: ignore[return-value]


def _described(batch: Any) -> str:
    shown = tree_map_only(Tensor, lambda t: _Shown(",".join(map(str, t.shape)), t.dtype), batch)
    return repr(shown) if isinstance(shown, _Shown | Mapping | tuple | list) else f"a {type(batch).__name__}"


class _Shown:
    """A tensor in the words of ``--input``."""

    def __init__(self, shape: str, dtype: Any) -> None:
        self._text = f"{shape}:{str(dtype).removeprefix('torch.')}"

    def __repr__(self) -> str:
        return self._text
