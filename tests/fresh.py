"""Uses every public name first thing in a process of its own: ``python -m tests.fresh`` prints an error a name.

Whatever an earlier recording leaves in a cache would hide that a later one runs real kernels under fake tensors.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch  # noqa: F401  imported once and not in each child: what runs is fresh there
import torch
import torch._dynamo
from torch import Tensor, nn

import ctdr_lightning as ctdr
from ctdr_lightning import memory
from ctdr_lightning.basics.torch_private import FakeTensorMode, TorchDispatchMode
from ctdr_lightning.memory import Trace

META = torch.empty(4, 3, 8, 8, device="meta")


def net() -> nn.Module:
    """BatchNorm has a shortcut that is measured and compared; convolutions have workspaces."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1),
        nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10),
    )  # fmt: skip


def loss(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


def trace() -> Trace:
    """A recording without kernels."""
    return memory.record_fake(net(), META, loss)


def under_fake(use: Callable[[Callable[[], Tensor]], object]) -> None:
    """Give a step whose net and batch were made under a fake mode of the user's own."""
    with FakeTensorMode():
        module, x = net(), torch.randn(4, 3, 8, 8)
        use(lambda: loss(module, x))


def tape(step: Callable[[], Tensor]) -> None:
    made = ctdr.plan(ctdr.record(step), policy="sqrt")
    with ctdr.Tape(made) as running:
        found = step()
    found.backward()
    assert not running.diverged


def session(step: Callable[[], Tensor]) -> None:
    running = ctdr.Session(lambda trace: ctdr.plan(trace, policy="sqrt"))
    for _ in range(3):
        running.begin("step")
        found = step()
        running.forward_done()
        found.backward()
        running.end()
    assert running.guided


def recorder(step: Callable[[], Tensor]) -> None:
    with memory.Recorder() as running:
        step().backward()
    assert running.trace().ops


def fit() -> None:
    from tests import parts

    callback = ctdr.CTDRCallback(rank=0.5, memory_budget="1GiB", recovery=ctdr.Recovery(), verbose=False)
    parts.fit(parts.blobs(), callback, max_epochs=1)


def fit_to_budget() -> None:
    module = net()
    batches = [torch.randn(4, 3, 8, 8) for _ in range(2)]
    found = ctdr.fit_to_budget(module, loss, batches, "64MiB", max_slowdown=100.0, progress=False)
    assert isinstance(found, ctdr.BudgetFit)
    assert memory.record_fake(module, META, loss).ops


def decompose() -> None:
    module = net()
    report = ctdr.decompose(module, 0.5, progress=False)
    assert isinstance(report, ctdr.Report)
    assert isinstance(report.choices, ctdr.Choices)
    assert memory.record_fake(module, META, loss).ops


def merge() -> None:
    module = net()
    ctdr.decompose(module, 0.5, progress=False)
    ctdr.merge(module)
    assert memory.record_fake(module, META, loss).ops


def restore() -> None:
    module = net()
    ctdr.decompose(module, 0.5, progress=False)
    again = ctdr.restore(net(), module.state_dict())
    assert memory.record_fake(again, META, loss).ops


def load() -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests import parts

    with tempfile.TemporaryDirectory() as folder:
        callbacks = (ctdr.CTDRCallback(rank=0.5, verbose=False), ModelCheckpoint(folder, filename="last"))
        parts.fit(parts.blobs(), *callbacks, max_epochs=1, enable_checkpointing=True)
        module = ctdr.load_from_checkpoint(parts.Blobs, Path(folder) / "last.ckpt")
    images = torch.empty(4, 1, 8, 8, device="meta")
    assert memory.record_fake(module, images, lambda m, x: m.net(x).sum()).ops


def saved() -> None:
    recorded = trace()
    assert ctdr.Trace.from_json(recorded.to_json()) == recorded
    assert ctdr.Plan.from_json(ctdr.plan(recorded, policy="sqrt").to_json()).explain()


def largest() -> None:
    found = memory.max_batch(net(), lambda n: torch.empty(n, 3, 8, 8, device="meta"), loss, "8MiB")
    assert isinstance(found, memory.LargestBatch)
    assert found.size > 1


def simulated() -> None:
    recorded = trace()
    assert isinstance(ctdr.simulate(recorded), ctdr.Timeline)
    assert ctdr.Simulator(recorded, dict.fromkeys(recorded.droppable, memory.RECOMPUTE)).peak_bytes
    assert memory.Prepared(recorded)


def each_policy() -> None:
    recorded = trace()
    for name in memory.POLICIES:
        if not memory.POLICIES[name].__doc__:
            raise AssertionError(name)
    assert ctdr.plan(recorded, ctdr.Budget(peak_bytes=2 * ctdr.simulate(recorded).peak_bytes), "capuchin")


def actions() -> None:
    recorded = trace()
    some = {
        v: (memory.KEEP, memory.RECOMPUTE, memory.RECOMPUTE_EACH)[v % 3]
        for v in recorded.saved
        if v in recorded.droppable
    }
    assert all(isinstance(action, memory.Action) for action in some.values())
    assert ctdr.simulate(recorded, some).peak_bytes


def left_out() -> None:
    head, tokens = torch.nn.Linear(8, 1000), torch.randint(1000, (3000,))
    with ctdr.LazyHeads(head) as heads:
        torch.nn.functional.cross_entropy(head(torch.randn(3000, 8)), tokens).backward()
    assert heads.outcomes[""].chunks == 2


def tiled() -> None:
    module, x = torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.randn(6, 8)
    with ctdr.TiledModules(module, {"0": 3}) as tiles:
        module(x).sum().backward()
    assert tiles.left_alone == {}


def groups() -> None:
    given = {"ranks": ctdr.Ranks(method="svd"), "memory": ctdr.Memory(sub_batches=2)}
    assert ctdr.CTDRCallback("1GiB", 0.5, **given).options.sub_batches == 2


def compiled() -> None:
    module, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    backend = memory.CompileBackend("64MiB", engine="aot_eager")
    torch.compile(module, backend=backend)(x).sum().backward()
    assert backend.graphs


USES: dict[str, Callable[[], object]] = {
    **dict.fromkeys(("Action", "KEEP", "RECOMPUTE", "RECOMPUTE_EACH"), actions),
    **dict.fromkeys(("BudgetFit", "fit_to_budget"), fit_to_budget),
    "CompileBackend": compiled,
    **dict.fromkeys(("CTDRCallback", "Recovery"), fit),
    **dict.fromkeys(("Budget", "POLICIES"), each_policy),
    **dict.fromkeys(("Choices", "Report", "decompose"), decompose),
    **dict.fromkeys(("LargestBatch", "max_batch"), largest),
    "TiledModules": lambda: under_fake(lambda step: tiled()),
    "LazyHeads": lambda: under_fake(lambda step: left_out()),
    **dict.fromkeys(("Memory", "Ranks"), groups),
    **dict.fromkeys(("Plan", "Trace"), saved),
    **dict.fromkeys(("Prepared", "Simulator", "Timeline", "simulate"), simulated),
    "Recorder": lambda: under_fake(recorder),
    "Session": lambda: under_fake(session),
    "Tape": lambda: under_fake(tape),
    "load_from_checkpoint": load,
    "merge": merge,
    "plan": lambda: ctdr.plan(trace(), "64MiB"),
    "record": lambda: under_fake(lambda step: ctdr.record(step)),
    "record_fake": trace,
    "restore": restore,
    "signature_of": lambda: under_fake(lambda step: memory.signature_of(step().detach(), net())),
}


class Loud(TorchDispatchMode):
    """Whatever measures real kernels must not be seen by the modes of its caller."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError(f"{func} was seen")


def tried(use: Callable[[], object]) -> str:
    """The last line of what a use raises in a child of this process; empty where all is well."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        error = ""
        try:
            use()
        except BaseException as raised:
            error = "".join(traceback.format_exception(raised))[-2000:]
        os.write(write, error.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        found = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return found or ("" if status == 0 else f"ended with {status}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = sys.argv[1:] or sorted({*ctdr.__all__, *memory.__all__})
    done: dict[int, str] = {}
    for name in names:
        use = USES.get(name)
        if use is not None and id(use) not in done:
            done[id(use)] = tried(use)
    print(json.dumps({name: done[id(USES[name])] if name in USES else "no use of it is known" for name in names}))
