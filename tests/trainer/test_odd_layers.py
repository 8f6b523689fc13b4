"""Networks whose weights are computed, and callbacks that prune, under every part of recovery."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

from ctdr_lightning import CTDRCallback, Recovery
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.recovery import Distillation, Phase
from ctdr_lightning.trainer.structure import factorized_names
from tests import parts

RECOVERIES = {
    "the default": Recovery(phases=[Phase(1)]),
    "everything": Recovery(
        cut_epochs=[0, 1], phases=[Phase(1, "factors")], distill=Distillation(module="net"), monitor="val_acc",
        reference="measure", max_drop=1.0, batchnorm_batches=2, stop_when_recovered=False,
    ),
}  # fmt: skip
LAYERS = {
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


def odd(kind):
    """The blobs' network with one convolution of an odd kind."""
    module = parts.blobs()
    LAYERS[kind](module.net[3])
    return module


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recovery", RECOVERIES)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_layer_with_a_computed_weight_stays_and_the_others_are_cut(kind, recovery):
    module = odd(kind)
    parts.fit(module, CTDRCallback(rank=0.5, recovery=RECOVERIES[recovery], policy="keep", verbose=False))
    assert {"net.0", "net.7", "net.11"} >= factorized_names(module) != set()
    assert all(torch.isfinite(loss) for loss in module.losses)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_memory_plan_changes_no_bit_of_it(kind):
    plain, planned = odd(kind), odd(kind)
    for module, callbacks in ((plain, ()), (planned, (CTDRCallback(rank=None, policy="sqrt", verbose=False),))):
        parts.seed_everything(1, verbose=False)
        parts.fit(module, *callbacks)
    assert parts.same(plain.state_dict(), planned.state_dict())


def pruner(**options):
    return ModelPruning("l1_unstructured", amount=0.5, **options)


@pytest.mark.parametrize("ours_first", [True, False])
def test_pruning_beside_a_decomposition_is_refused_with_a_way_that_works(ours_first):
    ours = CTDRCallback(rank=0.5, policy="keep", verbose=False)
    callbacks = [ours, pruner()] if ours_first else [pruner(), ours]
    module = parts.blobs()
    with pytest.raises(ConfigError, match="ModelPruning") as caught:
        parts.fit(module, *callbacks)
    assert "parameter_names=['weight']" in caught.value.hint
    parts.fit(module, CTDRCallback(rank=0.5, policy="keep", verbose=False))
    parts.fit(module, pruner(parameter_names=["weight"]), max_epochs=1)
    factors = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert any((layer.weight == 0).float().mean() > 0.3 for layer in factors)


def test_pruning_beside_a_memory_plan_alone_changes_no_bit():
    plain, planned = parts.blobs(), parts.blobs()
    for module, callbacks in ((plain, []), (planned, [CTDRCallback(rank=None, policy="sqrt", verbose=False)])):
        parts.seed_everything(1, verbose=False)
        parts.fit(module, *callbacks, pruner(), max_epochs=3)
    assert parts.same(plain.state_dict(), planned.state_dict())
