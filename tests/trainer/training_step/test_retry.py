"""A step that runs out of memory is run again as if the first try had never been, or not at all."""

import gc
import random
import weakref
from collections import deque

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from ctdr_lightning import CTDRCallback
from ctdr_lightning.basics.errors import InfeasibleBudgetError, OffloadError
from ctdr_lightning.memory.holders.pinned import pin
from ctdr_lightning.trainer.groups import grouped
from ctdr_lightning.trainer.reports.event_words import words_of
from ctdr_lightning.trainer.training_step.memory_stage import MemoryStage
from ctdr_lightning.trainer.training_step.retry import retry, snapshot
from tests import parts
from tests.memory.leaks import assert_nothing_is_installed
from tests.virtual_cuda.card import Card


def trouble(where=None, at=1, message="CUDA out of memory. Tried to allocate 1 GiB.", times=1):
    """Raises so often, at a place in a batch. Its memory is a closure's, which no retry can take back."""
    left = [times if where else 0]

    def at_place(place, index):
        if left[0] and place == where and index == at:
            left[0] -= 1
            raise torch.OutOfMemoryError(message)

    at_place.pending = lambda: left[0] > 0
    return at_place


class Net(LightningModule):
    """Dropout, BatchNorm and a metric: whatever a careless retry would change."""

    def __init__(self, fails=None):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )
        self.seen = MeanMetric()
        self.fails = fails or trouble()
        self.calls = 0
        self.prepare()

    def prepare(self):
        pass

    def touch(self, batch, index):
        """Whatever else a step does."""
        return 0

    def training_step(self, batch, index):
        self.calls += 1
        extra = self.touch(batch, index)
        loss = self.net(batch[0]).square().mean() + extra
        self.seen.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.fails("forward", index)
        self.log("again", loss * 2, on_epoch=True)
        return loss

    def backward(self, loss, *args, **kwargs):
        if self.fails.pending():
            self.net[4].weight.grad = torch.ones_like(self.net[4].weight)
        self.fails("backward", self.trainer.global_step)
        self.net[4].weight.grad = None
        super().backward(loss, *args, **kwargs)

    def on_train_epoch_end(self):
        self.log("seen", self.seen)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)

    def state(self):
        """What it is afterwards, beside its weights."""
        return {}


def fit(net, tmp_path, **options):
    trainer_options = options.pop("trainer", {})
    seed_everything(0, verbose=False)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.3)
    data = DataLoader(TensorDataset(torch.randn(48, 8)), batch_size=12)
    callback = CTDRCallback(rank=None, memory_budget="1GiB", policy="sqrt", verbose=False, **grouped(options))
    trainer = Trainer(
        default_root_dir=tmp_path, max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback], deterministic=True, **trainer_options,
    )  # fmt: skip
    trainer.fit(net, data)
    metrics = {k: v.item() for k, v in trainer.callback_metrics.items() if not k.startswith("ctdr/")}
    left = {
        "weights": dict(net.state_dict()),
        "metrics": metrics,
        "calls": net.calls,
        "torch": torch.get_rng_state(),
        "python": random.random(),
        "numpy": np.random.rand(),
        **net.state(),
    }
    return left, callback


def rescued(kind, where, step, tmp_path, times=1, **options):
    """A run that failed so often beside one that never did; the callback of the first."""
    want, _ = fit(kind(), tmp_path, **options)
    fails = trouble(where, step, times=times)
    found, callback = fit(kind(fails), tmp_path, **options)
    assert not fails.pending(), "nothing failed"
    assert any("ran out of memory" in words_of(event) for event in callback.run.memory.session.events)
    for name in want:
        assert parts.same(want[name], found[name]), name
    assert_nothing_is_installed()


def refused(kind, where, step, tmp_path, match, **options):
    """A run that fails once and ends there, with the reason."""
    with pytest.raises(torch.OutOfMemoryError, match=match) as caught:
        fit(kind(trouble(where, step)), tmp_path, **options)
    assert "Tried to allocate 1 GiB" in str(caught.value)
    assert "cannot be retried" in str(caught.value)
    assert list(tmp_path.glob("ctdr-out-of-memory-*.txt"))
    assert_nothing_is_installed()


class Teacher(Net):
    """An average of the weights, updated in the step."""

    width = 32

    def prepare(self):
        self.teacher = nn.Linear(self.width, self.width).requires_grad_(False)

    def touch(self, batch, index):
        self.teacher.weight.mul_(0.9).add_(self.net[4].weight.detach().mean(), alpha=0.1)
        return self.teacher.weight.mean()


class TeacherOfData(Teacher):
    def touch(self, batch, index):
        self.teacher.weight.data.mul_(0.9).add_(self.net[4].weight.data.mean(), alpha=0.1)
        return self.teacher.weight.mean()


class LargeTeacher(Teacher):
    width = 300


class LargeTeacherOfData(TeacherOfData):
    width = 300


class Queue(Net):
    """A queue of features as MoCo has it, and where its next entry goes."""

    def prepare(self):
        self.register_buffer("queue", torch.zeros(64, 2048))
        self.position = 0

    def touch(self, batch, index):
        self.queue[self.position] = self.net[0].weight.detach().mean() + self.queue[self.position - 1]
        self.position = (self.position + 1) % 64
        return self.queue[: self.position].mean()

    def state(self):
        return {"position": self.position}


class Attributes(Net):
    """A hidden state, and every container that Python has."""

    def prepare(self):
        self.hidden = torch.zeros(1)
        self.list, self.deque, self.set, self.dict = [], deque(maxlen=3), set(), {"deep": [{"n": 0}]}
        self.slots = Slots()
        self.words = Words(range(1000))
        self.array = np.zeros(4)

    def touch(self, batch, index):
        self.hidden = (self.hidden + batch[0].mean()).tanh()
        self.list.append(self.hidden)
        self.deque.append(index)
        self.set.add(len(self.list))
        self.dict["deep"][0]["n"] += 1
        self.slots.count += 1
        self.array += self.dict["deep"][0]["n"]
        return self.hidden.mean() + next(self.words) + self.array.mean()

    def state(self):
        return {
            "containers": [self.list, list(self.deque), sorted(self.set), self.dict],
            "counts": [self.slots.count, next(self.words), self.array.tolist()],
        }


class Slots:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class Words:
    """An iterator of the user's own."""

    def __init__(self, source):
        self.source, self.position = source, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        return self.source[self.position]


class Random(Net):
    """Numbers of every generator."""

    def prepare(self):
        self.generators = [torch.Generator().manual_seed(3), random.Random(3), np.random.default_rng(3)]
        self.old = np.random.RandomState(3)

    def touch(self, batch, index):
        own = torch.rand(1, generator=self.generators[0]) + self.generators[1].random() + self.generators[2].random()
        return own + random.random() + np.random.rand() + torch.rand(1) + self.old.rand()


class Batch(Net):
    """A batch that is changed in place."""

    def touch(self, batch, index):
        batch[0].mul_(1.5).add_(1)
        return 0


class Manual(Net):
    """Two optimizers that step by hand, toggled."""

    def prepare(self):
        self.automatic_optimization = False

    def training_step(self, batch, index):
        self.calls += 1
        for which, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            self.fails(f"forward {which}", index)
            loss = self.net(batch[0]).square().mean()
            self.manual_backward(loss)
            self.fails(f"backward {which}", index)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
        self.seen.update(loss.detach())

    def configure_optimizers(self):
        return torch.optim.Adam(self.net[:4].parameters()), torch.optim.SGD(self.net[4:].parameters(), 0.1)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("step", [0, 1])
def test_a_rescued_run_ends_like_one_that_never_failed(where, step, tmp_path):
    rescued(Net, where, step, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_last_try_ends_like_the_first_would_have(where, tmp_path):
    rescued(Net, where, 1, tmp_path, times=retry.MAX_TRIES - 1)


def planning_fails(monkeypatch, n_times):
    """Make the first plans after a failed step run out of memory."""
    tighten, left = MemoryStage.tighten, [n_times]

    def failing(self, message):
        left[0] -= 1
        if left[0] >= 0:
            raise MemoryError("std::bad_alloc")
        tighten(self, message)

    monkeypatch.setattr(MemoryStage, "tighten", failing)


def test_a_plan_that_runs_out_of_memory_is_made_again(tmp_path, monkeypatch):
    planning_fails(monkeypatch, retry.MAX_TRIES - 2)
    rescued(Net, "backward", 1, tmp_path)


def test_where_every_plan_runs_out_of_memory_the_step_says_so(tmp_path, monkeypatch):
    planning_fails(monkeypatch, retry.MAX_TRIES)
    refused(Net, "backward", 1, tmp_path, "to plan it for less ran out of memory, too")


KINDS = [Teacher, TeacherOfData, LargeTeacher, Queue, Attributes, Random, Batch]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_whatever_a_step_changes_is_put_back(kind, where, tmp_path):
    rescued(kind, where, 1, tmp_path)


@pytest.mark.parametrize("where", ["forward 0", "backward 0"])
def test_manual_optimization_is_repeated_from_before_the_first_optimizer_step(where, tmp_path):
    rescued(Manual, where, 1, tmp_path)


@pytest.mark.parametrize("where", ["forward 1", "backward 1"])
def test_no_optimizer_steps_twice(where, tmp_path):
    refused(Manual, where, 1, tmp_path, "Adam has begun to step")


def test_a_random_state_that_a_gpus_library_keeps_is_named(tmp_path, monkeypatch):
    layers = nn.ModuleDict({"a": nn.LSTM(4, 4, 2, dropout=0.1), "b": nn.Linear(4, 4)})
    assert not retry.hidden_random_state(layers)
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(nn.Parameter, "is_cuda", True, raising=False)
        assert "dropout in a" in retry.hidden_random_state(layers)
        assert not retry.hidden_random_state(layers.eval())
    monkeypatch.setattr(retry, "hidden_random_state", lambda module: "a state is hidden")
    rescued(Net, "forward", 0, tmp_path)  # the first step draws it
    refused(Net, "forward", 1, tmp_path, "a state is hidden")


def test_what_is_too_large_to_be_copied_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "COPIED_AT_MOST_BYTES", 1000)
    refused(LargeTeacher, "forward", 1, tmp_path, r"module.teacher.weight \(351.6 KiB\)")


def test_what_no_earlier_step_was_seen_to_write_is_named(tmp_path):
    refused(LargeTeacher, "forward", 0, tmp_path, r"module.teacher.weight \(351.6 KiB\)")


def test_a_write_that_no_version_tells_of_is_caught_in_the_second_try(tmp_path):
    refused(LargeTeacherOfData, "forward", 1, tmp_path, r"shape \(300, 300\) from before the step")


class Outside(Net):
    """A generator and a teacher that hang on no attribute."""

    def prepare(self):
        generator, teacher = torch.Generator(), torch.zeros(3)
        self.draw = lambda: torch.rand(1, generator=generator)
        self.average = lambda: teacher.add_(1).mean()


class OutsideGenerator(Outside):
    def touch(self, batch, index):
        return self.draw()


class OutsideTensor(Outside):
    def touch(self, batch, index):
        return self.average()


class Iterated(Net):
    def prepare(self):
        self.numbers = (n for n in range(1000))

    def touch(self, batch, index):
        return next(self.numbers)


class LargeArray(Net):
    def prepare(self):
        self.table = np.zeros((300, 300))


class Vocabulary(Net):
    def prepare(self):
        self.words = {str(n): n for n in range(20_000)}


class Hooked(Net):
    def on_before_backward(self, loss):
        self.calls += 1


@pytest.mark.parametrize(
    ("kind", "where", "match"),
    [
        (OutsideGenerator, "forward", "a generator that aten.rand"),
        (OutsideTensor, "forward", r"a tensor of shape \(3,\)"),
        (Iterated, "backward", "module.numbers, an iterator"),
        (LargeArray, "forward", "module.table, a NumPy array of 703.1 KiB"),
        (Vocabulary, "forward", "module.words, of so many entries"),
        (Hooked, "backward", "Hooked.on_before_backward runs between"),
    ],
)
def test_what_cannot_be_put_back_is_a_reason_not_to_repeat(kind, where, match, tmp_path):
    refused(kind, where, 1, tmp_path, match)


class Accumulated(Net):
    def backward(self, loss, *args, **kwargs):
        LightningModule.backward(self, loss, *args, **kwargs)
        self.fails("backward", self.trainer.fit_loop.epoch_loop.batch_idx)


@pytest.mark.parametrize(("batch", "repeated"), [(0, True), (1, False), (2, True)])
def test_gradients_of_an_earlier_batch_that_were_added_to_are_not_guessed(batch, repeated, tmp_path):
    options = {"trainer": {"accumulate_grad_batches": 2}}
    if repeated:
        rescued(Accumulated, "backward", batch, tmp_path, **options)
    else:
        refused(Accumulated, "backward", batch, tmp_path, "the gradient of module.net", **options)


class Circular(Net):
    """What a step makes hangs in a circle that only the garbage collector can break."""

    def __init__(self, fails, made):
        super().__init__(fails)
        self.touch = lambda batch, index: self.leave(made)

    def leave(self, made):
        box = [torch.ones(4)]
        box.append(box)
        made.append(weakref.ref(box[0]))
        return 0


def test_what_the_failed_try_left_in_circles_is_freed_before_the_next(tmp_path):
    made, alive = [], []
    once = trouble("forward", 1)

    def fails(place, index):
        alive.append([ref() is not None for ref in made])
        once(place, index)

    fails.pending = lambda: False
    gc.disable()
    try:
        fit(Circular(fails, made), tmp_path)
    finally:
        gc.enable()
    assert next(known for known in alive if len(known) == 3) == [False, False, True]


def test_retry_can_be_turned_off(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        fit(Net(trouble("forward")), tmp_path, retry_on_oom=False)


def test_a_step_that_never_fits_says_so_after_every_try(tmp_path):
    class Never(Net):
        def touch(self, batch, index):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        fit(Never(), tmp_path)


def test_other_errors_are_not_swallowed(tmp_path):
    class Fails(Net):
        def touch(self, batch, index):
            raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        fit(Fails(), tmp_path)


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"), True),
        (MemoryError(), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm`"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("NCCL error: unhandled cuda error (Failed to CUDA calloc 10485760 bytes)"), True),
        (OffloadError("4.0 MiB of host memory could not be pinned: CUDA error: out of memory."), False),
        (InfeasibleBudgetError("Nothing fits: out of memory"), False),
    ],
)
def test_signs_of_a_lack_of_memory(error, found):
    assert retry.is_out_of_memory(error) is found


@pytest.mark.parametrize(
    "said",
    [
        "GET was unable to find an engine to execute this computation",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    ],
)
def test_no_engine_is_a_lack_of_memory_on_a_gpu_that_is_nearly_full(said, monkeypatch):
    for taken, elsewhere, share, found in ((50, 45, 1.0, True), (50, 0, 1.0, False), (50, 0, 0.51, True)):
        card = Card(taken, total_bytes=100, elsewhere_bytes=elsewhere).install(monkeypatch)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _, share=share: share)
        assert retry.is_out_of_memory(RuntimeError(said)) is found, card.now_bytes
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not retry.is_out_of_memory(RuntimeError(said))


def test_memory_that_cannot_be_pinned_is_not_tried_again(monkeypatch):
    """CUDA says "out of memory" of the host's memory in the words that it has for its own."""

    def fails(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", fails)
    with pytest.raises(OffloadError) as caught:
        pin(4096)
    assert not retry.is_out_of_memory(caught.value)


@pytest.mark.parametrize(("accumulate", "scale"), [(1, 1), (3, 1), (4, 1), (1, 1024.0)])
def test_repeated_loss_is_scaled_like_the_first(accumulate, scale):
    loss = torch.tensor(0.7, requires_grad=True)
    given = loss / accumulate * scale
    assert torch.equal(retry.scaled_like(loss * 1, loss.detach(), given.detach(), accumulate), given)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_repeated_step_runs_under_autocast_like_the_first(where, tmp_path):
    trainer = {"precision": "bf16-mixed"}
    want, _ = fit(Net(), tmp_path, trainer=trainer)
    found, callback = fit(Net(trouble(where, 2)), tmp_path, trainer=trainer)
    said = [words_of(event) for event in callback.run.memory.session.events]
    assert any("ran out of memory" in text for text in said)
    assert not [text for text in said if "differed" in text]
    assert parts.same(want["weights"], found["weights"])
