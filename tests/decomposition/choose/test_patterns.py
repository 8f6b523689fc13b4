import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.decomposition.choose import patterns

NAMES = st.lists(st.sampled_from(("layer1", "layer2", "conv", "0", "1", "head")), min_size=1, max_size=3).map(".".join)


def test_the_most_specific_wins():
    mapping = {"re:.*": 1, "*": 2, "layer4*": 3, "layer4": 4, "layer4.0": 5, "layer4.0.conv1": 6}
    expected = {"x": 2, "layer40": 3, "layer4.1.conv1": 4, "layer4.0.conv2": 5, "layer4.0.conv1": 6}
    assert {name: patterns.lookup(mapping, name, "rank") for name in expected} == expected
    assert patterns.lookup({"head": 1}, "x", "rank") is None


def test_equally_specific_patterns_may_agree_but_not_conflict():
    assert patterns.lookup({"?a": 1, "a?": 1}, "aa", "rank") == 1
    with pytest.raises(ConfigError, match=r"rank.*'\?a'.*'a\?'|rank.*'a\?'.*'\?a'") as caught:
        patterns.lookup({"?a": 1, "a?": 2}, "aa", "rank")
    assert "'aa'" in caught.value.hint


@settings(max_examples=200, derandomize=True)
@given(
    NAMES,
    st.dictionaries(st.text("layer12.*?conv0h", min_size=1, max_size=8), st.integers(), max_size=4),
    st.integers(),
)
def test_an_exact_name_always_wins(name, mapping, value):
    mapping.pop(name, None)
    assert patterns.lookup({**mapping, name: value}, name, "rank") == value


@settings(max_examples=200, derandomize=True)
@given(NAMES, st.text("layer12.*?conv0h[]!", min_size=1, max_size=8))
def test_globs_and_containers_are_what_they_say(name, pattern):
    expected = name == pattern or name.startswith(pattern + ".") or fnmatchcase(name, pattern)
    assert patterns.matches(pattern, name) == expected


@settings(max_examples=200, derandomize=True)
@given(st.text(max_size=12))
def test_any_text_is_a_pattern_or_a_clear_error(text):
    try:
        expected = bool(re.fullmatch(text, "layer1.conv"))
    except re.error:
        with pytest.raises(ConfigError, match="regular expression"):
            patterns.matches(f"re:{text}", "layer1.conv")
    else:
        assert patterns.matches(f"re:{text}", "layer1.conv") == expected


@pytest.mark.parametrize(
    ("select", "chosen"),
    [
        (["layer1"], {"layer1.0", "layer1.1"}),
        (["!head"], {"layer1.0", "layer1.1", "layer2.0"}),
        (["*", "!layer1.*", "layer1.1"], {"layer1.1", "layer2.0", "head"}),
        (["re:.*\\.0"], {"layer1.0", "layer2.0"}),
    ],
)
def test_select(select, chosen):
    names = ["layer1.0", "layer1.1", "layer2.0", "head"]
    assert {name for name in names if patterns.selected(select, name)} == chosen


def test_a_pattern_that_means_nothing_names_the_closest():
    with pytest.raises(ConfigError, match="layer9") as caught:
        patterns.check_used(["layer9.0"], ["layer1.0", "head"], "select")
    assert "'layer1.0'" in caught.value.hint
    with pytest.raises(ConfigError, match="not a pattern"):
        patterns.check_used([3], ["layer1.0"], "select")
