"""What follows from an object is made once, and again in a copy."""

import copy
import pickle

from ctdr_lightning.basics.made_once import MadeOnce


class Word(MadeOnce):
    def __init__(self, text):
        self.text = text

    def length(self, seen):
        return self.once("length", lambda: seen.append(self.text) or len(self.text))


def test_it_is_made_when_it_is_first_asked_for_and_once_for_each_object():
    seen = []
    first, second = Word("ab"), Word("abc")
    assert [first.length(seen), second.length(seen), first.length(seen)] == [2, 3, 2]
    assert seen == ["ab", "abc"]


def test_a_copy_makes_it_again_even_where_it_cannot_be_pickled():
    word = Word("ab")
    word.once("function", lambda: lambda: None)
    for twin in (copy.copy(word), copy.deepcopy(word), pickle.loads(pickle.dumps(word))):
        assert twin.text == "ab"
        assert twin.once("function", lambda: "made again") == "made again"
