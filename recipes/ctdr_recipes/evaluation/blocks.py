"""``torch.utils.checkpoint`` around a network's blocks, as users write it: which modules, and a step with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_REPEATED = 3  # modules of one class: fewer are a stem or a head
_NOT_OWN = ("torch.nn", "ctdr_lightning")  # a decomposed layer is no block of the network's
_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the blocks, the first of the forward first
_SEGMENTS = (2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Checkpoints:
    """Places at which a step is checkpointed.

    Attributes:
        modules: Names of the modules, each checkpointed by itself; or of one chain.
        starts: Where the chain's segments begin; nothing for modules by themselves.
        words: The same for readers.
    """

    modules: tuple[str, ...]
    starts: tuple[int, ...]
    words: str

    def step(self, step: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        """The step of a model with these checkpoints."""

        def checkpointed(model: nn.Module, batch: Any) -> Tensor:
            with self._placed(model):
                return step(model, batch)

        return checkpointed

    @contextmanager
    def _placed(self, model: nn.Module) -> Iterator[None]:
        found = dict(model.named_modules())
        modules = [found[name] for name in self.modules]
        for module in modules:
            module.forward = self._of(module)
        try:
            yield
        finally:
            for module in modules:
                del module.forward  # the class's own is there again

    def _of(self, module: nn.Module) -> Callable[..., Any]:
        if self.starts:
            assert isinstance(module, nn.Sequential)
            return partial(_in_segments, module, self.starts)
        return partial(_of_lists_too, module.forward)


def _in_segments(chain: nn.Sequential, starts: Sequence[int], batch: Tensor) -> Tensor:
    """A chain whose segments are checkpointed, the last one left out, as ``checkpoint_sequential`` does it."""
    for first, last in pairwise(starts):
        batch = checkpoint(chain[first:last], batch, use_reentrant=False)
    return chain[starts[-1] :](batch)


def _of_lists_too(forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """A checkpointed call. A list may have grown when it is made again (DenseNet's features), so that it is copied."""
    copied = [list(arg) if isinstance(arg, list) else arg for arg in args]
    return checkpoint(forward, *copied, use_reentrant=False, **named)


def checkpoints_of(model: nn.Module) -> list[Checkpoints]:
    """The ways to checkpoint a network: its blocks, or segments of its longest chain.

    Blocks are the modules of a class that is the network's own, has children and occurs at least three times; each such
    class is one way. Of the class whose modules are the largest, the first quarter, half and three quarters of the
    blocks are ways too. A network without such a class has chains of plain layers only.

    Args:
        model: The network.
    """
    by_class: dict[type, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        if name and next(module.children(), None) is not None and not type(module).__module__.startswith(_NOT_OWN):
            by_class[type(module)].append(name)
    groups = {kind.__name__: names for kind, names in by_class.items() if len(names) >= _REPEATED}
    if not groups:
        return _segments(model)
    largest = max(groups, key=lambda kind: _parameters(model, groups[kind]) / len(groups[kind]))
    return [
        _first(kind, names, share) for kind, names in groups.items() for share in (_SHARES if kind == largest else [1])
    ]


def _parameters(model: nn.Module, names: Sequence[str]) -> int:
    return sum(p.numel() for name in names for p in model.get_submodule(name).parameters())


def _first(kind: str, names: Sequence[str], share: float) -> Checkpoints:
    some = tuple(names[: max(1, round(share * len(names)))])
    return Checkpoints(some, (), f"{len(some)} of {len(names)} {kind}")


def _segments(model: nn.Module) -> list[Checkpoints]:
    chains = {name: module for name, module in model.named_modules() if isinstance(module, nn.Sequential)}
    longest = max(chains, key=lambda name: len(chains[name]), default=None)
    if longest is None:
        return []
    cuts = dict.fromkeys(_starts(chains[longest], n) for n in _SEGMENTS)
    where = longest or "the net"
    return [Checkpoints((longest,), starts, f"{where} in {len(starts)} segments") for starts in cuts]


def _starts(chain: nn.Sequential, number: int) -> tuple[int, ...]:
    """About equal segments. None begins in place: it would write to the input that the checkpoint keeps."""
    free = [i for i, layer in enumerate(chain) if not getattr(layer, "inplace", False)]
    near = (part * len(chain) // number for part in range(number))
    return tuple(dict.fromkeys(min((i for i in free if i >= start), default=0) for start in near))
