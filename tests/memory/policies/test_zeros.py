"""Policies about zeros do as their papers say, with the zeros of a step that was recorded."""

from dataclasses import replace
from functools import cache
from math import ceil

import pytest
import torch
from torch import nn

from ctdr_lightning.memory import Simulator, Tape, plan, record
from ctdr_lightning.memory.codecs import encode
from ctdr_lightning.memory.simulator.actions import Compress, Offload
from ctdr_lightning.memory.simulator.away import MORE_ELEMENTS, away_bytes
from ctdr_lightning.memory.traces.facts import facts_of
from ctdr_lightning.memory.traces.machine import CodecCost, Link
from tests.memory.harness import Bench, noise

# that takes no memory of its own: what it takes on a machine can exceed what it spares of so small a net
ZVC = CodecCost("zvc", True, "zeros", 0.0, 1.0, drops_zeros=True, encode_temp_share=0.0, decode_temp_share=0.0)
WIDTH, SIDE = 8, 24
DENSE, SPARSE = 9.0, -1.0  # biases of a normalised input of a ReLU


def rectified(bias):
    """A convolution and a ReLU that makes nothing zero, or most."""
    norm = nn.BatchNorm2d(WIDTH)
    nn.init.constant_(norm.bias, bias)
    return [nn.Conv2d(WIDTH, WIDTH, 3, padding=1), norm, nn.ReLU(inplace=True)]


@cache
def benched(*biases):
    """Convolutions with a ReLU a bias, and one more; the bench, and its trace on a slow link."""
    torch.manual_seed(0)
    layers = [layer for bias in biases for layer in rectified(bias)]
    net, x = nn.Sequential(*layers, nn.Conv2d(WIDTH, 2, 3)), noise(4, WIDTH, SIDE, SIDE, seed=1)
    bench = Bench(net, lambda net: net(x).square().mean())
    trace = record(lambda: net(x).square().mean(), zeros=True)
    trace = trace.with_costs([1e-6] * len(trace.ops), {}).with_machine([Link("disk", 1e6, 1e6)], [ZVC])
    return bench, trace


def rectified_values(trace):
    """The ReLUs' outputs in order."""
    return [v for v in trace.saved if "zeros" in facts_of(trace)[v].kinds]


def test_the_nets_are_as_sparse_as_they_claim():
    trace = benched(DENSE, SPARSE)[1]
    dense, sparse = (trace.values[v].zeros for v in rectified_values(trace))
    assert dense == 0
    assert 0.6 < sparse < 1


@pytest.mark.parametrize("biases", [(DENSE, DENSE), (DENSE, SPARSE), (SPARSE, DENSE), (SPARSE, SPARSE)])
def test_cswap_is_vdnn_but_for_the_outputs_that_are_sparse(biases):
    trace = benched(*biases)[1]
    found, vdnn = plan(trace, None, "cswap").away, plan(trace, None, "vdnn_all").away
    assert found.keys() == vdnn.keys() >= set(rectified_values(trace))
    compressed = {v for v, action in found.items() if action.codecs}
    assert compressed == {v for v, bias in zip(rectified_values(trace), biases, strict=True) if bias == SPARSE}
    assert all(found[v] == vdnn[v] for v in found.keys() - compressed)


def test_cswap_leaves_sparse_outputs_alone_where_the_codec_takes_longer_than_it_spares():
    trace = benched(SPARSE, SPARSE)[1]
    slow = replace(ZVC, encode_s_per_byte=2e-6, decode_s_per_byte=2e-6)  # the link takes 1e-6 s a byte
    assert plan(trace.with_machine([], [slow]), None, "cswap").away == plan(trace, None, "vdnn_all").away


@pytest.mark.parametrize(("bias", "pays"), [(0.0, False), (-2.5, True)])
def test_cswap_counts_the_time_that_mixed_zeros_take(bias, pays):
    """Half zeros spare half of a transfer and take the codec longest; nearly all spare more and take it less."""
    trace = benched(bias, bias)[1]
    slow = replace(ZVC, encode_s_per_mixed_byte=4e-6, decode_s_per_mixed_byte=4e-6)  # the link takes 1e-6 s a byte
    away = plan(trace.with_machine([], [slow]), None, "cswap").away
    assert [bool(away[v].codecs) for v in rectified_values(trace)] == [pays] * 2
    without = plan(trace, None, "cswap").away
    assert all(without[v].codecs for v in rectified_values(trace)), "the codec alone is free"


@pytest.mark.parametrize("bias", [SPARSE, 0.0])
def test_a_step_takes_the_codecs_time_for_its_zeros(bias):
    trace = benched(bias, bias)[1]
    value = rectified_values(trace)[0]
    n_bytes, zeros = trace.value_bytes(value), trace.values[value].zeros
    seconds = []
    for cost in (ZVC, replace(ZVC, encode_s_per_mixed_byte=1.0, decode_s_per_mixed_byte=2.0)):
        trial = Simulator(trace.with_machine([], [cost])).trial({value: Compress(("zvc",))})
        seconds.append(trial.seconds)
    assert seconds[1] - seconds[0] == pytest.approx(3.0 * n_bytes * zeros * (1 - zeros))


@pytest.mark.parametrize("bias", [SPARSE, 0.0])
def test_cdma_foretells_what_a_sparse_output_takes(bias):
    bench, trace = benched(bias, bias)
    made, outputs = plan(trace, None, "cdma"), []
    for layer in bench.model:
        if isinstance(layer, nn.ReLU):
            layer.register_forward_hook(lambda layer, args, out: outputs.append(out.detach().clone()))
    bench.run()
    for value, contents in zip(rectified_values(trace), outputs, strict=True):
        share, n = trace.values[value].zeros, contents.numel()
        assert made.away[value].codecs == ("zvc",)
        foretold = away_bytes(trace, value, ("zvc",))
        assert foretold == ceil(4 * n * min((1 - share) * MORE_ELEMENTS, 1)) + n // 8
        packed = encode(contents.flatten(), ("zvc",)).n_bytes
        assert packed == round(4 * n * (1 - share)) + n // 8
        assert packed <= foretold < contents.nbytes


def test_cdma_moves_no_more_than_vdnn_by_the_zeros_that_were_seen():
    dense, sparse = (benched(bias, bias)[1] for bias in (DENSE, SPARSE))
    moved = [
        sum(away_bytes(trace, v, action.codecs) for v, action in plan(trace, None, policy).away.items())
        for trace in (dense, sparse)
        for policy in ("vdnn_all", "cdma")
    ]
    assert moved[0] == moved[1] == moved[2], "an output without zeros is moved unchanged"
    assert moved[3] < 0.75 * moved[2]


@pytest.mark.parametrize(("share", "fires"), [(0.25, True), (0.15, False), (0.0, False)])
def test_gist_stores_an_output_sparsely_above_a_fifth_of_zeros(share, fires):
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Conv1d(1, 1, 1, bias=False), nn.ReLU())))
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    x = torch.ones(1, 1, 4000, device=torch.get_default_device())
    x[..., : int(4000 * share)] = -1
    trace = record(lambda: net(x).square().sum(), zeros=True).with_machine([], [ZVC])
    outputs = rectified_values(trace)
    assert [trace.values[v].zeros for v in outputs] == pytest.approx([share] * 4)
    made = plan(trace, None, "gist")
    assert made.away == (dict.fromkeys(outputs, Compress(("zvc",))) if fires else {})


@pytest.mark.parametrize("policy", ["cdma", "cswap", "gist"])
def test_a_step_without_its_zeros_is_the_plain_step(policy, tmp_path):
    bench, trace = benched(SPARSE, SPARSE, 0.0)
    made = plan(trace, None, policy)
    assert any("zvc" in action.codecs for action in made.away.values())
    assert made.exact
    plain, tape = bench.run(), Tape(made)
    assert not bench.run(tape).differs_from(plain)
    assert not tape.diverged


def test_zeros_after_max_pooling_are_left_out_as_well():
    net = nn.Sequential(*rectified(SPARSE), nn.MaxPool2d(2), *rectified(0.0), *rectified(0.0), nn.Conv2d(WIDTH, 2, 1))
    x = noise(2, WIDTH, 16, 16, seed=0)
    trace = record(lambda: net(x).square().mean(), zeros=True).with_machine([Link("disk", 1e6, 1e6)], [ZVC])
    before, after = rectified_values(trace)[:2]
    assert 0 < trace.values[after].zeros < trace.values[before].zeros
    moved = plan(trace, None, "cdma").away[after]
    assert isinstance(moved, Offload)
    assert moved.codecs == ("zvc",)
