import pytest


@pytest.fixture(scope="module", autouse=True)
def _short_searches(short_searches):
    """For all tests of this folder: a session and a run keep what they promise under any plan."""
