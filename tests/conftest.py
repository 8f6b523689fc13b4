"""Shared fixtures: one thread, fixed seeds, no deadlines, and torchvision made importable beside a CPU torch."""

import gc
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from ctdr_lightning.memory.policies import auto

torch.set_num_threads(1)
settings.register_profile("suite", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("suite")

# What torchvision registers kernels for in Python; its compiled half defines them, but wants the CUDA build of torch.
_OPERATORS = """
nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor
qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor
roi_align(Tensor input, Tensor rois, float scale, SymInt h, SymInt w, int ratio, bool aligned) -> Tensor
qroi_align(Tensor input, Tensor rois, float scale, SymInt h, SymInt w, int ratio, bool aligned) -> Tensor
_roi_align_backward(Tensor grad, Tensor rois, float scale, SymInt[] sizes, int ratio, bool aligned) -> Tensor
ps_roi_align(Tensor input, Tensor rois, float scale, SymInt h, SymInt w, int ratio) -> (Tensor, Tensor)
_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor mapping, float scale, SymInt[] sizes, int ratio) -> Tensor
roi_pool(Tensor input, Tensor rois, float scale, SymInt h, SymInt w) -> (Tensor, Tensor)
_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, float scale, SymInt[] sizes) -> Tensor
ps_roi_pool(Tensor input, Tensor rois, float scale, SymInt h, SymInt w) -> (Tensor, Tensor)
_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor mapping, float scale, SymInt[] sizes) -> Tensor
deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt[] options) -> Tensor
_deform_conv2d_backward(Tensor grad, Tensor[] inputs, SymInt[] options) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
"""


def _define_torchvision_operators() -> torch.library.Library | None:
    """Define the operators where torchvision is installed and its compiled half does not load."""
    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    try:
        for compiled in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(compiled)
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for schema in _OPERATORS.strip().splitlines():
            library.define(schema)
        return library
    return None


_TORCHVISION = _define_torchvision_operators()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--device cuda`` runs the steps of tests/memory on a GPU."""
    parser.addoption("--device", default="cpu", help="device of the steps of tests/memory")


def pytest_configure(config: pytest.Config) -> None:
    """Steps are built on the device that is asked for."""
    if config.getoption("device") != "cpu":
        torch.set_default_device(config.getoption("device"))
        torch.backends.cudnn.deterministic = True


def pytest_collection_finish() -> None:
    """Spare the collector what the imports made: 900,000 objects, of which one look takes 0.7 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _the_collector_is_spared_what_a_file_leaves():
    """Caches of compiled graphs and the like grow to as much again: a retry's collection took 0.9 s behind them."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _searches_end_by_their_work():
    """The planner's safety stop comes ten times as late, so that a slow machine makes the same plans as a fast one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "SLOWEST", 10 * auto.SLOWEST)
        yield


@pytest.fixture(scope="module")
def short_searches():
    """The planner searches a tenth as long, in a file that asks nothing of a plan but what holds for any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "WORK_AT_LEAST", auto.WORK_AT_LEAST // 10)
        yield


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    # Trainer(deterministic=True) leaves them on for the process. A GPU's plain steps repeat themselves with them alone.
    on_gpu = torch.get_default_device().type != "cpu"
    torch.use_deterministic_algorithms(on_gpu, warn_only=on_gpu)
