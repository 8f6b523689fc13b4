"""A fit's run has one method a hook, under the hook's own name, and leaves the module as it found it."""

import ast
import inspect
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import Callback

from ctdr_lightning import CTDRCallback, Memory, Recovery
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.trainer.fit_run import FitRun
from ctdr_lightning.trainer.options import CallbackOptions
from tests import parts


def test_each_hook_of_the_callback_calls_the_method_of_its_name():
    tree = ast.parse(inspect.getsource(inspect.getmodule(CTDRCallback)))
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    hooks = [n for n in functions if not n.startswith("_") and hasattr(Callback, n) and hasattr(FitRun, n)]
    assert len(hooks) > 12
    for name in hooks:
        assert f"self.run.{name}(" in ast.unparse(functions[name])


def test_recovery_without_decomposition_is_refused():
    with pytest.raises(ConfigError, match="nothing is decomposed"):
        FitRun(CallbackOptions(rank=None, recovery=Recovery()))


def test_a_run_serves_one_module():
    callback = CTDRCallback(rank=None, memory_budget="1GiB", verbose=False)
    first, second = parts.blobs(width=8), parts.blobs(width=8)
    assert callback.run.serves(first)
    parts.fit(first, callback, max_epochs=1)
    assert callback.run.serves(first)
    assert not callback.run.serves(second)


@pytest.mark.parametrize("fails", [False, True])
def test_the_module_is_left_as_it_was(fails):
    module = parts.blobs(width=8)
    before = set(vars(module))

    class Fails(Callback):
        def on_train_batch_end(self, *_):
            if fails:
                raise RuntimeError("of the user's")

    callback = CTDRCallback(rank=None, memory_budget="1GiB", verbose=False, memory=Memory(sub_batches=None))
    with pytest.raises(RuntimeError, match="of the user's") if fails else nullcontext():
        parts.fit(module, callback, Fails(), max_epochs=1)
    assert "training_step" not in vars(module)
    assert "backward" not in vars(module)
    assert "log" not in set(vars(module)) - before
    assert torch.is_grad_enabled()
