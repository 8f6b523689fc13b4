"""A table of features on shards: each trains as plain sharded training does, to the bit, or is refused by name."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from ctdr_lightning import CTDRCallback, decompose
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.trainer.structure import factorized_names
from tests import forks, parts
from tests.trainer.test_sharded_peaks import Gpt
from tests.trainer.test_tensor_parallel import Perceptrons

STEPS = 4
EXACT = {
    "a budget": {"memory_budget": 0.8},
    "sqrt": {"policy": "sqrt"},
    "an optimal plan": {"policy": "optimal_fast", "memory_budget": 0.9},
    "offloading": {"policy": "vdnn_all", "memory": {"offload": ["disk"]}},
    "offloading by a budget": {"memory_budget": 0.8, "memory": {"offload": ["disk"]}},
    "exact codecs": {"memory_budget": 0.8, "memory": {"codecs": "exact"}},
    "gradients that stay": {"memory_budget": 0.9, "memory": {"keep_gradients": True}},
    "always verified": {"policy": "sqrt", "memory": {"verify": "always"}},
    "two batches a step": {"policy": "sqrt", "trainer": {"accumulate_grad_batches": 2}},
    "bfloat16": {"policy": "sqrt", "trainer": {"precision": "bf16-mixed"}},
    "clipped gradients": {"policy": "sqrt", "trainer": {"gradient_clip_val": 0.5}},
}
REFUSED = {
    "the optimizer's state away": ({"memory": {"optimizer_state": "disk"}}, "shards|offload"),
    "the step in the backward": ({"memory": {"optimizer_step": "in_backward"}}, "optimizer_step"),
    "batches in parts": ({"memory": {"sub_batches": 2}}, "process"),
    "ranks for the budget": ({"rank": "auto", "memory_budget": "1GiB"}, "rank=0.25"),
}


class TensorParallel(Perceptrons):
    """The blocks of perceptrons, with data of its own."""

    def data(self):
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(STEPS * 512, 64, generator=generator)
        return torch.utils.data.TensorDataset(images, torch.randint(10, (STEPS * 512,), generator=generator)), 512


def run(kind, callback=None, trainer=None):
    parts.seed_everything(0, verbose=False)
    module = kind()
    data, batch_size = module.data()
    tensor_parallel = issubclass(kind, TensorParallel)
    strategy = ModelParallelStrategy(
        data_parallel_size=1 if tensor_parallel else 2, tensor_parallel_size=2 if tensor_parallel else 1,
        process_group_backend="gloo",
    )  # fmt: skip
    callbacks = [] if callback is None else [callback]
    loaders = torch.utils.data.DataLoader(data, batch_size), None
    parts.fit(module, *callbacks, data=loaders, strategy=strategy, devices=2, max_steps=STEPS, **trainer or {})
    return module


def weights(module):
    return [p.to_local() if hasattr(p, "to_local") else p.detach() for p in module.parameters()]


def callback_of(options):
    return CTDRCallback(**{"rank": None, "verbose": False, **options})


def check_exact(kind, name):
    options = dict(EXACT[name])
    trainer = options.pop("trainer", None)
    plain = run(kind, trainer=trainer)
    if isinstance(options.get("memory_budget"), float):
        whole = callback_of({**options, "memory_budget": 2**30})
        run(kind, whole, trainer)
        options["memory_budget"] = int(options["memory_budget"] * whole.run.memory.session.plan.peak_bytes)
    callback = callback_of(options)
    module = run(kind, callback, trainer)
    assert callback.run.memory.session.plan.actions
    assert parts.same(plain.losses, module.losses)
    assert parts.same(weights(plain), weights(module))


def check_refused(kind, name):
    options, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said):
        run(kind, callback_of(options))


def check_ranks_beside_a_tensor_parallel_plan():
    choices = {"rank": 0.5, "select": "first"}

    class Cut(TensorParallel):
        def __init__(self):
            super().__init__()
            decompose(self, **choices, progress=False)

    called = run(TensorParallel, callback_of({**choices, "policy": "keep", "ranks": {"data": None}}))
    assert factorized_names(called) == {"first"}
    assert parts.same(run(Cut).losses, called.losses)


@pytest.mark.slow
def test_layers_outside_of_a_tensor_parallel_plan_are_decomposed():
    assert forks.run(check_ranks_beside_a_tensor_parallel_plan, ranks=2) == [0, 0]


KINDS = {"FSDP2": Gpt, "tensor parallel": TensorParallel}


def cases():
    for kind in KINDS:
        for name in EXACT:
            if (kind, name) != ("tensor parallel", "clipped gradients"):  # torch sums no norms of both kinds of tensors
                yield kind, name


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), cases())
def test_shards_train_to_the_bit(kind, name):
    assert forks.run(check_exact, KINDS[kind], name, ranks=2) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", KINDS)
def test_what_shards_do_not_allow_is_refused_by_name(kind, name):
    assert forks.run(check_refused, KINDS[kind], name, ranks=2) == [0, 0]
