import pytest
import torch
from torch import nn

from ctdr_lightning.memory.tape import module_paths as engine
from ctdr_lightning.memory.tape.module_paths import ModulePaths, is_fsdp_unit
from tests.memory.leaks import assert_nothing_is_installed


class Spy(nn.Module):
    """Notes where its forward runs."""

    def __init__(self, paths, fails=False):
        super().__init__()
        self.paths, self.fails, self.seen = [paths], fails, []

    def forward(self, x):
        self.seen.append((self.paths[0].path, self.paths[0].unit))
        if self.fails:
            raise ValueError("stop")
        return x


def test_paths_from_whatever_root_is_called():
    paths = ModulePaths()
    spy = Spy(paths)
    net = nn.Sequential(nn.Identity(), nn.Sequential(spy))
    with paths:
        assert paths.path == ""
        net(0)
        net[1](0)
        spy(0)
        assert paths.path == ""
    assert [path for path, _ in spy.seen] == ["1.0", "0", "Spy"]
    assert_nothing_is_installed()


def test_paths_from_a_given_root():
    spy = Spy(None)
    net = nn.Sequential(nn.Identity(), nn.Sequential(spy))
    paths = ModulePaths(net)
    spy.paths[0] = paths
    with paths:
        net[1](0)
    assert spy.seen[0][0] == "1.0"


def test_exceptions_do_not_leave_a_path_behind():
    paths = ModulePaths()
    bad, good = Spy(paths, fails=True), Spy(paths)
    net = nn.ModuleList([nn.Sequential(bad), good])
    with paths:
        with pytest.raises(ValueError, match="stop"):
            net[0](0)
        assert paths.path == ""
        good(0)
    assert good.seen == [("Spy", 0)]


def test_units_are_innermost_and_end_with_their_forward(monkeypatch):
    paths = ModulePaths()
    spies = [Spy(paths) for _ in range(4)]
    inner = nn.Sequential(spies[1])
    net = nn.Sequential(spies[0], inner, spies[2])
    monkeypatch.setattr(engine, "is_fsdp_unit", lambda module: module is inner or module is net)
    with paths:
        net(0)
        spies[3](0)
    assert [spy.seen[0][1] for spy in spies] == [id(net), id(inner), id(net), 0]


def test_plain_modules_are_no_units():
    from torch.distributed import fsdp  # noqa: F401

    assert not is_fsdp_unit(nn.Linear(2, 2))
    assert torch.is_grad_enabled()
