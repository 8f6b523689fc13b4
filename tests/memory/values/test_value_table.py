import itertools
import weakref

import pytest
import torch

from ctdr_lightning.basics.torch_private import BelowAutograd
from ctdr_lightning.memory.values.replay import unpack
from ctdr_lightning.memory.values.value import Handle, Held, Node, Value
from ctdr_lightning.memory.values.value_table import ValueTable

aten = torch.ops.aten
COUNTER = itertools.count()


def run(table, func, *args, **kwargs):
    """Run a call as the tape does: captured, its writes prepared for, its outputs bound."""
    with torch.no_grad():
        node = table.capture(func, next(COUNTER), args, kwargs)
        table.overwrites(func, args, kwargs)
        with BelowAutograd():
            out = func(*args, **kwargs)
        if node is not None:
            table.bind(node, out)
        for tensor in (args[0],) if func._schema.is_mutable else ():
            torch._C._autograd._unsafe_set_version_counter((tensor,), (tensor._version + 1,))
    return node, out


def test_a_value_lends_the_programs_tensor_while_it_lives():
    table, x = ValueTable(), torch.ones(3)
    _, y = run(table, aten.exp.default, x)
    value = table.find(y)
    assert value.get() is y
    assert value.tensor is None
    ref = weakref.ref(value)
    handle = Handle(value)
    del y, value
    assert ref().get() is None
    assert ref().node.func is aten.exp.default
    assert ref().handles == 1
    del handle
    assert ref() is None, "nothing but the handle held it"


def test_handles_count_themselves():
    value = Value()
    a, b = Handle(value), Handle(value)
    assert value.handles == 2
    del a
    assert value.handles == 1
    del b
    assert value.handles == 0


def test_a_tensor_without_a_producer_is_unknown():
    table, x = ValueTable(), torch.ones(3)
    assert table.find(x) is None
    _, y = run(table, aten.exp.default, x)
    assert table.find(y.clone()) is None
    assert table.find(y[1:]) is None


def test_pinned_calls_are_not_captured():
    table, x = ValueTable(), torch.rand(3)
    assert table.capture(aten.bernoulli.default, 0, (x,), {}) is None
    assert table.capture(aten.empty_like.default, 0, (x,), {}) is None
    assert table.capture(aten.relu_.default, 0, (x,), {}) is None, "what it overwrites could not be made again"
    assert table.capture(aten.mm.default, 0, (torch.eye(3).to_sparse(), torch.eye(3)), {}) is None


def test_a_node_owns_its_sources():
    table, x, w = ValueTable(), torch.ones(2, 2), torch.ones(2, 2)
    _, h = run(table, aten.exp.default, x)
    node, _ = run(table, aten.cat.default, [h, w], 1)
    known, held = node.sources()
    assert known is table.find(h)
    assert held.tensor.untyped_storage() is w.untyped_storage()
    run(table, aten.add.Tensor, h, w, alpha=2)
    assert node.grad is False


def test_a_write_in_place_ends_a_value():
    table, x = ValueTable(), torch.ones(3)
    _, y = run(table, aten.exp.default, x)
    old = table.find(y)
    node, _ = run(table, aten.relu_.default, y)
    new = table.find(y)
    assert new is not old
    assert new.node is node
    assert old.get() is None
    assert old.node is not None
    assert node.sources()[0] is old


def test_a_write_through_an_unknown_alias_is_noticed():
    """``x.data`` has a version counter of its own."""
    table, x = ValueTable(), torch.ones(3)
    _, y = run(table, aten.exp.default, x)
    value, handle = table.find(y), None
    handle = Handle(value)
    run(table, aten.mul_.Tensor, y.data, torch.tensor(2.0))
    assert table.find(y) is None
    assert value.get() is None, "a replay must not read it"
    assert value.saved().untyped_storage() is y.untyped_storage(), "autograd itself would"
    assert handle.value is value


def test_another_storage_is_noticed():
    table, x = ValueTable(), torch.ones(3)
    _, y = run(table, aten.exp.default, x)
    value = table.find(y)
    y.data = torch.zeros(3)
    assert table.find(y) is None
    assert value.get() is None


def test_what_replays_hold_is_copied_before_it_is_written():
    table, x = ValueTable(), torch.arange(12.0).view(3, 4)
    node, _ = run(table, aten.exp.default, x.t()[1:])
    other, _ = run(table, aten.exp.default, x)
    before = x.clone()
    run(table, aten.zero_.default, x)
    (held,), (whole,) = node.sources(), other.sources()
    assert torch.equal(held.get(), before.t()[1:])
    assert held.get().stride() == before.t()[1:].stride()
    assert held.get().untyped_storage() is whole.get().untyped_storage(), "one copy for all"
    assert not x.any()


def test_nothing_is_copied_for_the_dead():
    table, x = ValueTable(), torch.ones(3)
    node, y = run(table, aten.exp.default, x)
    source = weakref.ref(node.sources()[0])
    del node, y
    assert source() is None
    run(table, aten.zero_.default, x)


def test_a_value_of_another_fsdp_unit_is_held():
    table, x = ValueTable(), torch.ones(3)
    table.unit = 1
    _, y = run(table, aten.exp.default, x)
    value = table.find(y)
    assert value.node is not None
    table.unit = 2
    assert table.find(y) is value
    assert value.node is None
    assert value.tensor.untyped_storage() is y.untyped_storage()


def test_entries_vanish_with_their_tensors():
    table, x = ValueTable(), torch.ones(3)
    for _ in range(5):
        run(table, aten.exp.default, x)
    assert len(table) == 0
    _, y = run(table, aten.exp.default, x)
    assert len(table) == 1
    run(table, aten.relu_.default, y)
    assert len(table) == 1
    table.clear()
    assert table.find(y) is None


def test_a_table_is_in_no_cycle():
    table, x = ValueTable(), torch.ones(3)
    run(table, aten.exp.default, x)
    ref = weakref.ref(table)
    del table
    assert ref() is None


def test_held_tensors_know_when_they_were_written():
    x = torch.ones(3)
    held = Held(x)
    assert held.get().untyped_storage() is x.untyped_storage()
    x.add_(1)
    assert held.get() is None
    leaf = torch.nn.Parameter(torch.ones(3))
    assert Held(leaf).get() is leaf


def test_outputs_that_are_no_tensors():
    table = ValueTable()
    node = Node(aten.relu.default, 0)
    assert table.bind(node, (None, 3, torch.eye(2).to_sparse())) == [None] * 3
    assert node.outs == [None] * 3


def test_a_leaf_is_held_as_itself_and_what_it_was_is_read_whatever_data_it_gets():
    table, weight = ValueTable(), torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    node, _ = run(table, aten.exp.default, weight)
    (source,) = node.sources()
    assert source.get() is weight
    before = weight.detach().clone()
    weight.data = torch.zeros(3)
    assert torch.equal(source.get(), before)
    assert source.get().stride() == before.stride()


def test_what_a_leaf_was_is_copied_before_it_is_written_elsewhere():
    table, weight = ValueTable(), torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    node, _ = run(table, aten.exp.default, weight)
    before, old = weight.detach().clone(), weight.data
    weight.data = torch.zeros(2, 3)
    run(table, aten.zero_.default, old)
    (source,) = node.sources()
    assert torch.equal(source.get(), before)


def test_values_of_a_dead_storage_are_not_mistaken_for_those_of_the_next_at_its_address():
    table, x = ValueTable(), torch.ones(1000)
    for _ in range(50):
        _, y = run(table, aten.exp.default, x)
        keep = table.find(y)
        run(table, aten.mul_.Tensor, y, torch.tensor(2.0))
        assert keep.get() is None
        new = table.find(y)
        assert torch.equal(new.get(), x.exp() * 2)
        del y


def part_of(table, take, view=lambda y: y):
    """A captured call's output, a view of it that nobody captured, and the view's value."""
    _, y = run(table, aten.exp.default, torch.arange(24.0).view(2, 3, 4))
    part = take(view(y))
    return y, part, table.known(part)


@pytest.mark.parametrize(
    "take",
    [
        lambda y: y.view(6, 4)[1:, ::2],
        lambda y: y.permute(2, 0, 1).unsqueeze(1),
        lambda y: y.unbind(1)[2].t(),
        lambda y: y.split(2, -1)[1].expand(5, 2, 3, 2),
        lambda y: y.unfold(2, 2, 1).diagonal(),
    ],
)
def test_a_view_is_known_by_its_geometry(take):
    table = ValueTable()
    y, part, value = part_of(table, take)
    assert table.find(part) is value, "from now on"
    (whole,) = value.node.sources()
    assert whole is table.find(y)
    want, stride, handle = part.clone(), part.stride(), Handle(value)
    del y, part
    assert whole.get() is None
    again = unpack(handle)
    assert torch.equal(again, want)
    assert again.stride() == stride


def test_a_view_shares_its_bases_fate():
    table = ValueTable()
    _, y = run(table, aten.exp.default, torch.ones(3))
    whole = table.find(y)
    whole.stays_while_awaited, whole.hold = False, True
    value = table.known(y[1:])
    assert (value.stays_while_awaited, value.hold) == (False, True)
    assert whole.node.index < value.node.index < run(table, aten.sin.default, y[1:])[0].index


def test_other_views_are_not_known():
    table, x = ValueTable(), torch.ones(3)
    assert table.known(x[1:]) is None, "nobody can make x again"
    *_, value = part_of(table, lambda y: y.view(torch.int32))
    assert value is None, "other elements"
    *_, value = part_of(table, lambda y: torch.view_as_complex(y.view(2, 6, 2)).conj())
    assert value is None
    *_, value = part_of(ValueTable(), lambda y: y.view(-1), lambda y: y.detach())
    assert value is None, "autograd does not say of what it is a view"


def test_a_view_of_what_was_overwritten_is_not_known():
    table = ValueTable()
    _, y = run(table, aten.exp.default, torch.ones(3))
    part = y[1:]
    node, _ = run(table, aten.zero_.default, part)
    assert table.known(part).node is node, "what wrote it makes it"
    assert table.known(y[1:]) is None
    _, y = run(table, aten.exp.default, torch.ones(3))
    part = y[1:]
    part.data = torch.zeros(2)
    assert table.known(part) is None
