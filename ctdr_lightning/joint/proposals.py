"""Which ranks a share of the whole model buys, and the model with them: the candidates of the search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.apply import decompose
from ctdr_lightning.decomposition.choose.choices import Choices
from ctdr_lightning.decomposition.choose.select import find_layers
from ctdr_lightning.decomposition.report import Report
from ctdr_lightning.joint.twins import twin_of

# Halves, and thirds between them; a share of 1/16 lost over five points of accuracy on every network that was tried.
SHARES = (0.75, 0.5, 0.33, 0.25, 0.17, 0.125, 0.0625)
RESOURCES = ("parameters", "seconds")


@dataclass(frozen=True)
class Proposal:
    """One way to factorize the model.

    Attributes:
        share: Share of the resource that all layers keep together.
        resource: The resource.
        model: A twin of the dense model with the factors.
        report: What became of each layer.
    """

    share: float
    resource: str
    model: nn.Module
    report: Report

    @property
    def choices(self) -> Choices:
        """What becomes of each layer."""
        return self.report.choices


class Proposer:
    """Makes candidates.

    Args:
        model: Dense; twins share its tensors.
        step: Runs the model on a batch.
        batch: One batch as in training.
        options: ``method`` and ``select`` of `decompose`.
    """

    def __init__(self, model: nn.Module, step: Callable[[Any, Any], Tensor], batch: Any, **options: Any) -> None:
        self._model, self._options = model, options
        self._shapes = _input_shapes(model, lambda: step(model, batch))

    def propose(self, share: float, resource: str) -> Proposal | None:
        """The least loss at a share of a resource; None where no ranks are that cheap."""
        twin = twin_of(self._model)
        options: dict[str, Any] = {"input_shapes": self._shapes, "recompute": True, "measure": False, "progress": False}
        options |= self._options
        try:
            report = decompose(twin, share, allocate=resource, **options)
        except ConfigError:
            return None
        return Proposal(share, resource, twin, report) if report.factorized else None

    def given(self, choices: Choices) -> Proposal:
        """The candidate that choices describe.

        Raises:
            ConfigError: When they do not fit the model.
        """
        twin = twin_of(self._model)
        return Proposal(0.0, "given", twin, decompose(twin, choices=choices, progress=False))

    def dense(self) -> Report:
        """The dense model as a report."""
        twin = twin_of(self._model)
        return decompose(twin, choices=Choices({}), progress=False)


@torch.no_grad()
def _input_shapes(model: nn.Module, run: Callable[[], Any]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    layers = find_layers(model)

    def note(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            tensor = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(tensor, Tensor):
                shapes[name] = tuple(tensor.shape)

        return hook

    with _hooked([(layer.module, note(layer.name)) for layer in layers]):
        run()
    return shapes


@contextmanager
def _hooked(pairs: Sequence[tuple[nn.Module, Callable[..., None]]]) -> Iterator[None]:
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in pairs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
