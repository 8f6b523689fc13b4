import pytest
import torch

from ctdr_lightning.memory.values.op_traits import (
    ATOMIC,
    call_again,
    overwritten,
    pin_reason_of_call,
    pin_reason_of_types,
    pin_reason_on_gpu,
    traits,
    without_running_stats,
)

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("func", "twin"),
    [
        (aten.relu_.default, aten.relu.default),
        (aten.add_.Tensor, aten.add.Tensor),
        (aten.index_put_.default, aten.index_put.default),
        (aten.copy_.default, aten.copy.default),
        (aten.relu.default, aten.relu.default),
        (aten.add.out, None),
    ],
)
def test_functional_twins(func, twin):
    assert traits(func).twin is twin
    assert traits(func) is traits(func)
    assert traits(func).name == str(func)


@pytest.mark.parametrize(
    ("func", "args", "reason"),
    [
        (aten.relu.default, (), ""),
        (aten.relu_.default, (), ""),
        (aten.bernoulli.default, (), "random"),
        (aten.native_dropout.default, (), "random"),
        (aten.normal_.default, (), "random"),
        (aten.empty_like.default, (), "uninitialised memory"),
        (aten.resize_.default, (), "another storage"),
        (aten.add.out, (), "in-place without a functional twin"),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (None, None, None, 0.5), "random"),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, (None, None, None, 0.0), ""),
    ],
)
def test_pins(func, args, reason):
    assert pin_reason_of_call(func, args, {}) == reason


def test_collectives_are_pinned():
    from torch.distributed import _functional_collectives  # noqa: F401  (registers the ops)

    assert pin_reason_of_call(torch.ops._c10d_functional.all_reduce.default, (), {}) == "collective"
    assert pin_reason_of_call(torch.ops._c10d_functional.all_gather_into_tensor.default, (), {}) == "collective"


def test_as_strided_is_pinned_where_it_sees_more_than_its_argument():
    whole, func = torch.randn(4, 4), aten.as_strided.default
    assert not pin_reason_of_call(func, (whole, [2], [1]), {})
    assert not pin_reason_of_call(func, (whole.t(), [2], [1]), {})
    assert "beyond" in pin_reason_of_call(func, (whole[1:], [2], [1]), {})


def test_tensor_subclasses_are_pinned():
    class Own(torch.Tensor):
        pass

    assert pin_reason_of_types((torch.Tensor, torch.nn.Parameter)) == ""
    assert pin_reason_of_types((torch.Tensor, Own)) == "tensor subclass Own"


def test_what_a_call_writes():
    a, b, c = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    assert overwritten(aten.relu.default, (a,), {}) == []
    assert overwritten(aten.add_.Tensor, (a, b), {}) == [a]
    assert overwritten(aten.add.out, (a, b), {"out": c})[0] is c
    written = overwritten(aten._foreach_add_.Scalar, ([a, b], 1), {})
    assert written[0] is a
    assert written[1] is b
    batch_norm = (torch.zeros(3, 2), None, None, a, b, True, 0.1, 1e-5)
    assert [t is s for t, s in zip(overwritten(aten.native_batch_norm.default, batch_norm, {}), (a, b), strict=True)]
    assert overwritten(aten.native_batch_norm.default, (*batch_norm[:5], False, 0.1, 1e-5), {}) == []


@pytest.mark.parametrize("func", [aten.native_batch_norm.default, aten._native_batch_norm_legit.default])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_again_leaves_its_statistics_alone(func, training, dtype, affine):
    x = torch.randn(5, 3, 2).to(dtype)
    weight, bias = (torch.rand(3).to(dtype), torch.rand(3).to(dtype)) if affine else (None, None)
    mean, var = torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)
    args = (x, weight, bias, mean, var, training, 0.1, 1e-5)
    kept = without_running_stats(func, args, {})
    assert (kept[3] is dtype) == training
    first = func(*args)
    stats = mean.clone(), var.clone()
    again = call_again(func, list(kept), {})
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(mean, stats[0])
    assert torch.equal(var, stats[1])


def test_calling_again_writes_nothing():
    x = torch.randn(3)
    before = x.clone()
    assert torch.equal(call_again(aten.mul_.Tensor, [x, torch.tensor(2.0)], {}), before * 2)
    assert torch.equal(x, before)


def test_views():
    assert traits(aten.view.default).view
    assert traits(aten.detach.default).view
    assert not traits(aten.relu.default).view
    assert not traits(aten.relu_.default).view


def test_an_op_that_is_registered_anew_has_its_own_traits():
    for kind in range(40):
        with torch.library._scoped_library("ctdr_test", "DEF") as library:
            arguments = "(Tensor(a!) x) -> ()" if kind % 2 else "(Tensor x) -> Tensor"
            library.define(f"again{arguments}")
            op = torch.ops.ctdr_test.again.default
            assert bool(traits(op).writes) == bool(kind % 2)
            assert traits(op).func is op, "held, so that its identity stays its own"


def test_a_higher_order_operator_may_not_run_again():
    cond = traits(torch.ops.higher_order.cond)
    assert cond.name == "higher_order.cond"
    assert cond.pin == "higher-order operator"


X = torch.randn(6, 5)
ROWS = torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("func", "args", "reasons"),
    [
        (aten.topk.default, (X, 2), ("", "an index from floating-point numbers")),
        (aten.sort.default, (X,), ("", "an index from floating-point numbers")),
        (aten.argmax.default, (X, 1), ("an index from floating-point numbers",)),
        (aten.sort.default, (torch.arange(5),), ("", "")),
        (aten.nonzero.default, (X > 0,), ("its shape follows from contents",)),
        (aten.masked_select.default, (X, X > 0), ("its shape follows from contents",)),
        (aten.index.Tensor, (X, [X > 0]), ("its shape follows from contents",)),
        (aten.index.Tensor, (X, [ROWS]), ("",)),
        (aten.gt.Scalar, (X, 0), ("",)),
        (aten.index_add.default, (X, 0, ROWS, X[:2]), ("sums in no fixed order on a GPU",)),
        (aten.scatter_add.default, (X, 0, ROWS[:, None], X[:2]), ("sums in no fixed order on a GPU",)),
        (aten.cumsum.default, (X, 1), ("sums in no fixed order on a GPU",)),
        (aten.zeros_like.default, (X,), ("a constant that a kernel may fill",)),
        (aten.mm.default, (X, X.T), ("",)),
    ],
)
def test_what_a_replay_on_a_gpu_may_make_otherwise_is_pinned(func, args, reasons):
    out = func(*args)
    outs = out if isinstance(out, tuple) else (out,)
    assert tuple(pin_reason_on_gpu(func, args, o) for o in outs) == reasons


def test_deterministic_algorithms_add_in_a_fixed_order():
    torch.use_deterministic_algorithms(True)
    try:
        assert pin_reason_on_gpu(aten.cumsum.default, (X, 1), X) == ""
    finally:
        torch.use_deterministic_algorithms(False)


def test_every_op_that_adds_with_atomics_exists():
    assert [name for name in ATOMIC if not any(hasattr(aten, n) for n in (name, f"{name}_"))] == []
