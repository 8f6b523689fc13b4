"""The callback end to end: what it does to the model, what it logs, what a resumed run is, what it refuses."""

import inspect
from copy import deepcopy
from dataclasses import fields

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from ctdr_lightning import CTDRCallback, Memory, Ranks, Recovery, merge, restore
from ctdr_lightning.basics.errors import CheckpointError, ConfigError
from ctdr_lightning.decomposition import FactorizedLayer
from ctdr_lightning.recovery import Phase
from ctdr_lightning.trainer.groups import grouped
from ctdr_lightning.trainer.options import CallbackOptions
from tests import parts


def n_factorized(module):
    return sum(isinstance(layer, FactorizedLayer) for layer in module.modules())


def test_layers_are_cut_before_the_optimizer_is_made():
    module = parts.blobs()
    n_dense = sum(p.numel() for p in module.parameters())
    trainer = parts.fit(module, CTDRCallback(rank=0.5, policy="keep", verbose=False))
    owned = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert n_factorized(module) >= 2
    assert sum(p.numel() for p in module.parameters()) < n_dense
    assert owned == {id(p) for p in module.parameters()}


def test_rank_none_leaves_the_model_alone():
    module = parts.blobs()
    parts.fit(module, CTDRCallback(rank=None, policy="sqrt", verbose=False))
    assert n_factorized(module) == 0


@pytest.mark.parametrize("options", [{"policy": "sqrt"}, {"memory_budget": "1GiB", "policy": "sqrt"}])
def test_a_run_under_a_memory_plan_is_bit_identical_to_a_plain_one(options):
    plain, planned = parts.blobs(), parts.blobs()
    parts.fit(plain, max_epochs=2)
    callback = CTDRCallback(rank=None, verbose=False, **grouped(options))
    torch.manual_seed(0)
    parts.fit(parts.blobs(), max_epochs=0)
    planned = parts.blobs()
    parts.fit(planned, callback, max_epochs=2)
    assert callback.run.memory.session.plan.policy == "sqrt"
    assert parts.same(plain.losses, planned.losses)
    assert parts.same(plain.state_dict(), planned.state_dict())


def test_the_training_step_is_the_class_own_again_after_fit_and_after_an_exception():
    module = parts.blobs()
    parts.fit(module, CTDRCallback(rank=0.5, policy="sqrt", verbose=False))
    assert "training_step" not in vars(module)

    class Fails(parts.Blobs):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                raise RuntimeError("as asked")
            return super().training_step(batch, batch_idx)

    module = Fails()
    with pytest.raises(RuntimeError, match="as asked"):
        parts.fit(module, CTDRCallback(rank=0.5, policy="sqrt", verbose=False))
    assert "training_step" not in vars(module)
    assert not module._load_state_dict_pre_hooks
    module(torch.zeros(2, 1, 8, 8)).sum().backward()


def test_what_is_logged(tmp_path):
    callback = CTDRCallback(rank=0.5, policy="sqrt", verbose=False)
    trainer = parts.fit(parts.blobs(), callback, logger=CSVLogger(tmp_path), max_epochs=1)
    found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("ctdr/")}
    wanted = {"peak_memory_gib", "samples_per_s", "step_time_s", "parameters_before", "parameters_after", "compression"}
    assert wanted | {"predicted_peak_gib", "recompute_s"} <= {name.removeprefix("ctdr/") for name in found}
    assert found["ctdr/compression"] == pytest.approx(found["ctdr/parameters_before"] / found["ctdr/parameters_after"])
    assert found["ctdr/samples_per_s"] * found["ctdr/step_time_s"] == pytest.approx(8, rel=1e-3)
    written = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    assert "ctdr/peak_memory_gib" in written


def run_with_checkpoints(folder, epochs, ckpt_path=None, **options):
    module = parts.blobs()
    callback = CTDRCallback(**grouped({"rank": 0.5, "policy": "sqrt", "verbose": False, **options}))
    saver = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    trainer = parts.fit(module, callback, saver, max_epochs=epochs, enable_checkpointing=True, ckpt_path=ckpt_path)
    return module, trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"recovery": Recovery(phases=[Phase(1, "factors"), Phase(2, lr_scale=0.5, warmup_epochs=1)])}]
)
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(tmp_path, options):
    whole, whole_trainer = run_with_checkpoints(tmp_path / "whole", 4, **options)
    for epoch in (0, 1, 2):
        module, trainer = run_with_checkpoints(
            tmp_path / str(epoch), 4, ckpt_path=tmp_path / "whole" / f"epoch={epoch}.ckpt", **options
        )
        assert parts.same(whole.state_dict(), module.state_dict())
        assert parts.same(whole_trainer.optimizers[0].state_dict(), trainer.optimizers[0].state_dict())
        metrics = [t.callback_metrics for t in (whole_trainer, trainer)]
        assert all(torch.equal(metrics[0][name], metrics[1][name]) for name in ("loss", "val_loss", "val_acc"))
        assert parts.same(whole.losses[-4:], module.losses[-4:])


def test_restore_and_merge_after_training(tmp_path):
    module, _ = run_with_checkpoints(tmp_path, 1)
    restored = restore(parts.Blobs(), tmp_path / "epoch=0.ckpt").eval()
    module.eval()
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(module(x), restored(x))
    dense = merge(deepcopy(restored))
    assert n_factorized(dense) == 0
    assert torch.allclose(dense(x), restored(x), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": -0.5}, "rank"),
        ({"rank": {"net.*": -1}}, "rank"),
        ({"rank": True}, "rank"),
        ({"method": "tuker"}, "tucker"),
        ({"policy": "sqroot"}, "sqrt"),
        ({"memory_budget": -1}, "memory_budget"),
        ({"memory_budget": "8 bananas"}, "memory_budget"),
        ({"max_slowdown": float("nan")}, "max_slowdown"),
        ({"recovery": {"phase": []}}, "phases"),
        ({"recovery": {"reference": 0.9}}, "monitor"),
        ({"recovery": True, "rank": None}, "recovery"),
        ({"choices": {"version": 1}}, "choices"),
    ],
)
def test_a_bad_argument_is_named_when_the_callback_is_made(options, named):
    with pytest.raises(ConfigError, match=named) as caught:
        CTDRCallback(**grouped(options))
    assert caught.value.hint


def test_a_pattern_that_matches_no_layer_and_a_model_with_nothing_to_decompose():
    with pytest.raises(ConfigError, match="backbone"):
        parts.fit(parts.blobs(), CTDRCallback(rank=0.5, select="backbone.*", policy="keep", verbose=False))

    class Empty(parts.Blobs):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(64))

    with pytest.raises(ConfigError, match="nothing to decompose"):
        parts.fit(Empty(), CTDRCallback(rank=0.5, policy="keep", verbose=False))


def test_a_dense_checkpoint_is_refused_with_the_way_out(tmp_path):
    saver = ModelCheckpoint(dirpath=tmp_path, filename="dense")
    parts.fit(parts.blobs(), saver, enable_checkpointing=True, max_epochs=1)
    with pytest.raises(CheckpointError, match="without CTDRCallback") as caught:
        parts.fit(
            parts.blobs(), CTDRCallback(rank=0.5, policy="keep", verbose=False), ckpt_path=tmp_path / "dense.ckpt"
        )
    assert "load_state_dict" in caught.value.hint


def test_a_checkpoint_of_another_architecture_and_a_truncated_one(tmp_path):
    run_with_checkpoints(tmp_path, 1)
    path = tmp_path / "epoch=0.ckpt"
    with pytest.raises((CheckpointError, RuntimeError), match=r"size mismatch|do not fit"):
        parts.fit(parts.blobs(width=12), CTDRCallback(rank=0.5, policy="keep", verbose=False), ckpt_path=path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        parts.fit(parts.blobs(), CTDRCallback(rank=0.5, policy="keep", verbose=False), ckpt_path=path)
    assert "truncated" in caught.value.hint


def test_from_checkpoint_follows_the_plan_that_was_saved(tmp_path):
    module, _ = run_with_checkpoints(tmp_path, 1, rank="energy=0.7")
    again = CTDRCallback.from_checkpoint(tmp_path / "epoch=0.ckpt", verbose=False)
    fresh = parts.blobs(seed=5)
    parts.fit(fresh, again, max_epochs=1)
    assert [p.shape for p in fresh.parameters()] == [p.shape for p in module.parameters()]
    assert again.options.policy == "sqrt"


def test_the_options_and_the_callback_have_the_same_defaults():
    given = {name: item.default for name, item in inspect.signature(CTDRCallback).parameters.items()}
    assert given.pop("ranks") is given.pop("memory") is None
    own = {field.name for group in (Ranks, Memory) for field in fields(group)}
    assert {f.name: f.default for f in fields(CallbackOptions) if f.name not in own} == given


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memory": {"ofload": "disk"}}, "memory has the unknown entry 'ofload'"),
        ({"memory": {"method": "svd"}}, "memory has the unknown entry 'method'"),
        ({"ranks": ["svd"]}, r"ranks must hold entries, found \['svd'\]"),
        ({"memory": Ranks()}, "memory must hold entries, found Ranks"),
    ],
)
def test_a_group_is_its_class_or_a_mapping_to_its_fields(given, said):
    with pytest.raises(ConfigError, match=said):
        CTDRCallback("1GiB", **given)
    one = CTDRCallback("1GiB", ranks=Ranks(method="svd"), memory=Memory(sub_batches=2))
    assert one.options == CTDRCallback("1GiB", ranks={"method": "svd"}, memory={"sub_batches": 2}).options


def test_from_checkpoint_changes_single_fields_of_a_group(tmp_path):
    run_with_checkpoints(tmp_path, 1, rank=0.5, retry_on_oom=False, over_budget="least")
    path = tmp_path / "epoch=0.ckpt"
    field = CTDRCallback.from_checkpoint(path, memory={"over_budget": "raise"}, ranks={"allocate": None}).options
    assert (field.over_budget, field.retry_on_oom, field.allocate) == ("raise", False, None)
    assert field.choices is not None
    assert CTDRCallback.from_checkpoint(path, memory=Memory()).options.retry_on_oom
