"""What a run logs, publishes and writes down."""

import json
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ctdr_lightning import CTDRCallback, Recovery
from ctdr_lightning.basics.gpu_memory import watch_peak
from ctdr_lightning.basics.nests import tensors_of
from ctdr_lightning.basics.units import GIB
from ctdr_lightning.memory import plan, record, simulate
from ctdr_lightning.recovery import Distillation
from ctdr_lightning.trainer.groups import grouped
from ctdr_lightning.trainer.reports.memory_report import MemoryReport
from ctdr_lightning.trainer.reports.monitor import Monitor, utilisation
from ctdr_lightning.trainer.training_step.device import allocated_peak_bytes, batch_size, device_peaks
from tests import parts
from tests.virtual_cuda.card import Card


class Recording(Logger):
    """A logger that keeps what it is given; subclasses offer what a service offers."""

    name, version = "recording", 0

    def __init__(self):
        super().__init__()
        self.metrics, self.texts, self.images = {}, {}, {}

    def log_metrics(self, metrics, step=None):
        self.metrics |= metrics

    def log_hyperparams(self, params, *args, **kwargs):
        """Nothing is kept of these."""


class LikeWandb(Recording):
    def log_text(self, key, columns, data, step=None):
        self.texts[key] = data[0][0]

    def log_image(self, key, images, step=None):
        self.images[key] = images[0]


class LikeMlflow(Recording):
    run_id = "run 7"

    @property
    def experiment(self):
        return SimpleNamespace(
            log_text=lambda run, text, file: self.texts.update({file: (run, text)}),
            log_figure=lambda run, figure, file: self.images.update({file: (run, figure)}),
        )


class Broken(Recording):
    def log_text(self, **_):
        raise ConnectionError("no route to host")


def run(*loggers, **options):
    given = {"rank": 0.5, "policy": "sqrt", "verbose": False, **options}
    return parts.fit(parts.blobs(), CTDRCallback(**grouped(given)), logger=list(loggers), max_epochs=2)


SCALARS = {
    "peak_memory_gib", "predicted_peak_gib", "samples_per_s", "step_time_s", "recompute_s", "parameters_before",
    "parameters_after", "compression",
}  # fmt: skip


def test_tensorboard_gets_scalars_the_report_and_the_picture(tmp_path):
    run(TensorBoardLogger(tmp_path))
    events = EventAccumulator(str(tmp_path / "lightning_logs" / "version_0"))
    events.Reload()
    assert {f"ctdr/{name}" for name in SCALARS} <= set(events.Tags()["scalars"])
    assert len(events.Scalars("ctdr/step_time_s")) == 8
    assert "ctdr/memory" in events.Tags()["images"]
    texts = [events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]]
    assert any("whole model" in text for text in texts)
    assert any("Policy sqrt" in text for text in texts)


def test_the_text_of_a_plan_says_nothing_twice(tmp_path):
    run(CSVLogger(tmp_path), policy="auto", memory_budget="1GiB")
    lines = (tmp_path / "lightning_logs" / "version_0" / "ctdr" / "memory_plan.txt").read_text().splitlines()
    told = [line for line in lines if line.startswith("Policy auto: ")]
    assert len(told) == 1
    assert "For batches of" in told[0]
    assert any("kept, holds" in line for line in lines)


def test_csv_gets_scalars_and_files_beside_them(tmp_path):
    run(CSVLogger(tmp_path))
    folder = tmp_path / "lightning_logs" / "version_0"
    head = (folder / "metrics.csv").read_text().splitlines()[0]
    assert all(f"ctdr/{name}" in head for name in SCALARS)
    assert "net.3" in (folder / "ctdr" / "decomposition.txt").read_text()
    assert "recomputed, frees" in (folder / "ctdr" / "memory_plan.txt").read_text()
    assert (folder / "ctdr" / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_services_get_scalars_the_report_and_the_picture_by_what_they_can_do():
    wandb, mlflow = LikeWandb(), LikeMlflow()
    run(wandb, mlflow)
    for logger in (wandb, mlflow):
        assert {f"ctdr/{name}" for name in SCALARS} <= set(logger.metrics)
    assert "whole model" in wandb.texts["ctdr/decomposition"]
    assert wandb.images["ctdr/memory"].axes
    assert mlflow.texts["ctdr/memory_plan.txt"][0] == "run 7"
    assert mlflow.images["ctdr/memory.png"][1].axes


def test_both_curves_of_the_picture_hold_the_optimizers_state():
    wandb = LikeWandb()
    run(wandb)
    (axes,) = wandb.images["ctdr/memory"].axes
    kept, planned = (line.get_ydata() for line in axes.lines)
    assert kept[0] == planned[0]  # before anything is saved or dropped
    assert max(planned) < max(kept)


def test_a_service_that_fails_does_not_stop_the_run(caplog):
    logger = Broken()
    run(logger)
    assert "no route to host" in caplog.text
    assert "ctdr/step_time_s" in logger.metrics


def test_once_an_interval_and_no_more():
    seen = []

    class Counting(Recording):
        def log_metrics(self, metrics, step=None):
            if "ctdr/step_time_s" in metrics:
                seen.append(step)

    module = parts.blobs()
    parts.fit(
        module,
        CTDRCallback(rank=0.5, policy="keep", verbose=False),
        logger=Counting(),
        max_epochs=2,
        log_every_n_steps=3,
    )
    assert seen == [2, 5]


def test_with_accumulation_the_interval_counts_optimizer_steps():
    logger = Recording()
    parts.fit(
        parts.blobs(), CTDRCallback(rank=0.5, policy="keep", verbose=False), logger=logger, max_epochs=2,
        log_every_n_steps=2, accumulate_grad_batches=2,
    )  # fmt: skip
    assert logger.metrics["ctdr/samples_per_s"] * logger.metrics["ctdr/step_time_s"] == pytest.approx(8, rel=1e-3)


def test_the_teacher_is_logged():
    logger = Recording()
    run(logger, recovery=Recovery(distill=Distillation(module="net")))
    assert {"ctdr/teacher_gib", "ctdr/teacher_s", "ctdr/distill_loss", "ctdr/stage"} <= set(logger.metrics)


def test_validation_is_not_counted_as_step_time(monkeypatch):
    now = iter([0.0, 1.0, 5.0, 5.0, 6.0])
    monkeypatch.setattr("ctdr_lightning.trainer.reports.monitor.perf_counter", lambda: next(now))
    monitor = Monitor()
    monitor.start()
    monitor.batch_start()
    monitor.batch_end(torch.zeros(4, 2), stepped=True)
    monitor.pause()
    monitor.resume()
    monitor.batch_start()
    monitor.batch_end(torch.zeros(4, 2), stepped=True)
    values = monitor.interval(SimpleNamespace(world_size=2))
    assert values == {"ctdr/step_time_s": 1.0, "ctdr/samples_per_s": 8.0}


@pytest.mark.parametrize("usual", [2, 0])
def test_batches_that_are_recorded_or_planned_are_timed_only_where_there_are_no_others(monkeypatch, usual):
    clock = [0.0]
    monkeypatch.setattr("ctdr_lightning.trainer.reports.monitor.perf_counter", lambda: clock[0])
    monitor = Monitor()
    monitor.start()
    for seconds, is_usual in [(10.0, False), (20.0, False), (0.5, True), (0.5, True)][: 2 + usual]:
        monitor.batch_start()
        clock[0] += seconds
        monitor.batch_end(torch.zeros(4, 2), stepped=True, usual=is_usual)
    values = monitor.interval(SimpleNamespace(world_size=1))
    step_s = 0.5 if usual else 15.0
    assert values == {"ctdr/step_time_s": step_s, "ctdr/samples_per_s": 4 / step_s}


@pytest.mark.parametrize("options", [{}, {"rank": None, "policy": "auto", "memory_budget": "1GiB"}], ids=str)
def test_the_first_batches_are_recorded_and_planned_and_later_ones_are_usual(monkeypatch, options):
    found, end = [], Monitor.batch_end

    def noted(self, batch, **told):
        found.append(told["usual"])
        end(self, batch, **told)

    monkeypatch.setattr(Monitor, "batch_end", noted)
    run(**options)
    assert not found[0]
    assert all(found[5:])


def test_utilisation_is_the_share_of_the_devices_promise(monkeypatch):
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), precision="bf16-mixed")
    assert utilisation(trainer, 10**9, 0.1) == {}
    monkeypatch.setattr("ctdr_lightning.trainer.reports.monitor.peak_flops", lambda _: 1e11)
    assert utilisation(trainer, 10**9, 0.1) == {"ctdr/mfu": pytest.approx(0.1)}
    assert utilisation(trainer, 0, 0.1) == {}


def test_operations_are_counted_once_without_recomputation(monkeypatch):
    monkeypatch.setattr("ctdr_lightning.trainer.reports.monitor.peak_flops", lambda _: 1e12)
    monkeypatch.setattr("ctdr_lightning.trainer.fit_run.peak_flops", lambda _: 1e12)
    found = []
    for policy in ("keep", "sqrt"):
        callback = CTDRCallback(rank=None, policy=policy, verbose=False)
        trainer = parts.fit(parts.blobs(), callback, max_epochs=1)
        found.append(callback.run.steps.meters.step_flops)
        assert trainer.callback_metrics["ctdr/mfu"] > 0
    convolutions = 2 * 8 * 64 * 9 * (1 * 8 + 8 * 16 + 16 * 16)
    linear = 2 * 8 * 16 * 4
    assert found[0] == found[1] == 3 * (convolutions + linear) - 2 * 8 * 64 * 9 * 1 * 8


@pytest.mark.parametrize(("policy", "options"), [("keep", {}), ("sqrt", {}), ("gist", {"codecs": "exact"})])
def test_a_step_that_runs_out_of_memory_is_accounted_for(tmp_path, caplog, policy, options):
    class Hungry(parts.Blobs):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
            return loss

    callback = CTDRCallback(rank=None, policy=policy, verbose=False, **grouped({"retry_on_oom": False, **options}))
    with pytest.raises(torch.OutOfMemoryError):
        parts.fit(Hungry(), callback, default_root_dir=tmp_path)
    stem = tmp_path / "ctdr-out-of-memory-step2-rank0"
    text = stem.with_suffix(".txt").read_text()
    assert ("a memory_budget (0.9 of a GPU's memory, say) plans the steps" in caplog.text) == (policy == "keep")
    assert "Tried to allocate 1.00 GiB" in text
    assert "HINT" in text
    rows = json.loads(stem.with_suffix(".json").read_text())["tensors"]
    assert [row["bytes"] for row in rows] == sorted((row["bytes"] for row in rows), reverse=True)
    if policy == "sqrt":
        assert any(row["module"].startswith("net.") for row in rows)
        assert all(row["module"] in text for row in rows)


def test_tensors_of_nested_batches():
    batch = {"a": [torch.zeros(3, 2), "word", 4], "b": SimpleNamespace(c=torch.zeros(5))}
    assert [tuple(t.shape) for t in tensors_of(batch)] == [(3, 2), (5,)]
    assert batch_size(batch) == 3
    assert batch_size("no tensor") == 1
    assert batch_size(torch.tensor(3.0)) == 1


@pytest.mark.parametrize(("pinned_bytes", "logged"), [(3 << 30, 3.0), (None, None)])
def test_pinned_memory_is_logged_where_tensors_wait_in_it(pinned_bytes, logged):
    memory = SimpleNamespace(
        session=SimpleNamespace(), last_plan=None, rest_peak_bytes=0, offloads=True, most_pinned_bytes=pinned_bytes
    )
    assert MemoryReport(memory).predicted().get("ctdr/pinned_gib") == logged


def test_the_closing_figures_are_those_of_the_largest_batches_not_of_the_last():
    """Under a budget an epoch's last, smaller batch may peak higher than a whole one: it keeps more."""
    net = torch.nn.Sequential(*(layer for _ in range(6) for layer in (torch.nn.Linear(16, 16), torch.nn.Tanh())))
    traces = [record(lambda n=n: net(torch.ones(n, 16)).sum()) for n in (512, 448)]
    plans = [plan(traces[0], simulate(traces[0]).peak_bytes * 4 // 5), plan(traces[1], policy="keep")]
    memory = SimpleNamespace(session=SimpleNamespace(plans=plans), rest_peak_bytes=0)
    peaks = MemoryReport(memory).plan_peaks()
    assert peaks.predicted_bytes == plans[1].peak_bytes > plans[0].peak_bytes
    assert peaks.unplanned_bytes == simulate(traces[0]).peak_bytes
    assert peaks.slowdown == plans[0].slowdown


def test_the_peak_of_an_interval_outlives_the_peaks_that_are_watched_within(monkeypatch):
    card, device = Card().install(monkeypatch), torch.device("cuda", 0)
    card.allocate(3 * GIB)
    card.free(3 * GIB)
    watch_peak(device)  # as for each op of a recorded step
    assert allocated_peak_bytes(device) == 3 * GIB
    assert device_peaks(device) == {"ctdr/peak_memory_gib": 3.0, "ctdr/peak_reserved_gib": 3.0}
    assert device_peaks(device) == {"ctdr/peak_memory_gib": 0.0, "ctdr/peak_reserved_gib": 0.0}
