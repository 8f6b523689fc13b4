import torch
from torch import nn

from ctdr_lightning.recovery.batchnorm import copy_statistics, reestimate, tracked


def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4, momentum=0.3))


def test_statistics_are_the_plain_average_over_the_batches():
    model = net()
    batches = [torch.randn(6, 1, 5, 5) * (1 + i) for i in range(5)]
    assert reestimate(model, model, batches) == {"1", "3"}
    outputs = [model[0](batch) for batch in batches]
    means = torch.stack([out.mean((0, 2, 3)) for out in outputs]).mean(0)
    variances = torch.stack([out.var((0, 2, 3)) for out in outputs]).mean(0)
    torch.testing.assert_close(model[1].running_mean, means)
    torch.testing.assert_close(model[1].running_var, variances)
    assert model[3].momentum == 0.3
    assert model[1].num_batches_tracked == 5


def test_weights_modes_and_gradients_stay():
    model = net().eval()
    before = [p.clone() for p in model.parameters()]
    reestimate(model, model, [torch.randn(4, 1, 5, 5)])
    assert not any(layer.training for layer in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_ranks_are_averaged():
    alone, together = net(), net()
    together.load_state_dict(alone.state_dict())
    batch = torch.randn(4, 1, 5, 5)
    reestimate(alone, alone, [batch])
    reestimate(together, together, [batch], average=lambda tensor: tensor + 1)
    assert torch.equal(together[1].running_mean, alone[1].running_mean + 1)
    assert torch.equal(together[3].running_var, alone[3].running_var + 1)


def test_a_model_without_statistics_is_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    assert tracked(model) == {}
    assert reestimate(model, model, [torch.randn(3, 4)]) == set()


def test_a_layer_that_no_batch_reaches_keeps_its_statistics():
    model = net()
    model(torch.randn(4, 1, 5, 5))
    before = {key: buffer.clone() for key, buffer in model[3].named_buffers()}
    assert reestimate(model, model[:2], [torch.randn(4, 1, 5, 5)]) == {"1"}
    assert before["num_batches_tracked"] == 1
    assert all(torch.equal(before[key], buffer) for key, buffer in model[3].named_buffers())


def test_instance_norm_keeps_what_it_tracked():
    model = nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True), nn.BatchNorm2d(2))
    model(torch.randn(4, 2, 5, 5))
    before = model.eval()[0].running_mean.clone()
    assert reestimate(model, model, [torch.randn(4, 2, 5, 5)]) == {"1"}
    assert not torch.equal(before, torch.zeros(2))
    assert torch.equal(model[0].running_mean, before)


def test_copy_statistics():
    source, target = net(), net()
    reestimate(source, source, [torch.randn(4, 1, 5, 5)])
    copy_statistics(source, target)
    assert torch.equal(source[1].running_var, target[1].running_var)
    assert target[1].num_batches_tracked == 1
