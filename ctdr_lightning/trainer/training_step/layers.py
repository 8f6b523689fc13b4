"""A training step as layers around it, outermost first: each does its part and runs the rest."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

Backward = Callable[[Tensor], None]


@dataclass(frozen=True)
class Step:
    """The forward of a batch, or of a part of it.

    Attributes:
        module: The model.
        run: Its ``training_step``.
        inputs: The positional and the named arguments, the batch first.
        extra: A key that distinguishes steps in addition to their batch, such as the phase.
        finish: From the output of ``run`` to that of the step.
        later: Whether it is a later part of a batch, so that gradients of earlier parts exist.
        kind: The signature of steps that are alike; set by the layer that plans.
        beside_bytes: Bytes resident in addition to those that the session knows.
        copies: The copies among them, for a retry.
    """

    module: LightningModule
    run: Callable[..., Any]
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    extra: Hashable = None
    finish: Callable[[Any], Any] = lambda output: output
    later: bool = False
    kind: Hashable = None
    beside_bytes: int = 0
    copies: tuple[Tensor, ...] = ()


class Layer:
    """One concern of a training step. Each method runs the rest, or marks a moment."""

    def forward(self, step: Step, rest: Chain) -> Any:
        """Run the forward of a step."""
        return rest.forward(step)

    def backward(self, loss: Tensor, rest: Backward) -> None:
        """Run the backward of the last step from its loss, as the trainer has scaled it."""
        rest(loss)

    def done(self) -> None:
        """The backward of a batch, or of a part of it, is over; may be called more than once."""

    def leave(self) -> None:
        """Take off everything that a step under way has installed."""


class Chain:
    """Layers around a step.

    Args:
        layers: The outermost first.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers

    def forward(self, step: Step) -> Any:
        """Run the forward of a step through all layers."""
        if not self._layers:
            args, kwargs = step.inputs
            return step.run(*args, **kwargs)
        return self._layers[0].forward(step, Chain(self._layers[1:]))

    def backward(self, loss: Tensor, run: Backward) -> None:
        """Run a backward through all layers."""
        for layer in reversed(self._layers):
            run = _around(layer, run)
        run(loss)

    def done(self) -> None:
        """A backward is over; the innermost layer comes first."""
        for layer in reversed(self._layers):
            layer.done()

    def leave(self) -> None:
        """Take off everything that is installed, the innermost first."""
        for layer in reversed(self._layers):
            layer.leave()


def _around(layer: Layer, run: Backward) -> Backward:
    return lambda loss: layer.backward(loss, run)


def loss_of(output: Any) -> Tensor | None:
    """The loss in the result of a ``training_step``."""
    found = output.get("loss") if isinstance(output, dict) else output
    return found if isinstance(found, Tensor) else None
