"""Run one step and record it: ``record(step) -> Trace``.

Measured execution: the step runs as always while every op, storage, save and release is logged. With a budget an online
policy evicts at the same time, so that even the first step cannot run out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import accumulate, chain
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ctdr_lightning.basics.devices import DeviceModel, device_model
from ctdr_lightning.basics.errors import ConfigError, ReplayError
from ctdr_lightning.basics.host_memory import has_process_group
from ctdr_lightning.basics.torch_private import FakeTensor, OpMode, OpOverload, graph_task_id, top_saved_tensors_hooks
from ctdr_lightning.memory.recorder.call_seconds import CallSeconds
from ctdr_lightning.memory.recorder.contents import ZeroCounts
from ctdr_lightning.memory.recorder.cuda_clock import CudaClock
from ctdr_lightning.memory.recorder.step_log import LoggedHandle, StepLog
from ctdr_lightning.memory.recorder.workspace import WatchingClock, WorkspaceProbe
from ctdr_lightning.memory.tape.clock import Clock, CpuClock, ModelClock, Timed
from ctdr_lightning.memory.tape.hookless_regions import HooklessRegions
from ctdr_lightning.memory.tape.module_paths import ModulePaths
from ctdr_lightning.memory.tape.online import Evictor, Online
from ctdr_lightning.memory.tape.verifier import NOT_REPEATABLE, Verifier, check_verify
from ctdr_lightning.memory.traces.trace import CAME_BACK_OTHERWISE, Trace
from ctdr_lightning.memory.values.batchnorm_again import ShortcutTimes
from ctdr_lightning.memory.values.higher_order import HigherOrderUnseen
from ctdr_lightning.memory.values.op_seconds import op_seconds
from ctdr_lightning.memory.values.op_traits import COLLECTIVE, pin_reason_of_types, traits
from ctdr_lightning.memory.values.op_trial import OpTrial
from ctdr_lightning.memory.values.readers import reader
from ctdr_lightning.memory.values.replay import materialize
from ctdr_lightning.memory.values.sharded import by_shards, on_shards
from ctdr_lightning.memory.values.tensors import tensors_in
from ctdr_lightning.memory.values.value import Value
from ctdr_lightning.memory.values.value_table import ValueTable

# Replaying one op costs about 4 times as much as logging it: dispatch, capture, pack, unpack, call. Under 42 plans of
# 14 networks it was 1 to 11 times, least where long chains are replayed. With 8, the price of exact plans was twice
# that by the clock: 37 % for 15 % on a residual net at half of its peak, so that layers were cut instead.
REPLAY_COST_IN_LOGGED_OPS = 4


class Recorder(OpMode):
    """Logs the step that runs inside it, forward and backward.

    Args:
        model: Device whose speed fake tensors are given; None means this machine's processor.
        root: The module that the trace's module paths start from; None lets each step find its own.
        evictor: Keeps the step under a budget meanwhile; None holds everything, as autograd does.
        standing: Tensors that are resident throughout and count, whether the step reads them or not: weights, buffers.
        held: Ticks of the ops whose replay gave other contents in an earlier attempt of the step.
        verify: As for a `Tape`: every evicted value is verified, unless it is ``"never"``.
        zeros: Whether zeros are counted, as for `record`.

    Attributes:
        exchanged: Whether an op has exchanged data with other processes.
        resting: Whether ops run without being logged.
    """

    # torch refuses a higher-order operator (`torch.cond`, flex_attention) under a mode that does not say it takes them.
    supports_higher_order_operators = True

    def __init__(
        self,
        model: DeviceModel | CallSeconds | None = None,
        evictor: Evictor | None = None,
        root: nn.Module | None = None,
        standing: Iterable[Tensor] = (),
        held: Iterable[int] = (),
        verify: str = "first",
        zeros: bool = False,
    ) -> None:
        super().__init__()
        self._standing = tuple(standing)
        self._held = frozenset(held)
        self._on_fakes = any(isinstance(tensor, FakeTensor) for tensor in self._standing)
        self.log = StepLog()
        self._zeros = ZeroCounts() if zeros else None
        self.exchanged = self.resting = False
        self._model = model
        self.evictor = evictor
        self._table = ValueTable()
        self._online = Online(evictor, self._table) if evictor is not None else None
        if evictor is not None:
            evictor.verifier = Verifier(self._blame) if check_verify(verify) != "never" else None
            evictor.unrepeatable = self.log.unrepeatable
        self._paths = ModulePaths(root)
        self._unseen = HigherOrderUnseen()
        self._hookless = HooklessRegions(self._leave_hooks)
        self._clock: Clock | None = None
        self._probe: WorkspaceProbe | None = None
        self._shortcuts = ShortcutTimes()
        self._device = "cpu"
        self._active = False
        self._logging_s: dict[int, float] = {}  # by the op's index

    def __enter__(self) -> Recorder:
        self._active = True
        self._paths.__enter__()
        self._unseen.__enter__()
        hooks = by_shards(self._pack, self._unpack) if has_process_group() else (self._pack, self._unpack)
        self._hooks = saved_tensors_hooks(*hooks)
        self._hooks.__enter__()
        self._hookless.__enter__()
        if self.evictor is not None:
            self.evictor.__enter__()
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        super().__exit__(kind, error, tb)
        if kind is None:  # a step that ran out of memory has none to look with
            self.log.last_look()
        if self.evictor is not None:
            self.evictor.__exit__(kind, error, tb)
        self._hookless.__exit__(kind, error, tb)
        self._hooks.__exit__(kind, error, tb)
        self._unseen.__exit__(kind, error, tb)
        self._paths.__exit__(kind, error, tb)
        self._table.clear()
        self._active = False
        if kind is not None:
            self.log.close()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and on_shards(types):
            return NotImplemented
        kwargs = kwargs or {}
        if self.resting:
            self.log.wrote_beside(func, args, kwargs)
            return func(*args, **kwargs)
        if func.namespace == "prim":  # questions such as a fake tensor's device: no op of the step
            return func(*args, **kwargs)
        backward = graph_task_id() != -1
        pin = self._hookless.pin or (pin_reason_of_types(tuple(types)) if types else "")
        if traits(func).pin == COLLECTIVE:
            self.exchanged = True
        log, paths = self.log, self._paths
        if backward and not log.backward:
            self._table.let_go()
        log.unit = self._table.unit = paths.unit
        log.module, log.region, log.backward = paths.path, paths.entered, backward
        clock = self._clock or self._choose_clock((*args, *kwargs.values()))
        log.tick += 1
        pin = pin or (CAME_BACK_OTHERWISE if log.tick in self._held else "")
        inputs = log.reads(func, args, kwargs)
        if self.evictor is not None:
            self.evictor.live.ignore(tensors_in((*args, *kwargs.values())))
        if self._probe is not None:
            self._probe.note(log.n_ops, func, args, kwargs)
        run = clock.run if self._online is None else self._run_pinned if backward or pin else self._run_captured
        trial = OpTrial(func, args, kwargs) if traits(func).foreign and not (backward or traits(func).pin) else None
        try:
            out, seconds, temp_bytes = run(func, args, kwargs)
        except Exception:
            # The program may catch it and go on: a guided step will then see the op as well, and it raises again.
            log.ran(func, args, kwargs, inputs, (), 0.0, 0, "raised an error")
            raise
        if trial is not None:
            trial.judge(out)
        start = perf_counter()
        rest_pin = "" if backward else self._shortcuts.note(log.n_ops, func, args, out)
        log.ran(func, args, kwargs, inputs, out, seconds, temp_bytes, pin, rest_pin)
        if not backward:
            if self._zeros is not None:
                self._zeros.made(traits(func).name, inputs, out, log.value_of)
            log.n_training = paths.training
            self._logging_s[log.n_ops - 1] = perf_counter() - start
        elif self.evictor is not None:
            self.evictor.ran(None, [], out, seconds, temp_bytes)
        return out

    def _blame(self, wrong: set[int], right: set[int]) -> ReplayError:
        name, module = self.log.op_at(min(wrong))
        unrepeatable = self.log.unrepeatable()
        return ReplayError(
            f"{name} of {module or 'the step'} was evicted while the step was recorded, and came back with other "
            f"contents: {NOT_REPEATABLE}.",
            "record without a budget; a Session and a Trainer run the step again by themselves.",
            ticks=wrong | unrepeatable,
            first_ticks=self.log.first_of(wrong) | unrepeatable,
        )

    def _run_captured(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Timed:
        assert self._online is not None
        return self._online.call(func, self.log.tick, args, kwargs, self._clock or CpuClock())

    def _run_pinned(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Timed:
        self._table.overwrites(func, args, kwargs)  # a hook may overwrite a later replay's input in the backward
        run = (self._clock or CpuClock()).run
        return run(func, args, kwargs) if self.evictor is None else self.evictor.attempt(func, args, kwargs, run)

    def _choose_clock(self, args: tuple[Any, ...]) -> Clock:
        # Among fake tensors a real one is a constant that is about to become fake: its device says nothing.
        found = (t for t in tensors_in(args) if isinstance(t, FakeTensor) or not self._on_fakes)
        # A step on a GPU may begin with tensors of the processor: a mask of lengths, the time steps of a diffusion.
        resident = (t for t in self._standing if not self._on_fakes and t.device.type not in ("cpu", "meta"))
        tensor = next(chain(resident, found), None)
        if isinstance(tensor, FakeTensor):
            self._device = tensor.fake_device.type
            model = self._model or device_model()
            other = "" if isinstance(model, CallSeconds) or model.name == "cpu" else model.name
            gpu = model if isinstance(model, DeviceModel) and model.is_gpu else None
            known = self._device == "cpu" or gpu is not None
            self._probe = WorkspaceProbe(fake=True, other=other, gpu=gpu) if known else None
            self._clock = _model_clock(model)
        elif tensor is not None:
            self._device = tensor.device.type
            self._clock = CudaClock(tensor.device) if tensor.is_cuda else WatchingClock()
            if self.evictor is not None:
                self.evictor.on(tensor.device)
            watched = not isinstance(self._clock, WatchingClock) or self._clock.watches
            self._probe = None if watched or self._device != "cpu" else WorkspaceProbe()
        elif self._on_fakes:  # no tensor has told the device yet
            return _model_clock(self._model or device_model())
        return self._clock or CpuClock()

    def _leave_hooks(self) -> Callable[[], None] | None:
        if top_saved_tensors_hooks(True) != (self._hooks.pack_hook, self._hooks.unpack_hook):
            return None
        self._hooks.__exit__(None, None, None)
        return self._hooks.__enter__

    def _pack(self, tensor: Tensor) -> LoggedHandle:
        value = self._online.pack(tensor) if self._online is not None else Value.holding(tensor)
        handle = self.log.saved(value, tensor)
        if self._zeros is not None:
            self._zeros.look(handle.saved.value, tensor)
        return handle

    def _unpack(self, handle: LoggedHandle) -> Tensor:
        if self._active:
            self.log.unpacks(handle, reader())
        tensor = materialize(handle.value) if self.evictor is None else self.evictor.fetch(handle.value)
        if self._active:
            self.log.returned(handle, tensor)
        return tensor

    def trace(self) -> Trace:
        """The trace of the block, once it is left."""
        clock = self._clock or CpuClock()
        temps = self._probe.measure() if self._probe is not None else {}
        meta = {"torch": str(torch.__version__)}
        if self._probe is not None and self._probe.unknown:
            meta["workspaces"] = self._probe.unknown
        if self._paths.compiled:
            self.log.forget_regions()
        unread_bytes = self.log.unread_bytes(self._standing)
        found = self.log.finish(self._device, meta, evicting=self.evictor is not None).with_static(unread_bytes)
        measured = isinstance(clock, CpuClock)
        python_s = REPLAY_COST_IN_LOGGED_OPS * _typical_logging_s(found, self._logging_s) if measured else 0.0
        shares = self._shortcuts.shares() if measured else {}
        if self._zeros is not None:
            found = found.with_zeros(self._zeros.shares())
        return found.with_costs([clock.seconds(op.seconds) for op in found.ops], temps, python_s, shares)


def _model_clock(model: DeviceModel | CallSeconds) -> ModelClock:
    return ModelClock(model.seconds if isinstance(model, CallSeconds) else partial(op_seconds, model))


def _typical_logging_s(trace: Trace, logging_s: Mapping[int, float]) -> float:
    """Typical time to log an op that a plan may replay: the median over the bytes that such ops make.

    Between kernels that fill the caches Python takes five times as long as between views, which no plan drops for
    their bytes: in a transformer every second op is one.

    Args:
        trace: The step.
        logging_s: Seconds by the index of an op of the forward.

    Returns:
        Seconds; 0 where no op makes anything that can be dropped.
    """
    timed = sorted((seconds, _droppable_bytes(trace, op)) for op, seconds in logging_s.items())
    passed_bytes = list(accumulate(n_bytes for _, n_bytes in timed))
    return next((s for (s, _), passed in zip(timed, passed_bytes, strict=True) if 2 * passed > passed_bytes[-1]), 0.0)


def _droppable_bytes(trace: Trace, op: int) -> int:
    made = {v for v in trace.ops[op].outputs if v in trace.droppable and trace.values[v].op == op}
    return sum(trace.value_bytes(v) for v in made)


def record(
    step: Callable[[], Tensor],
    *,
    budget_bytes: int | None = None,
    device: DeviceModel | CallSeconds | str | None = None,
    standing: Iterable[Tensor] = (),
    root: nn.Module | None = None,
    verify: str = "first",
    zeros: bool = False,
) -> Trace:
    """Run a step once, forward and backward, and record it.

    Works on real tensors and under ``FakeTensorMode``; there seconds come from a roofline model of ``device``, so that
    a plan needs neither a GPU nor memory. Gradients accumulate and buffers update as in any step.

    Args:
        step: Runs the forward and returns a scalar loss.
        budget_bytes: Evict online so that the step's allocations stay under this many bytes.
        device: Device whose speed fake tensors are given: a model, or a name from the table (``"h100"``).
        standing: Weights and buffers that count in the peak even where the step does not read them.
        root: The module that module paths start from; None is each module that the step itself calls.
        verify: As for a `Tape`, of values that are evicted; ``"never"`` where the gradients are of no use.
        zeros: Whether zeros are counted in saved outputs of ReLUs, and of max-pooling after them, which tells how small
            the codec `zvc` makes them: one more read of each.

    Returns:
        The trace.

    Raises:
        ConfigError: If ``step`` returns no scalar tensor that requires grad.
        ReplayError: If something that was evicted to stay under the budget came back with other contents.
    """
    model = device_model(device) if isinstance(device, str) else device
    evictor = Evictor(budget_bytes) if budget_bytes is not None else None
    recorder = Recorder(model, evictor, root=root, standing=standing, verify=verify, zeros=zeros)
    with recorder:
        loss = step()
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"step() must return a scalar loss that requires grad, found {found}.", "Return the loss."
            )
        loss.backward()
        del loss
    return recorder.trace()
