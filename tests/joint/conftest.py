import pytest

from ctdr_lightning.joint import pricing


@pytest.fixture(scope="module")
def short_thoughts():
    """Each candidate is planned for a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pricing, "PLANNING_S", 0.1)
        yield
