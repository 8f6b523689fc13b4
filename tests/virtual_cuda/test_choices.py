"""Where torch's own dispatch can choose without a card, the rules choose the same."""

import json

import pytest

from tests.virtual_cuda import choices


@pytest.fixture(scope="module")
def torchs(on_virtual_gpu):
    return json.loads(on_virtual_gpu("choices"))


@pytest.mark.parametrize("name", choices.CALLS)
def test_a_rule_chooses_what_torch_does(torchs, name):
    assert choices.by_rule(name) == torchs[name]
