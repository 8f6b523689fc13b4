"""The recipe sharded over two processes (FSDP2): it trains what DDP trains, and its checkpoints load anywhere."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest
import timm
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.pages.run_folder import read_runs
from ctdr_recipes import train as recipe
from ctdr_recipes.classifier import cnn
from ctdr_recipes.sharding import shard, units
from tests import forks, parts
from tests.recipes.test_configs import CONF
from tests.recipes.test_train import QUIET, TINY

TWO = ["trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.devices=2"]
SHARDED = ["trainer=fsdp", *TWO]
UNCUT = ["ctdr.rank=null", "ctdr.policy=keep"]
LONGER = ["trainer.max_epochs=2", "model.optimizer.lr=0.01"]
TRAINED = [*UNCUT, *LONGER]
CUT = ["ctdr.rank=0.4", "ctdr.policy=keep", *LONGER]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def composed(folder, words):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", [f"output_dir={folder}", *words])


def run(folder, name, words):
    """Train in this process, one of two; writes its scores."""
    scores = recipe.train(composed(folder / name, words))
    (folder / f"{name}{parts.rank()}.json").write_text(json.dumps(scores))


def two(folder, name, *overrides, base=TINY):
    """Train on two processes; returns the scores, which both must have."""
    assert forks.run(run, folder, name, [*base, *overrides], ranks=2) == [0, 0]
    each = [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in (0, 1)]
    first, second = ({key: scores[key] for key in scores if key.startswith(("val/", "test/"))} for scores in each)
    assert first == second
    return first


def alone(folder, *overrides):
    return recipe.train(composed(folder, [*TINY, *overrides]))


def weights(folder, name):
    """The last checkpoint's."""
    state = torch.load(folder / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return {key: tensor for key, tensor in state.items() if not key.startswith("HINT")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A sharded run of two epochs: its folder and its scores."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, two(folder, "sharded", *SHARDED, *TRAINED)


@pytest.mark.slow
def test_a_sharded_run_is_ddps_to_the_bit(trained, tmp_path):
    folder, scores = trained
    assert two(tmp_path, "ddp", "trainer=ddp", *TWO, *TRAINED) == scores
    assert scores["test/acc"] > 0.15
    assert parts.same(weights(folder, "sharded"), weights(tmp_path, "ddp"))


@pytest.mark.slow
def test_a_checkpoint_of_a_sharded_run_scores_alike_sharded_and_on_one_device(trained, tmp_path):
    folder, scores = trained
    evaluated = f"evaluate={folder / 'sharded' / 'checkpoints' / 'last.ckpt'}"
    assert two(tmp_path, "again", *SHARDED, *UNCUT, evaluated) == scores
    # two processes share 719 images evenly, so that one of them counts twice
    assert alone(tmp_path / "alone", "ctdr=none", evaluated)["test/acc"] == pytest.approx(
        scores["test/acc"], abs=1 / 719
    )


def peaks(folder, name):
    """Measured peaks of the first process's steps in bytes."""
    (found,) = read_runs(folder / name)
    return [round(peak * 2**30) for peak in found.record.series("ctdr/peak_memory_gib", "step")[1]]


@pytest.mark.slow
def test_a_budget_of_seven_tenths_of_the_plain_peak_is_kept_and_changes_nothing_else(tmp_path):
    deep = [
        *SHARDED,
        *LONGER,
        "ctdr.rank=null",
        "model.net.widths=[8,8,8,8,8,8,8,8,8,8]",
        "model.net.strides=[1,1,1,1,1,1,1,1,1,1]",
    ]
    plain = two(tmp_path, "plain", *deep, "ctdr.policy=keep")
    budget = int(0.7 * max(peaks(tmp_path, "plain")))
    assert two(tmp_path, "planned", *deep, f"ctdr.memory_budget={budget}") == plain
    assert parts.same(weights(tmp_path, "plain"), weights(tmp_path, "planned"))
    steps = peaks(tmp_path, "planned")
    assert len(steps) == 12
    assert max(steps[1:]) <= budget  # the first step is recorded, without a plan


@pytest.mark.slow
def test_a_resumed_sharded_run_is_the_undisturbed_one(tmp_path):
    steady = [*SHARDED, *CUT, "model.scheduler=null", "ckpt_path=last"]
    straight = two(tmp_path, "straight", *steady)
    first = two(tmp_path, "same", *steady, "trainer.max_epochs=1")
    assert two(tmp_path, "same", *steady) == straight != first
    assert parts.same(weights(tmp_path, "same"), weights(tmp_path, "straight"))


@pytest.mark.slow
def test_the_best_checkpoint_of_a_sharded_run_is_tested(tmp_path):
    scores = two(tmp_path, "best", *SHARDED, *CUT, "trainer.max_epochs=3", "test=best")
    (best,) = (tmp_path / "best" / "checkpoints").glob("best*.ckpt")
    again = two(tmp_path, "again", *SHARDED, *CUT, f"evaluate={best}")
    assert scores["test/loss"] == again["test/loss"]


@pytest.mark.slow
def test_a_decomposed_checkpoint_is_where_a_sharded_run_starts(tmp_path):
    alone(tmp_path / "cut", "ctdr.rank=0.4", "ctdr.policy=keep", "trainer.max_epochs=1")
    two(tmp_path, "on", *SHARDED, *TRAINED, f"init_from={tmp_path / 'cut' / 'checkpoints' / 'last.ckpt'}")
    cut, on = weights(tmp_path, "cut"), weights(tmp_path, "on")
    assert {key: value.shape for key, value in on.items()} == {key: value.shape for key, value in cut.items()}
    assert not parts.same(cut, on)


@pytest.mark.slow
def test_layers_are_cut_before_they_are_sharded(tmp_path):
    assert two(tmp_path, "sharded", *SHARDED, *CUT) == two(tmp_path, "ddp", "trainer=ddp", *TWO, *CUT)
    assert parts.same(weights(tmp_path, "sharded"), weights(tmp_path, "ddp"))
    factors = [name for name in weights(tmp_path, "sharded") if ".tucker." in name or ".spatial." in name]
    assert len(factors) >= 3


@pytest.mark.slow
def test_a_recipe_with_recovery_runs_sharded(tmp_path):
    digits = ["experiment=digits", *SHARDED, "trainer.max_epochs=1", "ctdr.policy=keep"]
    assert "test/acc" in two(tmp_path, "recovered", *digits)


@pytest.mark.slow
def test_the_parts_that_each_process_wrote_are_evaluated_too(trained, tmp_path):
    two(tmp_path, "parts", *SHARDED, *TRAINED, "trainer.strategy.save_distributed_checkpoint=true")
    written = tmp_path / "parts" / "checkpoints" / "last.ckpt"
    assert len(list(written.glob("*.distcp"))) == 2
    assert two(tmp_path, "again", *SHARDED, *UNCUT, f"evaluate={written}") == trained[1]


VIT = ["model=timm", "model.net.model_name=vit_tiny_patch16_224", "+model.net.img_size=32", "data.image_size=32"]
RESNET = ["model=torchvision", "data=image_folder", "data.image_size=32", "data.n_workers=0", "task.n_classes=2"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("net", "batch"), [(VIT, 16), (RESNET, 3)], ids=["timm", "torchvision"])
def test_published_nets_are_sharded(tmp_path, image_root, net, batch):
    root = [f"data.root={image_root}"] if net is RESNET else ["+trainer.limit_train_batches=4"]
    words = [*TWO, *TRAINED, "model.optimizer.lr=0.001", "trainer.max_epochs=1", "test=false"]
    base = [*QUIET, *net, *root, f"data.batch_size={batch}"]
    scores = [two(tmp_path, kind, f"trainer={kind}", *words, base=base) for kind in ("ddp", "fsdp")]
    assert scores[0] == scores[1]
    assert parts.same(weights(tmp_path, "ddp"), weights(tmp_path, "fsdp"))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(nodes, node, port, folder):
    """The command line of one node; all nodes have two processes together. It says no trainer.devices."""
    words = ["--nnodes", nodes, "--node_rank", node, "--nproc_per_node", 2 // nodes, "--master_port", port]
    return [
        sys.executable, "-m", "torch.distributed.run", *map(str, words), "-m", "ctdr_recipes.train",
        *SHARDED[:-1], *TINY, *TRAINED, f"hydra.run.dir={folder}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "nodes", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.exhaustive)]
)
def test_torchrun_starts_the_processes(trained, tmp_path, nodes):
    port = free_port()
    with ExitStack() as stack:
        lines = [launch(nodes, node, port, tmp_path / "run") for node in range(nodes)]
        started = [stack.enter_context(subprocess.Popen(line, cwd=CONF.parent, env=ENV)) for line in lines]
        assert [process.wait(300) for process in started] == [0] * nodes
    assert parts.same(weights(tmp_path, "run"), weights(trained[0], "sharded"))


@pytest.mark.slow
def test_the_command_starts_the_processes(trained, tmp_path):
    words = ["recipes", "run", "digits_dense", f"hydra.run.dir={tmp_path / 'run'}", "ctdr=default", *UNCUT]
    line = [sys.executable, "-m", "ctdr_lightning.cli", *words, *SHARDED, *TINY, *LONGER]
    assert subprocess.run(line, cwd=CONF.parent, env=ENV, timeout=300).returncode == 0
    assert parts.same(weights(tmp_path, "run"), weights(trained[0], "sharded"))


def shard_others():
    dist.init_process_group("gloo", rank=parts.rank(), world_size=2)
    parts.seed_everything(0, verbose=False)
    net = cnn([4, 8], [1, 1])
    with torch.no_grad():
        net.head.bias[0] += parts.rank()
    with pytest.raises(ConfigError, match="differ between the processes"):
        shard(net, init_device_mesh("cpu", (2,)))


def test_weights_that_differ_are_not_sharded():
    assert forks.run(shard_others, ranks=2) == [0, 0]


def share(modules, net):
    """Of a network's weights that modules hold."""
    return sum(weight.numel() for module in modules for weight in module.parameters()) / sum(
        weight.numel() for weight in net.parameters()
    )


def test_a_stage_of_many_blocks_is_opened_and_a_block_of_one_layer_is_not():
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), nn.ReLU()
    )
    assert units(net) == [net[0], *net[1]]


def test_layers_that_an_attention_reads_without_their_forward_are_no_units():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    found = units(nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 2), "head": nn.Linear(8, 2)})["encoder"])
    assert [type(unit) for unit in found] == [nn.TransformerEncoderLayer] * 2
    assert units(layer.self_attn) == []


def test_blocks_that_share_weights_with_another_part_stay_in_the_root():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    net[2].weight = net[0].weight
    assert units(net) == [net[1]]
    twice = nn.Sequential(net[1], nn.ReLU(), net[1], nn.Linear(8, 8))
    assert units(twice) == [twice[3]]


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "regnety_002"])
def test_the_blocks_of_published_nets_hold_their_weights(name):
    net = timm.create_model(name)
    found = units(net)
    assert len(found) >= 8
    assert share(found, net) > 0.9
    inner = {id(module) for unit in found for module in unit.modules()}
    assert len(inner) == sum(len(list(unit.modules())) for unit in found), "a unit within another"
