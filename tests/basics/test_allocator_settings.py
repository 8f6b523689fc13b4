"""Expandable segments: asked for where a budget is kept on a GPU, unless somebody has chosen already."""

import os

import pytest
import torch

from ctdr_lightning.basics import gpu_memory
from ctdr_lightning.basics.allocator_settings import add_setting, allocator_settings, expandable_segments

GPU = torch.device("cuda", 0)


@pytest.fixture
def asked(monkeypatch):
    """The settings that torch is given, in an environment without any."""
    given = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that the test's own change is undone
    monkeypatch.setattr(gpu_memory, "set_cuda_allocator", given.append)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return given


def refuses(error):
    def empty(*_, **__):
        raise error

    return empty


def test_they_are_asked_for_once(asked):
    gpu_memory.use_expandable_segments(GPU)
    gpu_memory.use_expandable_segments(GPU)
    assert asked == ["expandable_segments:True"]
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_other_settings_are_kept(asked, variable, monkeypatch):
    monkeypatch.setenv(variable, "max_split_size_mb:128")
    gpu_memory.use_expandable_segments(GPU)
    assert asked == ["max_split_size_mb:128,expandable_segments:True"]
    assert allocator_settings() == {"max_split_size_mb": "128", "expandable_segments": "true"}


@pytest.mark.parametrize("chosen", ["expandable_segments:False", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_a_choice_of_the_users_stays(asked, chosen, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", chosen)
    gpu_memory.use_expandable_segments(GPU)
    assert not asked
    assert expandable_segments() == chosen.endswith("True")


def test_a_processor_is_asked_nothing(asked, monkeypatch):
    gpu_memory.use_expandable_segments(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a plan for a GPU that is tried on a processor
    gpu_memory.use_expandable_segments(GPU)
    assert not asked


def test_a_driver_that_maps_no_pages_goes_on_without(asked, monkeypatch):
    monkeypatch.setattr(torch, "empty", refuses(RuntimeError("CUDA driver error: operation not supported")))
    gpu_memory.use_expandable_segments(GPU)
    gpu_memory.use_expandable_segments(GPU)
    assert asked == ["expandable_segments:True", "expandable_segments:True,expandable_segments:False"]
    assert not expandable_segments()


def test_a_full_card_is_no_answer(asked, monkeypatch):
    monkeypatch.setattr(torch, "empty", refuses(torch.OutOfMemoryError("CUDA out of memory")))
    gpu_memory.use_expandable_segments(GPU)
    assert len(asked) == 1
    assert expandable_segments()


def test_torch_takes_such_settings(asked):
    """The name is private: a release that lacks it is noticed here."""
    gpu_memory.torch._C._accelerator_setAllocatorSettings(add_setting("expandable_segments", "True"))
