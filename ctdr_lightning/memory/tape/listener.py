"""Saved-tensor hooks that leave the stack and come back while a step runs."""

from __future__ import annotations

from collections.abc import Callable

from torch.autograd.graph import saved_tensors_hooks

from ctdr_lightning.basics.torch_private import top_saved_tensors_hooks


class Listener:
    """Our saved-tensor hooks, on top of the stack only while autograd saves something that the plan drops.

    While our hooks are off, autograd saves tensors itself, at no cost to us. If the program has hooks above ours, we
    leave the stack alone.
    """

    def __init__(self, hooks: saved_tensors_hooks) -> None:
        self._hooks = hooks
        self._below = top_saved_tensors_hooks(True)
        self._mine = (hooks.pack_hook, hooks.unpack_hook)
        self.on = self.barred = False

    def turn(self, on: bool) -> None:
        """Put the hooks on the stack, or take them off, unless others are above or none are allowed."""
        if self.barred or top_saved_tensors_hooks(True) != (self._mine if self.on else self._below):
            return
        if on:
            self._hooks.__enter__()
        else:
            self._hooks.__exit__()
        self.on = on

    def bar(self) -> Callable[[], None] | None:
        """Stay off the stack until the returned function is called; None if it is off already, or others are above."""
        was = self.on
        if was:
            self.turn(False)
        if self.on or self.barred:
            return None
        self.barred = True

        def allow() -> None:
            self.barred = False
            if was:
                self.turn(True)

        return allow
