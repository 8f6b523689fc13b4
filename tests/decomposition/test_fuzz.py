"""Whatever is passed as argument, plan or checkpoint: it works, or it is our error with a hint and nothing changed."""

import copy
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from ctdr_lightning import decompose, restore
from ctdr_lightning.basics.errors import CTDRError

QUICK = settings(max_examples=120, suppress_health_check=list(HealthCheck), derandomize=True)
NAMES = st.sampled_from(("0", "2", "*", "re:.*", "nope", "[", "!0", ""))
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 40), st.floats(allow_nan=True), st.text(max_size=6),
    st.sampled_from(("vbmf", "error=0.3", "energy=2", "share=0.5", "tucker", "svd", "auto", "fixed=3", "error=nan")),
)  # fmt: skip
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(NAMES, SCALARS), inner, max_size=3),
    ),
    max_leaves=5,
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(32, 12))


def check(call, model):
    """Either it works, or our error is raised and the model is as it was."""
    before = [(name, type(m)) for name, m in model.named_modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    caught: list[CTDRError] = []
    try:
        call()
    except CTDRError as error:
        caught.append(error)
    if not caught:
        model(torch.randn(1, 4, 4, 4))
        return
    assert caught[0].problem
    assert caught[0].hint
    assert [(name, type(m)) for name, m in model.named_modules()] == before
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


@QUICK
@given(JUNK)
def test_any_rank(rank):
    model = net()
    check(lambda: decompose(model, rank=rank), model)


@QUICK
@given(JUNK, JUNK)
def test_any_method_and_selection(method, select):
    model = net()
    check(lambda: decompose(model, rank=0.5, method=method, select=select), model)


@pytest.mark.slow
@QUICK
@given(st.data())
def test_any_plan(data):
    model = net()
    plan = decompose(copy.deepcopy(model), rank=0.5).choices.to_dict()
    places = [(plan, "version"), (plan, "layers"), *((plan["layers"], name) for name in ("0", "2", "new"))]
    places += [(plan["layers"]["0"], key) for key in ("decision", "method", "ranks", "reason", "extra")]
    for _ in range(data.draw(st.integers(1, 2))):
        where, key = data.draw(st.sampled_from(places))
        where[key] = data.draw(JUNK)
    check(lambda: decompose(model, choices=plan), model)


@QUICK
@given(JUNK)
def test_junk_for_a_plan(plan):
    model = net()
    if plan is not None:
        check(lambda: decompose(model, choices=plan), model)


@pytest.mark.slow
@QUICK
@given(st.data())
def test_any_change_to_a_checkpoint(data):
    trained, model = net(), net()
    decompose(trained, rank=0.5)
    state = dict(trained.state_dict())
    key = data.draw(st.sampled_from(sorted(state)))
    change = data.draw(st.sampled_from(("drop", "rename", "reshape", "transpose", "type", "empty", "grow")))
    value = state.pop(key)
    match change:
        case "rename":
            state[
                data.draw(st.sampled_from(("0.tucker.7.weight", "2.svd.1.bias", "9.weight", "0.tt.0.weight", "x")))
            ] = value
        case "reshape":
            state[key] = value.flatten()
        case "transpose":
            state[key] = value.transpose(0, -1)
        case "type":
            state[key] = data.draw(JUNK)
        case "empty":
            state[key] = value[:0]
        case "grow":
            state[key] = torch.cat((value, value))
    check(lambda: restore(model, state), model)


@pytest.mark.slow
@QUICK
@given(st.binary(max_size=400), st.integers(0, 3000))
def test_any_bytes_for_a_checkpoint(tmp_path_factory, junk, place):
    path = tmp_path_factory.mktemp("fuzz") / "net.ckpt"
    trained, model = net(), net()
    decompose(trained, rank=0.5)
    torch.save(trained.state_dict(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + junk + whole[place + len(junk) :])
    check(lambda: restore(model, path), model)


def test_plan_is_json(tmp_path):
    plan = decompose(net(), rank=0.5).choices.to_dict()
    assert json.loads(json.dumps(plan)) == plan
    with pytest.raises(CTDRError):
        decompose(net(), choices=json.loads('{"version": 99, "layers": {}}'))
