"""A fit whose saved tensors wait on a disk or in fewer bytes is the plain fit, to the bit."""

import pytest
import torch

from ctdr_lightning import CTDRCallback, Memory
from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.trainer.groups import grouped
from tests.parts import blobs, fit


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "vdnn_all", "offload": "disk"},
        {"policy": "gist", "codecs": "exact"},
    ],
)
def test_weights_and_losses_are_those_of_the_plain_fit(tmp_path, options):
    plain = blobs()
    fit(plain)
    found = blobs()
    if "offload" in options:
        options = options | {"disk_folder": tmp_path}
    callback = CTDRCallback(rank=None, verbose=False, **grouped(options))
    trainer = fit(found, callback)
    assert callback.run.memory.session.plan.away, "nothing was put away"
    assert all(torch.equal(a, b) for a, b in zip(plain.losses, found.losses, strict=True))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, found.state_dict()[name]), name
    assert list(tmp_path.iterdir()) == []
    if "offload" in options:
        assert trainer.callback_metrics["ctdr/moved_gib"] > 0
        assert "ctdr/transfer_wait_s" in trainer.callback_metrics


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"offload": "moon"}, "offload"),
        ({"codecs": "zip"}, "codecs"),
        ({"disk_folder": "x"}, "disk_folder"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_starts(options, says):
    with pytest.raises(ConfigError, match=says):
        CTDRCallback(**grouped(options))


def test_the_host_is_refused_where_the_run_is_on_the_processor():
    with pytest.raises(ConfigError, match="disk"):
        fit(blobs(), CTDRCallback(rank=None, policy="vdnn", memory=Memory(offload="host"), verbose=False))
