"""A step for a GPU gives one trace: chosen by rule on the processor, or by torch's dispatch on a virtual GPU."""

import json

import pytest

from tests.virtual_cuda import steps


@pytest.fixture(scope="module")
def there(on_virtual_gpu):
    return json.loads(on_virtual_gpu("steps", *steps.STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("name", steps.STEPS)
def test_the_rules_give_the_trace_of_torchs_own_dispatch(there, name):
    for precision, here in steps.traces(name).items():
        assert json.loads(here) == json.loads(there[name][precision]), precision
