"""What ranks cost is measured on outputs that the step itself produces."""

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.errors import ConfigError
from ctdr_lightning.joint.divergence import mean_kl, outputs_of
from tests.joint import parts


def test_equal_models_do_not_differ_although_they_drop_out():
    net, data = parts.network(dropout=0.5), parts.batches()
    assert mean_kl(outputs_of(net, parts.step, data), outputs_of(net, parts.step, data)) < 1e-12


def test_the_mean_is_over_rows_and_in_nats():
    p, q = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[0.25, 0.75], [0.9, 0.1]])
    expected = (0.5 * torch.log(torch.tensor(2.0)) + 0.5 * torch.log(torch.tensor(0.5 / 0.75))) / 2
    assert mean_kl([p.log()], [q.log()]) == pytest.approx(float(expected), rel=1e-6)


def test_classes_of_images_are_the_second_axis_and_one_output_is_a_probability():
    dense, other = torch.randn(2, 5, 4, 4), torch.randn(2, 5, 4, 4)
    rows = [t.movedim(1, -1).reshape(-1, 5) for t in (dense, other)]
    assert mean_kl([dense], [other]) == pytest.approx(mean_kl(rows[:1], rows[1:]))
    assert mean_kl([torch.zeros(3, 1)], [torch.zeros(3, 1)]) == 0
    assert mean_kl([torch.zeros(3, 1)], [torch.ones(3, 1)]) > 0


def test_outputs_are_heard_from_children_from_objects_and_under_their_name():
    class Answer:
        def __init__(self, logits):
            self.hidden, self.logits = logits * 2, logits

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.lost = nn.Linear(4, 3), nn.CrossEntropyLoss()

        def forward(self, x):
            return Answer(self.net(x))

    model, x, y = Named(), torch.randn(5, 4), torch.randint(3, (5,))
    (heard,) = outputs_of(model, lambda m, b: m.lost(m(b[0]).logits, b[1]), [(x, y)])
    assert torch.equal(heard, model.net(x))
    (heard,) = outputs_of(model, lambda m, b: m.lost(m.net(b[0]), b[1]), [(x, y)])
    assert torch.equal(heard, model.net(x))


def test_a_step_without_outputs_is_told_what_to_do():
    with pytest.raises(ConfigError, match="returns a tensor with two axes"):
        outputs_of(nn.Sequential(nn.Linear(2, 2)), lambda m, b: b.sum(), [torch.ones(2)])
