"""A linear layer's output that is not there: made when something looks at it, while its cross entropy needs it not.

`Logits` are a tensor of the right shape and type without data. Reshapes, transposes, slices of samples and tokens,
``float()``, ``detach()`` and the like are noted. ``cross_entropy`` is taken in chunks from the hidden states, and
``argmax`` over the classes by chunks too. Whatever else is asked makes the real output, once for all its views, as if
it had been there from the start: hooks, writes in place and gradients see one tensor. Calls that pass by
``__torch_function__``, such as a custom function's ``apply``, find a tensor with its place in the graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ctdr_lightning.basics.torch_private import NoTorchFunction, no_dispatch_modes, tree_leaves, tree_map_only
from ctdr_lightning.memory.lazy.chunked_loss import LossTerms, chunked_cross_entropy, n_chunks, rows_of_chunk

_PROPERTIES = (
    "shape", "dtype", "ndim", "requires_grad", "layout", "is_sparse", "is_quantized", "is_nested", "is_leaf",
    "itemsize", "nbytes",
)  # fmt: skip
_PLACES = {*(getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu", "is_meta")), Tensor.get_device}
_FACTS = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.__len__, Tensor.is_floating_point,
    Tensor.is_complex, Tensor.element_size, Tensor.__hash__, torch.is_tensor, torch.numel,
    torch.is_floating_point, torch.is_complex,
}  # fmt: skip
_RESHAPES = {Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten}
_ORDERS = {
    Tensor.transpose, Tensor.permute, Tensor.swapaxes, Tensor.movedim, torch.transpose, torch.permute, torch.swapaxes,
    torch.movedim,
}  # fmt: skip
_CROSS_ENTROPY = inspect.signature(F.cross_entropy)


class Outcome:
    """The outcome of one layer's calls.

    Attributes:
        chunks: Largest number of chunks that a loss was taken in; 0 where none was.
        asked_by: Name of the function for which an output was made after all; empty where none was.
        n_outputs: Number of elements of all outputs together.
    """

    def __init__(self) -> None:
        self.chunks, self.asked_by, self.n_outputs = 0, "", 0
        self._heads: WeakSet[Head] = WeakSet()

    def add(self, head: Head) -> None:
        """A call of the layer."""
        self._heads.add(head)
        self.n_outputs += head.hidden.numel() // head.weight.shape[1] * head.weight.shape[0]

    def settle(self) -> None:
        """Make all outputs that somebody holds."""
        for head in list(self._heads):
            head.make_all("its own use after the forward")


class Head:
    """One call of a linear layer whose output is not there, shared by all views of the output.

    Args:
        hidden: Input of the layer, of shape (..., features).
        weight: Of shape (classes, features).
        bias: Of shape (classes,), or None.
        outcome: Of the layer's calls.

    Attributes:
        made: Whether the output, or a view of it, was made after all.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, outcome: Outcome) -> None:
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.outcome, self.made = outcome, False
        outcome.add(self)
        self._versions = self._now()
        device = hidden.device.type
        self._autocast = torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device) if self._autocast else hidden.dtype
        self.views: WeakSet[Logits] = WeakSet()

    def _now(self) -> list[int]:
        return [t._version for t in (self.hidden, self.weight, self.bias) if t is not None]

    def check(self) -> None:
        """Raise where the layer or its input was written to since: its output can no longer be made."""
        if self._now() != self._versions:
            raise RuntimeError(
                "A linear layer's output, left out for its size, was asked for after the layer or its input had been "
                "written to. HINT: use the output before that, or forbid such layers: rounding=False."
            )

    def output(self, hidden: Tensor) -> Tensor:
        """The layer's output for some of its input, as the layer would have made it when it was called."""
        self.check()
        dtype = self.dtype if self._autocast else None
        with torch.autocast(hidden.device.type, dtype=dtype, enabled=self._autocast):
            return F.linear(hidden, self.weight, self.bias)

    def make_all(self, asked_by: str) -> None:
        """Make every view that somebody holds: they are about to change, or outlive the step."""
        for view in list(self.views):
            view.make(asked_by)


class Logits(Tensor):
    """The output of a linear layer, or a view of it, without data. Made by `logits_of`, not by its constructor.

    Attributes:
        head: The call that it is the output of.
        hidden: The layer's input, viewed as the output is: of the same shape, but features in the place of classes.
        axis: Of the classes.
    """

    head: Head
    hidden: Tensor
    axis: int
    _how: Callable[[str], Tensor]
    _graded: bool
    _made: Tensor | None

    def make(self, asked_by: str) -> Tensor:
        """The real tensor, with its place in the graph; from the first time on the same."""
        if self._made is None:
            self.head.made, outcome = True, self.head.outcome
            outcome.asked_by = outcome.asked_by or asked_by
            with torch.set_grad_enabled(self._graded):
                self._made = self._how(asked_by)
        return self._made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a view, take a loss in chunks, or make the output."""
        kwargs = kwargs or {}
        if func in _FACTS:
            with NoTorchFunction():
                return func(*args, **kwargs)
        first = args[0] if args else kwargs.get("input")
        if func in _PLACES:
            return func(first.hidden)
        if isinstance(first, Logits) and not first.head.made:
            found = _loss(args, kwargs) if func is F.cross_entropy else _noted(first, func, args[1:], kwargs)
            if found is not None:
                return found
        return _really(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an op on values, where a caller has passed by ``__torch_function__``.

        Raises:
            RuntimeError: If the op writes to them.
        """
        if func._schema.is_mutable:
            raise RuntimeError(
                f"{func} writes to a linear layer's output that was left out for its size. HINT: forbid such layers: "
                "rounding=False."
            )
        plain = tree_map_only(Logits, _values, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, outcome: Outcome) -> Logits:
    """The output of a linear layer, without data.

    Args:
        hidden: Of shape (..., features).
        weight: Of shape (classes, features).
        bias: Of shape (classes,), or None.
        outcome: Of the layer's calls.

    Example:
        >>> hidden, weight, outcome = torch.randn(2, 3, 4), torch.randn(9, 4, requires_grad=True), Outcome()
        >>> logits = logits_of(hidden, weight, None, outcome)
        >>> F.cross_entropy(logits.view(-1, 9), torch.arange(6)).backward()
        >>> outcome.asked_by, tuple(logits.softmax(-1).shape), outcome.asked_by
        ('', (2, 3, 9), 'softmax')
    """
    head = Head(hidden, weight, bias, outcome)
    return _view(head, hidden, hidden.dim() - 1, head.dtype, lambda asked_by: head.output(hidden))


def _view(
    head: Head, hidden: Tensor, axis: int, dtype: torch.dtype, how: Callable[[str], Tensor], *, graded: bool = True
) -> Logits:
    with torch.set_grad_enabled(torch.is_grad_enabled() and graded):
        found = _Absent.apply(head, axis, dtype, hidden, head.weight, head.bias)
    found.head, found.hidden, found.axis, found._how, found._made = head, hidden, axis, how, None
    found._graded = torch.is_grad_enabled()
    head.views.add(found)
    return found  # type: ignore[no-any-return]


class _Absent(torch.autograd.Function):
    """From a linear layer's inputs to `Logits`, for callers that know a tensor by its place in the graph alone."""

    @staticmethod
    def forward(ctx: Any, *asked: Any) -> Tensor:
        """The output, without data."""
        head, axis, dtype, hidden, weight, bias = asked
        ctx.head, ctx.axis, ctx.dtype = head, axis, dtype
        ctx.save_for_backward(hidden, weight, bias)
        shape = [*hidden.shape[:axis], weight.shape[0], *hidden.shape[axis + 1 :]]
        device = torch.ops.prim.device.default(hidden)  # as autograd sees it, for which a fake on a GPU may pose
        return Logits._make_wrapper_subclass(Logits, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """The layer's own backward."""
        with torch.enable_grad():
            own: list[Any] = [t.detach().requires_grad_() if t is not None else None for t in ctx.saved_tensors]
            hidden, weight, bias = own
            found = F.linear(hidden.movedim(ctx.axis, -1), weight, bias).movedim(-1, ctx.axis)
            given = iter(torch.autograd.grad(found, [t for t in own if t is not None], slope.to(found.dtype)))
        return (None, None, None, *(next(given) if t is not None else None for t in own))


def _values(logits: Logits) -> Tensor:
    """Values alone, below autograd: nothing of the graph may be kept of them."""
    if logits._made is not None:
        return logits._made.detach()
    found = logits.head.output(logits.hidden.detach().movedim(logits.axis, -1)).movedim(-1, logits.axis)
    return found.to(logits.dtype).contiguous()


def _really(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function with the real tensors."""
    name = getattr(func, "__name__", str(func))
    absent = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Logits)]
    if (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__setitem__")) or "out" in kwargs:
        for leaf in absent:
            leaf.head.make_all(name)
    args, kwargs = tree_map_only(Logits, lambda t: t.make(name), (args, kwargs))
    return func(*args, **kwargs)


def _noted(logits: Logits, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The result where it is a view that can be noted; None where it is not."""
    place: tuple[Tensor, int] | None = None
    dtype = logits.dtype
    if func in _RESHAPES:
        place = _reshaped(logits, func, args, kwargs)
    elif func in _ORDERS:
        place = func(logits.hidden, *args, **kwargs), _new_axis(logits, func, args, kwargs)
    elif func is Tensor.__getitem__:
        place = _part(logits, args[0])
    elif func is Tensor.detach:
        place = logits.hidden.detach(), logits.axis
    elif func is Tensor.contiguous and not (args or kwargs):
        place = logits.hidden, logits.axis
    elif func is Tensor.float or (func is Tensor.to and args == (torch.float32,) and not kwargs):
        place, dtype = (logits.hidden, logits.axis), torch.float32
    elif func in (Tensor.argmax, torch.argmax):
        return _argmax(logits, *args, **kwargs)
    if place is None or dtype not in (logits.dtype, torch.float32):
        return None
    return _view(
        logits.head, *place, dtype, lambda asked_by: func(logits.make(asked_by), *args, **kwargs),
        graded=func is not Tensor.detach,
    )  # fmt: skip


def _reshaped(
    logits: Logits, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, int] | None:
    """Hidden states in another shape whose last axis still is that of the classes."""
    n_classes, n_features = logits.head.weight.shape
    if logits.axis != logits.dim() - 1 or any(isinstance(arg, torch.dtype) for arg in (*args, *kwargs.values())):
        return None
    with no_dispatch_modes():
        marker = torch.empty(1, device="meta").expand(logits.shape)
        shape = (marker.reshape if func in (Tensor.view, Tensor.reshape, torch.reshape) else marker.flatten)(
            *args, **kwargs
        ).shape
    if not shape or shape[-1] != n_classes or not logits.numel():
        return None
    return logits.hidden.reshape(*shape[:-1], n_features), len(shape) - 1


def _new_axis(logits: Logits, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    with no_dispatch_modes():
        marker = torch.empty([2 if d == logits.axis else 1 for d in range(logits.dim())], device="meta")
        return func(marker, *args, **kwargs).shape.index(2)  # type: ignore[no-any-return]


def _part(logits: Logits, index: Any) -> tuple[Tensor, int] | None:
    """Hidden states of some samples and tokens; None where the index goes into the classes, or adds axes."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(i is Ellipsis or type(i) in (int, slice, Tensor) for i in index):
        return None
    tensors = any(isinstance(i, Tensor) for i in index)
    if not tensors and not any(i is Ellipsis for i in index) and len(index) <= logits.axis:
        return logits.hidden[index], logits.axis - sum(isinstance(i, int) for i in index)
    if logits.axis != logits.dim() - 1:
        return None
    n_axes = sum(i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else i is not Ellipsis for i in index)
    whole = isinstance(index[-1], slice) and index[-1] == slice(None)
    open_end = index[-1] is Ellipsis or (n_axes < logits.dim() and not any(i is Ellipsis for i in index))
    if not (whole or open_end):
        return None
    found = logits.hidden[index]
    return found, found.dim() - 1


def _argmax(logits: Logits, dim: int | None = None, keepdim: bool = False) -> Tensor | None:
    """The likeliest classes, a chunk of rows at a time."""
    if dim is None or dim % logits.dim() != logits.axis:
        return None
    with torch.no_grad():
        rows = logits.hidden.movedim(logits.axis, -1)
        flat = rows.reshape(-1, rows.shape[-1]).split(rows_of_chunk(*logits.head.weight.shape))
        found = torch.cat([logits.head.output(chunk).argmax(1) for chunk in flat]).reshape(rows.shape[:-1])
    return found.unsqueeze(dim) if keepdim else found


def _loss(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The cross entropy in chunks; None where it has to be taken of the real output."""
    asked = _CROSS_ENTROPY.bind(*args, **kwargs)
    asked.apply_defaults()
    logits, target, weight = (asked.arguments[name] for name in ("input", "target", "weight"))
    old = asked.arguments["size_average"] is None and asked.arguments["reduce"] is None
    beside = [t for t in (target, weight) if t is not None]
    if not (old and logits.requires_grad) or any(type(t) is Logits or t.requires_grad for t in beside):
        return None
    rows = _rows(logits, target)
    if rows is None or asked.arguments["reduction"] not in ("mean", "sum", "none"):
        return None
    head, reduction = logits.head, asked.arguments["reduction"]
    head.check()
    terms = LossTerms(weight, asked.arguments["ignore_index"], asked.arguments["label_smoothing"], reduction)
    head.outcome.chunks = max(head.outcome.chunks, n_chunks(len(rows[0]), head.weight))
    loss = chunked_cross_entropy(rows[0], head.weight, head.bias, rows[1], terms, head.dtype)
    if reduction == "none":
        loss = loss.reshape([n for d, n in enumerate(logits.shape) if d != logits.axis])
    return loss if torch.is_autocast_enabled(loss.device.type) else loss.to(logits.dtype)


def _rows(logits: Logits, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Hidden states and targets, one row a prediction; None where the shapes are not those of a cross entropy."""
    axis = min(1, logits.dim() - 1)
    rest = [n for d, n in enumerate(logits.shape) if d != axis]
    if logits.axis != axis or not logits.numel():
        return None
    hidden = logits.hidden.movedim(axis, -1)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    if target.is_floating_point() and target.shape == logits.shape:
        return hidden, target.movedim(axis, -1).reshape(-1, logits.shape[axis])
    hard = not target.is_floating_point() and list(target.shape) == rest
    return (hidden, target.reshape(-1)) if hard else None
