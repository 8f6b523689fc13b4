"""Nests of other classes than dicts, lists and tuples: mappings and dataclasses are opened, and come back as such."""

from collections import UserDict, namedtuple
from dataclasses import dataclass, field

import torch

from ctdr_lightning.basics.nests import leaves_of, map_leaves, outline_of

Pair = namedtuple("Pair", "x y")


class Encoding(UserDict):
    """As a tokenizer's, with something beside its entries."""

    def __init__(self, data, origin="text"):
        super().__init__(data)
        self.origin = origin


class Table(dict):
    pass


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    words: list
    size: int = field(init=False, default=3)


def nest():
    return [Encoding({"a": 1, "b": (2, Pair(3, None))}, "mine"), Batch(4, ["w"]), Table(c=[5])]


def test_leaves_come_in_order():
    assert [leaf for leaf in leaves_of(nest()) if isinstance(leaf, int)] == [1, 2, 3, 4, 3, 5]
    assert leaves_of(nest(), lambda node: isinstance(node, Batch))[-2] == Batch(4, ["w"])


def test_a_nest_keeps_its_classes_and_what_is_beside_its_entries():
    before = nest()
    encoding, batch, table = map_leaves(lambda leaf: -leaf if isinstance(leaf, int) else leaf, before)
    assert type(encoding) is Encoding
    assert encoding.origin == "mine"
    assert dict(encoding) == {"a": -1, "b": (-2, Pair(-3, None))}
    assert (type(batch), batch.x, batch.words, batch.size) == (Batch, -4, ["w"], -3)
    assert (type(table), table) == (Table, {"c": [-5]})
    assert before[0] == nest()[0]
    assert before[1] == nest()[1]


def test_taking_an_entry_out_of_the_copy_leaves_the_nest():
    before = Encoding({"a": 1})
    map_leaves(lambda leaf: leaf, before).pop("a")
    assert before == {"a": 1}


def test_outlines_tell_classes_and_keys():
    found = {outline_of(each) for each in ([1], {"a": 1}, Encoding({"a": 1}), Encoding({"b": 1}), Table(a=1))}
    assert len(found) == 5
    assert outline_of(nest()) == outline_of(map_leaves(lambda leaf: 7, nest()))
