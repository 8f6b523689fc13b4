"""When a step runs out of memory: a readable account of the peak, and a snapshot, before anything is released."""

from __future__ import annotations

import gc
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ctdr_lightning.basics import files
from ctdr_lightning.basics.torch_private import dump_cuda_memory
from ctdr_lightning.basics.units import format_bytes
from ctdr_lightning.memory import Plan, Trace, simulate

# Fits a screen.
_ROWS = 20
Row = tuple[str, str, int]


def write_account(folder: Path, name: str, error: BaseException, module: nn.Module, session: Any | None) -> Path:
    """Write ``<name>.txt`` for people and ``<name>.json`` for programs; on a GPU also the allocator's snapshot.

    Args:
        folder: Where to.
        name: Stem of the files.
        error: The step's error.
        module: The model.
        session: The memory session with the step's trace and plan, or None.

    Returns:
        The text file.
    """
    trace = getattr(session, "trace", None)
    plan = getattr(session, "plan", None)
    rows = _planned(trace, plan) if trace is not None else _found(module)
    text = folder / f"{name}.txt"
    files.write_text(text, _account(error, module, rows, trace, plan))
    found = [{"module": owner, "op": op, "bytes": n_bytes} for owner, op, n_bytes in rows]
    files.write_text(folder / f"{name}.json", json.dumps({"error": str(error), "tensors": found}, indent=1))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        dump_cuda_memory(str(folder / f"{name}.pickle"))  # for pytorch.org/memory_viz; never read here
    return text


def _planned(trace: Trace, plan: Plan | None) -> list[Row]:
    """Tensors alive at the peak of the planned step, the largest first."""
    # only the plan's own trace knows the links and codecs that it uses
    return (plan.timeline if plan is not None else simulate(trace)).alive_at_peak()


def _found(module: nn.Module) -> list[Row]:
    """Live tensors that the model does not own: name, or the op that made them, and size."""
    owned = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    rows: dict[int, Row] = {}
    for thing in gc.get_objects():
        if type(thing) not in (Tensor, nn.Parameter) or thing.layout != torch.strided:  # a fake tensor holds no memory
            continue
        storage = thing.untyped_storage()
        if storage._cdata not in owned and storage.nbytes():
            made = type(thing.grad_fn).__name__ if thing.grad_fn is not None else str(tuple(thing.shape))
            rows.setdefault(storage._cdata, ("not known: no step was recorded", made, storage.nbytes()))
    return sorted(rows.values(), key=lambda row: -row[2])


def _account(error: BaseException, module: nn.Module, rows: list[Row], trace: Trace | None, plan: Plan | None) -> str:
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    lines = [
        "A step ran out of memory.", "", str(error), "",
        f"Weights: {format_bytes(weights)}. Tensors at the peak: {format_bytes(sum(row[2] for row in rows))}.",
    ]  # fmt: skip
    if trace is not None and plan is not None:
        lines.append(plan.explain().splitlines()[0])
        if trace.device == "cuda":
            lines.append(str(plan.reserved))
    by_module: dict[str, int] = defaultdict(int)
    for owner, _, n_bytes in rows:
        by_module[owner] += n_bytes
    lines += ["", "By module:"]
    lines += [f"  {format_bytes(size):>10}  {owner}" for owner, size in sorted(by_module.items(), key=lambda i: -i[1])]
    lines += ["", f"Largest tensors ({min(_ROWS, len(rows))} of {len(rows)}):"]
    lines += [f"  {format_bytes(n_bytes):>10}  {owner} ({op})" for owner, op, n_bytes in rows[:_ROWS]]
    lines += ["", "HINT: a smaller batch, a lower rank, a smaller memory_budget, or a policy that offloads."]
    return "\n".join(lines) + "\n"
