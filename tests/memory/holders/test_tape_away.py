"""Keep, recompute, offload and compress in one plan leave what the plain step leaves, however late a link is."""

import gc
import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from ctdr_lightning.basics.errors import OffloadError
from ctdr_lightning.memory import Plan, Tape, plan, record, simulate
from ctdr_lightning.memory.codecs import CODECS
from ctdr_lightning.memory.holders import HolderOptions
from ctdr_lightning.memory.holders.away import can_wait
from ctdr_lightning.memory.holders.base import Holders
from ctdr_lightning.memory.simulator.actions import Compress, Offload
from ctdr_lightning.memory.tape.courier import Courier
from ctdr_lightning.memory.tape.online import Evictor
from ctdr_lightning.memory.traces.bells import bells_of
from ctdr_lightning.memory.traces.facts import facts_of
from ctdr_lightning.memory.traces.machine import CodecCost, Link
from ctdr_lightning.memory.values.live_bytes import PeakMeter
from tests.in_turn import in_turn
from tests.memory.harness import Bench, planned, random_actions
from tests.memory.holders.doubles import late_holders
from tests.memory.policies.nets import CONFORMANCE, bench_of
from tests.memory.zoo import ZOO, build

QUICK = (
    "resnet18", "squeezenet1_0", "vision_transformer", "gpt2", "bert", "llama", "lstm",
)  # fmt: skip
# A link that moves a storage in about as long as an op takes, so that transfers are under way all the time.
LINKS = [Link(name, 2e8, 2e8, latency_s=1e-4) for name in ("host", "disk")]
COSTS = [
    CodecCost(name, c.exact, c.needs, c.payload_bits, c.side_bits, c.drops_zeros)
    for name, c in ((name, CODECS[name]) for name in CODECS)
    if c.exact
]


def away_actions(trace, seed):
    """A random plan of all four actions."""
    draw, facts = random.Random(seed), facts_of(trace)
    actions = random_actions(trace, seed)
    share = draw.random()
    for value in trace.saved:
        if facts[value].movable and draw.random() < share:
            codecs = [c.name for c in trace.codecs if c.needs in facts[value].kinds]
            picked = (draw.choice(codecs),) if codecs and draw.random() < 0.5 else ()
            to = draw.choice(["host", "disk"])
            actions[value] = Compress(picked) if picked and draw.random() < 0.5 else Offload(to, picked)
    return actions


def another_way(made):
    """The same actions, for a step that has another op somewhere in its second half."""
    trace = made.trace
    places = [i for i in trace.forward_ops if made.away.keys().isdisjoint(trace.ops[i].outputs)]
    places = [i for i in places if "bernoulli" not in trace.ops[i].name]
    ops = list(trace.ops)
    ops[places[len(places) // 2]] = replace(ops[places[len(places) // 2]], name="aten.another.default")
    return planned(replace(trace, ops=tuple(ops)), made.actions)


def benched(name):
    """The net, what its plain step leaves behind, and its trace."""
    bench = bench_of(name) if name in CONFORMANCE else Bench(*build(name))
    return bench, bench.run(), bench.record().with_machine(LINKS, COSTS)


def check_away(name, seeds, folder):
    bench, want, trace = benched(name)
    for seed in range(seeds):
        holders = late_holders(seed, folder)
        made = planned(trace, away_actions(trace, seed))
        assert Plan.from_json(made.to_json()) == made
        tape = Tape(made, holders=holders)
        differs = bench.run(tape).differs_from(want)
        assert not differs, f"plan {seed}: {differs}"
        assert not tape.diverged, f"plan {seed}: {tape.diverged}"
        for evictor in (None, Evictor(int(0.7 * made.peak_bytes))):
            tape = Tape(another_way(made), evictor, holders)
            differs = bench.run(tape).differs_from(want)
            assert not differs, f"plan {seed}, diverged, {evictor}: {differs}"
        del tape
        assert {n: h.held_bytes for n, h in holders.items()} == {"disk": 0, "host": 0}
        for holder in holders.values():
            holder.close()


@pytest.mark.parametrize("name", [*QUICK, *CONFORMANCE])
def test_plans_of_all_actions_are_exact(name, tmp_path):
    check_away(name, 3, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", in_turn([name for name in ZOO if name not in QUICK], (), pytest.mark.exhaustive))
def test_plans_of_all_actions_are_exact_on_every_other_net(name, tmp_path):
    check_away(name, 2, tmp_path)


def all_away(trace, to="disk"):
    """Everything that can go goes."""
    return {v: Offload(to) for v in trace.saved if facts_of(trace)[v].movable}


def small_bench(step=None, backward=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    x = torch.randn(8, 16)
    return Bench(net.train(), step or (lambda net: net(x).square().mean()), backward)


def put_all_away(bench, folder, seed=0):
    """What differs from the plain step, with everything away and late."""
    want, trace = bench.run(), bench.record().with_machine(LINKS, COSTS)
    holders = late_holders(seed, folder)
    made = planned(trace, all_away(trace))
    assert made.away
    tape = Tape(made, holders=holders)
    differs = bench.run(tape).differs_from(want)
    assert not tape.diverged
    return differs


def test_a_write_in_place_waits_for_what_is_on_its_way(tmp_path):
    """The step writes over memory that is still being sent, through the tensor itself and through a view."""

    def step(net):
        x = torch.ones(64, 16)
        hidden = net[0](x)
        saved = hidden.tanh()
        loss = saved.square().mean()
        with torch.no_grad():
            hidden.zero_()
            hidden[3:].fill_(7.0)
        return loss + net[3](saved).mean()

    for seed in range(4):
        assert not put_all_away(small_bench(step), tmp_path, seed)


def test_values_that_are_written_over_after_their_op_are_sent_as_they_were(tmp_path):
    def step(net):
        hidden = net[0](torch.ones(8, 16)).clone()
        product = hidden * 2.0
        hidden.add_(1.0).mul_(0.5)
        return (hidden.sin() * product).mean() + net[3](hidden).sum()

    for seed in range(4):
        assert not put_all_away(small_bench(step), tmp_path, seed)


def test_a_graph_can_be_walked_twice(tmp_path):
    def backward(loss):
        loss.backward(retain_graph=True)
        loss.backward()

    assert not put_all_away(small_bench(backward=backward), tmp_path)


def test_gradients_of_gradients(tmp_path):
    def backward(loss):
        bench.model.zero_grad()
        grads = torch.autograd.grad(loss, list(bench.model.parameters()), create_graph=True)
        (loss + sum(g.square().sum() for g in grads)).backward()

    bench = small_bench(backward=backward)
    assert not put_all_away(bench, tmp_path)


@pytest.mark.parametrize("where", ["forward", "backward", "never backward"])
def test_an_exception_leaves_nothing_behind(tmp_path, where):
    bench = small_bench()
    trace = bench.record().with_machine(LINKS, COSTS)
    holders = late_holders(0, tmp_path)
    made = planned(trace, all_away(trace))

    def fails(*_):
        raise ValueError(where)

    handle = bench.model[4].register_forward_hook(fails) if where == "forward" else None
    bench.reset()

    def run():
        with Tape(made, holders=holders):
            loss = bench.step(bench.model)
        if where == "backward":
            loss.register_hook(fails)
            loss.backward()

    if where == "never backward":
        run()
    else:
        with pytest.raises(ValueError, match=where):
            run()
    if handle is not None:
        handle.remove()
    gc.collect()
    assert holders["disk"].held_bytes == 0
    want = bench.run()
    assert not bench.run(Tape(made, holders=holders)).differs_from(want)


def test_a_disk_that_is_full_is_an_error_of_ours_in_the_step(tmp_path):
    bench = small_bench()
    trace = bench.record().with_machine(LINKS, COSTS)
    holders = Holders(HolderOptions(folder=tmp_path, limit_bytes=4096))
    bench.reset()
    with pytest.raises(OffloadError, match="limit"), Tape(planned(trace, all_away(trace)), holders=holders):
        bench.step(bench.model)
    holders.close()


def test_a_tape_without_holders_makes_its_own_and_closes_them():
    bench = small_bench()
    want, trace = bench.run(), bench.record().with_machine(LINKS, COSTS)
    tape = Tape(planned(trace, all_away(trace)))
    assert not bench.run(tape).differs_from(want)


def test_a_plan_says_where_everything_is():
    bench = small_bench()
    trace = bench.record().with_machine(LINKS, COSTS)
    mask = next(v for v in trace.saved if "two_valued" in facts_of(trace)[v].kinds)
    made = planned(trace, all_away(trace) | {mask: Compress(("mask",))})
    text = made.explain()
    assert "(div_): held as mask, frees 1.0 KiB" in text
    assert "to disk at op" in text
    assert "hidden behind the step" in text or "waited for" in text
    assert made.exact


def test_a_lossy_plan_says_so_and_its_gradients_are_near(tmp_path):
    bench = small_bench()
    lossy = CodecCost("int8", False, "float", 8.0, 1.0)
    want, trace = bench.run(), bench.record().with_machine(LINKS, [lossy])
    actions = {v: Compress(("int8",)) for v in trace.saved if "float" in facts_of(trace)[v].kinds}
    made = planned(trace, actions)
    assert not made.exact
    found = bench.run(Tape(made))
    grads = [name for name in want.tensors if name.startswith("grad")]
    for name in grads:
        assert torch.allclose(found.tensors[name], want.tensors[name], atol=0.05)
    assert found.differs_from(want)
    assert torch.equal(found.tensors["loss"], want.tensors["loss"])
    assert torch.equal(found.tensors["rng"], want.tensors["rng"])


def test_a_view_of_what_leaves_later_does_not_hold_it(tmp_path):
    """A linear layer saves a view of its input, which `vdnn_all` sends only when the layer has read it."""
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())])
    x = torch.randn(32, 64, 64)
    trace = record(lambda: net(x).sum()).with_machine([Link("disk", 1e9, 1e9)])
    made = plan(trace, int(0.8 * simulate(trace).peak_bytes), "vdnn_all")
    net.zero_grad(set_to_none=True)
    holders = Holders(HolderOptions(folder=tmp_path))
    with PeakMeter() as meter:
        with Tape(made, holders=holders):
            loss = net(x).sum()
        loss.backward()
    holders.close()
    assert made.away
    assert meter.live.peak + trace.resident_bytes <= 1.02 * made.peak_bytes


class Quiet(nn.Module):
    """Its norm ends one region; what is saved in the next is saved by ops that the plan has nothing to do with."""

    def __init__(self):
        super().__init__()
        self.norm, self.widen, self.narrow = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.widen(self.norm(x))))


def test_a_bell_is_hung_on_nothing_but_what_is_saved_at_its_place(monkeypatch, tmp_path):
    """Else it rings too early, and what returns takes bytes before the plan expects them."""
    torch.manual_seed(0)
    net = nn.Sequential(*[Quiet() for _ in range(3)])
    x = torch.randn(8, 16)
    trace = record(lambda: net(x).sum()).with_machine(LINKS)
    saved = trace.values[next(v for v in trace.saved if facts_of(trace)[v].movable)]
    sent = trace.values.index(saved)
    out_at = trace.ops[saved.op].tick
    rung = []
    monkeypatch.setattr(Courier, "rings", lambda self, tick: rung.append(tick))
    for tick, place in bells_of(trace).items():
        made = planned(trace, {sent: Offload("disk", (), out_at, out_at + 1, tick)})
        rung.clear()
        holders = Holders(HolderOptions(folder=tmp_path))
        with Tape(made, holders=holders):
            loss = net(x).sum()
        loss.backward()
        holders.close()
        assert rung == [tick] * saves_at(trace, place)


def saves_at(trace, place):
    """How many tensors autograd saves between the op at a tick and the next."""
    until = min((op.tick for op in trace.ops if op.tick > place), default=place + 1)
    return sum(place <= save.packed < until for value in trace.values for save in value.saves)


def forward_mode(net):
    """A directional derivative: the tangents of what is no part of the direction are zeros without any memory."""
    x = torch.linspace(-1, 1, 64).reshape(8, 8)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        out = net(dual)
        zeros = forward_ad.unpack_dual(net(forward_ad.make_dual(x, torch.ops.aten._efficientzerotensor(x.shape))))
        value, tangent = forward_ad.unpack_dual(out)
    return (value * tangent).mean() + zeros.primal.square().mean()


def conjugated(net):
    """Autograd saves conjugates, whose storage says something else than they do."""
    x = torch.linspace(-1, 1, 64).reshape(8, 8)
    wave = torch.fft.fft(net(x))
    return (wave * wave.conj().exp() * wave.imag.neg()).abs().mean()


@pytest.mark.parametrize("step", [forward_mode, conjugated])
@pytest.mark.parametrize("seed", range(3))
def test_what_has_no_plain_storage_stays(step, seed, tmp_path):
    torch.manual_seed(0)
    bench = Bench(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), step)
    want = bench.run()
    trace = bench.record().with_machine(LINKS, COSTS)
    facts = facts_of(trace)
    actions = {v: Offload(["host", "disk"][(v + seed) % 2], ()) for v in trace.saved if facts[v].movable}
    assert actions
    assert not bench.run(Tape(planned(trace, actions))).differs_from(want)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ops.aten._efficientzerotensor((4, 4)),
        torch.ones(4, dtype=torch.complex64).conj(),
        torch.ones(4, dtype=torch.complex64).conj().imag,
        torch.ones(4).to_sparse(),
    ],
)
def test_what_can_wait_has_its_elements_in_its_storage(tensor):
    assert not can_wait(tensor)
    assert can_wait(torch.ones(4))
