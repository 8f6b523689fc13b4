import pytest

from ctdr_lightning.joint import pricing, search


@pytest.fixture(scope="module")
def short_thoughts():
    """Each candidate is planned for a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (pricing, search):
            patch.setattr(module, "PLANNING_S", 0.1)
        yield
