"""Plans are made again when the zeros of what they move have changed, and only then."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from ctdr_lightning.memory import Plan, Session, Trace, plan
from ctdr_lightning.memory.holders import HolderOptions
from ctdr_lightning.memory.holders.base import Holders
from ctdr_lightning.memory.simulator.away import MORE_ELEMENTS, away_bytes
from ctdr_lightning.memory.tape import zero_watch
from ctdr_lightning.memory.traces.machine import CodecCost, Link
from ctdr_lightning.trainer.training_step.shared_plans import digest_of
from tests.memory.harness import Bench, noise

# without temporaries; with the link's rate it pays above a fifth of zeros
ZVC = CodecCost("zvc", True, "zeros", 0.0, 1.0, True, 1e-7, 1e-7, encode_temp_share=0.0, decode_temp_share=0.0)
MACHINE = [Link("disk", 1e6, 1e6)], [ZVC]
DENSE, HALF, SPARSE = 9.0, 0.0, -1.0  # biases before a ReLU: no zeros, half, five sixths


class Steps:
    """Steps of a net whose two ReLUs make zeros by a bias; every second step under a plan counts them."""

    def __init__(self, policy: str, bias: float, folder: Path) -> None:
        torch.manual_seed(0)
        self._norms = [nn.BatchNorm2d(8, momentum=0.0) for _ in range(2)]
        parts = [(nn.Conv2d(8, 8, 3, padding=1), norm, nn.ReLU(inplace=True)) for norm in self._norms]
        net = nn.Sequential(*(layer for part in parts for layer in part), nn.Conv2d(8, 2, 1))
        x = noise(4, 8, 24, 24, seed=1)
        self.made: list[Plan] = []
        self._policy, self._step = policy, lambda net: net(x).square().mean()
        self._net, self._bench = net, Bench(net, self._step)
        self.bias(bias)
        self.session = Session(self._plan, zeros=True, holders=Holders(HolderOptions(folder=folder)))

    def _plan(self, trace: Trace) -> Plan:
        on_machine = trace.with_costs([1e-6] * len(trace.ops), {}).with_machine(*MACHINE)
        self.made.append(plan(on_machine, None, self._policy))
        return self.made[-1]

    def bias(self, value: float) -> None:
        """Make fewer or more zeros from now on."""
        for norm in self._norms:
            nn.init.constant_(norm.bias, value)
        self._bench = Bench(self._net, self._step)  # which resets to the net that it was given

    @contextmanager
    def _forward(self) -> Iterator[None]:
        self.session.begin("step")
        yield
        self.session.forward_done()

    def run(self, n_steps: int) -> int:
        """Run steps, each to the plain one's bits; returns how many plans were made."""
        before, plain = len(self.made), self._bench.run()
        for _ in range(n_steps):
            found = self._bench.run(self._forward())
            self.session.end()
            assert not found.differs_from(plain)
        return len(self.made) - before

    def n_compressed(self) -> int:
        """How many values the last plan compresses."""
        return sum(bool(action.codecs) for action in self.made[-1].away.values())


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(zero_watch, "STEPS_BETWEEN", 2)


def test_cswap_compresses_what_has_become_sparse_and_no_longer_what_has_become_dense(tmp_path):
    steps = Steps("cswap", DENSE, tmp_path)
    assert steps.run(4) == 1
    assert steps.n_compressed() == 0
    steps.bias(SPARSE)
    assert steps.run(4) == 1
    assert steps.n_compressed() == 2
    steps.bias(DENSE)
    assert steps.run(4) == 1
    assert steps.n_compressed() == 0


def test_cdma_foretells_the_new_bytes(tmp_path):
    steps = Steps("cdma", SPARSE, tmp_path)
    steps.run(1)
    before = steps.made[-1]
    steps.bias(HALF)
    assert steps.run(4) == 1
    after = steps.made[-1]
    compressed = [v for v, action in after.away.items() if action.codecs]
    assert compressed
    for value in compressed:
        assert away_bytes(after.trace, value, ("zvc",)) > 1.5 * away_bytes(before.trace, value, ("zvc",))


def test_a_plan_stays_while_its_zeros_do(tmp_path):
    """The codec's margin is the threshold: below it the planned bytes are enough."""
    steps = Steps("cswap", HALF, tmp_path)
    steps.run(4)
    zeros = [steps.made[-1].trace.values[v].zeros for v in steps.made[-1].away]
    steps.bias(0.05)
    assert steps.run(6) == 0
    steps.bias(0.4)
    assert steps.run(4) == 1
    left = [1 - steps.made[-1].trace.values[v].zeros for v in steps.made[-1].away]
    assert max(now / (1 - then) for now, then in zip(left, zeros, strict=True) if then) > MORE_ELEMENTS


def test_between_two_counts_nothing_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(zero_watch, "STEPS_BETWEEN", 100)
    steps = Steps("cswap", DENSE, tmp_path)
    steps.run(1)
    steps.bias(SPARSE)
    assert steps.run(6) == 0


def test_without_a_codec_that_drops_zeros_nobody_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(zero_watch, "n_kept", lambda flat: pytest.fail("zeros are counted for no codec"))
    monkeypatch.setitem(globals(), "MACHINE", (MACHINE[0], []))
    steps = Steps("cswap", DENSE, tmp_path)
    steps.run(1)
    steps.bias(SPARSE)
    assert steps.run(4) == 0


def test_a_plan_for_other_zeros_is_not_the_shared_one_from_before(tmp_path):
    steps = Steps("cswap", DENSE, tmp_path)
    steps.run(1)
    before = steps.session.trace
    steps.bias(SPARSE)
    steps.run(4)
    assert digest_of(steps.session.trace, "asked") != digest_of(before, "asked")
