"""Who asks for a saved tensor: the autograd node that saved it, or anybody else."""

from __future__ import annotations

import sys

from ctdr_lightning.basics.torch_private import ENGINE_CODE, current_autograd_node, graph_task_id

_OWN = __name__.split(".")[0] + "."


def reader() -> str:
    """Name of the autograd node of torch's own that asks for a saved tensor; empty for anybody else.

    Anybody else is a custom ``autograd.Function``, a hook, or code that reads ``grad_fn._saved_result``. The engine
    reports a node while the node's hooks run too, so the caller is looked at: a node asks from C++, right above the
    engine's own frame, or above nothing in a GPU's thread.
    """
    node = current_autograd_node() if graph_task_id() != -1 else None
    if node is None:
        return ""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OWN):
        frame = frame.f_back  # type: ignore[assignment]
    return node.name() if frame is None or frame.f_code is ENGINE_CODE else ""
