"""What every registered codec promises: contents to the bit or a bounded error, sizes as planned, hard cases kept."""

from itertools import accumulate

import pytest
import torch

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.basics.host_memory import allocations_of
from ctdr_lightning.memory.codecs import CODECS, decode, encode, sign
from ctdr_lightning.memory.codecs.packing import pack_bits, unpack_as, unpack_bits
from ctdr_lightning.memory.holders.measure import _line, measure_codecs
from ctdr_lightning.memory.simulator.away import packed_bytes, temporary_growth
from ctdr_lightning.memory.traces.facts import Facts

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
LENGTHS = (1, 7, 8, 9, 63, 64, 65, 1000, 4099)
EXACT = [name for name in CODECS if CODECS[name].exact]
LOSSY = [name for name in CODECS if not CODECS[name].exact]
TOLERANCE = {"bf16": 2**-8, "fp8": 2**-3, "int8": 1 / 255, "int4": 1 / 15}  # of the largest element's range


def dtypes_of(name):
    return {"bool": (torch.bool,), "index": (torch.int64, torch.int32)}.get(CODECS[name].needs, FLOATS)


def fitting(name, n, dtype=None, seed=0):
    """Contents of the kind that a codec is for."""
    draw = torch.Generator().manual_seed(seed)
    dense = torch.randn(n, generator=draw)
    needs = CODECS[name].needs
    if needs == "bool":
        return dense > 0
    if needs == "index":
        return torch.randint(0, 2**15, (n,), generator=draw, dtype=dtype or torch.int64)
    if needs == "two_valued":
        return ((dense > 0) * 1.25).to(dtype or torch.float32)
    return (dense.relu() if needs in ("zeros", "sign_only") else dense).to(dtype or torch.float32)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def comes_back(name, flat, back):
    """Whether a codec gave back what it promises."""
    if back.dtype != flat.dtype or back.shape != flat.shape:
        return False
    if CODECS[name].needs == "sign_only":
        return torch.equal(back > 0, flat > 0) and not back.isnan().any()
    return torch.equal(bits(back), bits(flat))


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", EXACT)
def test_exact_codecs_give_back_every_bit(name, n):
    for dtype in dtypes_of(name):
        flat = fitting(name, n, dtype)
        assert comes_back(name, flat, decode(encode(flat, (name,)))), dtype


HARD = {
    "all zero": torch.zeros(100),
    "all one": torch.ones(100),
    "negative zeros": torch.zeros(100).neg(),
    "one negative zero": torch.cat([torch.tensor([-0.0]), torch.full((99,), 2.0)]),
    "a NaN": torch.cat([torch.tensor([float("nan")]), torch.zeros(99)]),
    "all NaN": torch.full((100,), float("nan")),
    "infinities": torch.cat([torch.tensor([float("inf"), -float("inf")]), torch.zeros(98)]),
    "a denormal": torch.cat([torch.tensor([1e-45]), torch.zeros(99)]),
    "three values": torch.tensor([0.0, 1.0, 2.0]).repeat(40),
    "negative": torch.tensor([0.0, -1.5]).repeat(50),
    "dense": torch.arange(1.0, 101.0),
    "empty": torch.zeros(0),
}


@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("name", [n for n in EXACT if CODECS[n].needs not in ("bool", "index")])
def test_what_an_exact_codec_does_not_expect_comes_back_all_the_same(name, case):
    flat = HARD[case]
    back = decode(encode(flat, (name,)))
    if CODECS[name].needs == "sign_only":
        # ReLU's backward lets a gradient through where its output is not at most zero, and that holds for a NaN.
        assert torch.equal(back <= 0, flat <= 0)
    else:
        assert torch.equal(bits(back), bits(flat))


@pytest.mark.parametrize("value", [2**15, -(2**15) - 1, 2**40])
def test_an_index_that_is_too_long_stays_as_it_is(value):
    flat = torch.tensor([0, value, 3])
    assert torch.equal(decode(encode(flat, ("short",))), flat)


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_codecs_lose_no_more_than_they_say(name):
    for dtype in FLOATS:
        flat = fitting(name, 4099, dtype)
        back = decode(encode(flat, (name,), row=256))
        assert back.dtype == flat.dtype
        span = float(flat.double().max() - flat.double().min())
        assert float((back.double() - flat.double()).abs().max()) <= TOLERANCE[name] * span * 1.01


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("case", ["all zero", "a NaN", "all NaN", "infinities", "a denormal", "empty"])
def test_lossy_codecs_keep_what_is_not_finite(name, case):
    back = decode(encode(HARD[case], (name,)))
    assert torch.equal(back.isnan(), HARD[case].isnan())
    assert torch.equal(back.isinf(), HARD[case].isinf())


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_stochastic_rounding_is_right_on_average(name):
    flat = torch.linspace(0, 1, 256)
    mean = torch.stack([decode(encode(flat, (name,))) for _ in range(400)]).mean(0)
    assert float((mean - flat).abs().max()) < 0.25 * TOLERANCE[name] + 1e-3


@pytest.mark.parametrize("name", CODECS)
def test_the_programs_random_state_is_not_touched(name):
    before = torch.get_rng_state()
    decode(encode(fitting(name, 1000), (name,)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", CODECS)
def test_no_more_bytes_than_planned(name):
    flat = fitting(name, 4096)
    (cost,) = measure_codecs([name])
    zeros = float((flat == 0).float().mean()) if cost.drops_zeros else 0.0
    facts = Facts(True, frozenset({cost.needs}), zeros, flat.numel(), flat.itemsize)
    slack = 64  # a scale, a value, a started byte
    assert encode(flat, (name,), row=64).n_bytes <= packed_bytes(facts, [cost]) + slack
    assert cost.exact == CODECS[name].exact
    assert min(cost.encode_s_per_byte, cost.decode_s_per_byte) > 0
    assert min(cost.encode_call_s, cost.decode_call_s) >= 0


@pytest.mark.parametrize("name", EXACT)
def test_many_small_tensors_take_no_byte_more_than_planned(name):
    """A network has a mask a layer: what one takes besides its bits is added up as often."""
    for n in (4096, 4099):
        flat = fitting(name, n)
        zeros = float((flat == 0).float().mean()) if CODECS[name].drops_zeros else 0.0
        facts = Facts(True, frozenset({CODECS[name].needs}), zeros, flat.numel(), flat.itemsize)
        assert encode(flat, (name,)).n_bytes <= packed_bytes(facts, measure_codecs([name]))


def test_a_sign_is_positive_or_not_wherever_the_value_comes_from():
    flat = torch.tensor([-1.0, 0.0, 2.0, -0.0, 3.0])
    assert torch.equal(decode(encode(flat, ("sign",))), (flat > 0).float())


def test_what_a_call_takes_is_told_from_what_a_byte_takes():
    """Of a line its two parts; where the larger sample is not slower, all of its time is the bytes'."""
    assert _line(1000, 7.0, 200, 3.0) == pytest.approx((2.0, 0.005))
    assert _line(1000, 2.0, 200, 3.0) == pytest.approx((2.6, 0.002))


@pytest.mark.parametrize("name", CODECS)
def test_no_more_temporary_bytes_than_planned(name):
    (cost,) = measure_codecs([name])
    # Lossy codecs and zvc compute in float32, so that a half needs more copies, which the simulator does not know.
    for dtype in dtypes_of(name) if name in EXACT and name != "zvc" else (torch.float32,):
        flat = fitting(name, 8 * 65 * 512, dtype)
        stack = encode(flat, (name,))
        encoding = max(accumulate(allocations_of(lambda flat=flat: encode(flat, (name,))))) - stack.n_bytes
        decoding = max(accumulate(allocations_of(lambda stack=stack: decode(stack)), initial=0)) - flat.nbytes
        planned = flat.nbytes * temporary_growth(Facts(True, frozenset(), 0.0, flat.numel(), flat.itemsize))
        slack = 64 + 0.01 * flat.nbytes  # numbers, and zeros that are a little more or fewer than in the sample
        assert encoding <= cost.encode_temp_share * planned + slack, dtype
        assert decoding <= cost.decode_temp_share * planned + slack, dtype


@pytest.mark.parametrize("n", [512, 4096, 2**17, 2**20])
@pytest.mark.parametrize("name", [name for name in EXACT if name != "zvc"])  # its temporaries hang on the zeros
def test_no_size_takes_a_byte_more_meanwhile_than_planned(name, n):
    (cost,) = measure_codecs([name])
    flat = fitting(name, n)
    stack = encode(flat, (name,))
    encoding = max(accumulate(allocations_of(lambda: encode(flat, (name,))))) - stack.n_bytes
    decoding = max(accumulate(allocations_of(lambda: decode(stack)), initial=0)) - flat.nbytes
    assert encoding <= cost.encode_temporaries(flat.nbytes)
    assert decoding <= cost.decode_temporaries(flat.nbytes)


@pytest.mark.parametrize("second", LOSSY)
def test_codecs_are_stacked(second):
    flat = fitting("zvc", 5000)
    alone, both = encode(flat, ("zvc",)), encode(flat, ("zvc", second))
    back = decode(both)
    assert both.n_bytes < alone.n_bytes < flat.nbytes
    assert torch.equal(back[flat == 0], flat[flat == 0])
    assert torch.allclose(back, flat, atol=0.5)
    elsewhere = [t.clone() for t in both.tensors()]
    assert torch.equal(decode(both.without_tensors(), elsewhere), back)


def test_zeros_that_are_few_are_not_left_out():
    stack = encode(torch.arange(1.0, 100.0), ("zvc", "bf16"))
    assert torch.equal(decode(stack), torch.arange(1.0, 100.0))


@pytest.mark.parametrize("n", LENGTHS)
def test_bits_are_packed_and_unpacked(n):
    flags = torch.rand(n + 3, generator=torch.Generator().manual_seed(n)) > 0.5
    for view in (flags[:n], flags[3:], flags.clone()):
        packed = pack_bits(view)
        assert packed.numel() == -(-view.numel() // 8)
        assert torch.equal(unpack_bits(packed, view.numel()), view)
        for dtype in FLOATS:
            one = torch.tensor(1.25, dtype=dtype)
            assert torch.equal(unpack_as(packed, view.numel(), 1.25, like=one), view * one)


def test_an_unknown_codec_is_an_error_with_the_names():
    with pytest.raises(ConfigError, match="zvc"):
        encode(torch.ones(8), ("zvcc",))


def test_on_a_gpu_the_sign_is_taken_without_a_question_and_gradients_are_the_same(monkeypatch):
    """A number that Python wants drains a GPU's queue; where there is a NaN, ReLU's backward lets the gradient pass."""
    monkeypatch.setattr(sign, "answers_at_once", lambda tensor: False)
    for dtype in FLOATS:
        flat = torch.tensor([float("nan"), 1.5, 0.0, -0.0, float("inf"), -2.0, 1e-30, -float("inf"), 3.0], dtype=dtype)
        with monkeypatch.context() as patch:
            for name in ("__bool__", "__int__", "__float__", "item", "tolist"):
                patch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a number was asked for"))
            back = decode(encode(flat, ("sign",)))
        grad = torch.arange(1, 10).to(dtype)
        found, want = (torch.ops.aten.threshold_backward(grad, saved, 0) for saved in (back, flat))
        assert torch.equal(found, want)
