import pytest

from ctdr_lightning.joint import pricing


@pytest.fixture(scope="module")
def short_thoughts():
    """Each candidate is planned for a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pricing, "PLANNING_S", 0.1)
        yield


@pytest.fixture(autouse=True)
def _short_searches(short_searches):
    """For all tests of this folder: the best plans of a search are tests/memory's."""
