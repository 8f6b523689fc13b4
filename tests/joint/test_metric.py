"""A metric in the place of the KL: how it is measured, what a drop of it allows, what is said of it."""

import math

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

from ctdr_lightning import BudgetFit, fit_to_budget
from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.decomposition.choose.batches import set_aside
from ctdr_lightning.decomposition.trials import bench as trials
from ctdr_lightning.joint.metric import MetricJudge, check_metric
from tests.joint import parts

pytestmark = pytest.mark.usefixtures("short_thoughts")
PATIENT = {"max_slowdown": 50.0, "progress": False}
SMALL = 2_800_000  # bytes that a fifth of the network and less fit, and nothing larger


def right(net, batch):
    """Share of a batch whose labels the network gives."""
    return (net(batch[0]).argmax(1) == batch[1]).float().mean()


def accuracy(**options):
    return MulticlassAccuracy(10, average="micro", **options)


def learnt(count=4):
    """A network with outputs far apart, and batches that carry what it says itself: it is right everywhere."""
    net = parts.network()
    with torch.no_grad():
        net[-1].weight.mul_(200)
        data = parts.batches(count)
        data = [(x, net.eval()(x).argmax(1)) for x, _ in data]
    return net.train(), data


def judge(metric, net=None, batches=None, step=parts.step):
    return MetricJudge(metric, net or parts.network(), batches or parts.batches(), step)


def test_a_function_is_averaged_over_samples_and_a_torchmetric_over_all_of_them():
    net, batches = parts.network(), parts.batches(1, size=16) + parts.batches(1, size=4, seed=2)
    joined = tuple(torch.cat(pair) for pair in zip(*batches, strict=True))
    expected = float(right(net.eval(), joined))
    assert judge(right, net, batches).dense == pytest.approx(expected)
    assert judge(accuracy(), net, batches).dense == pytest.approx(expected)


def test_nothing_moves_of_model_metric_and_random_state():
    net, metric = nn.Module(), accuracy()
    net.net, net.seen = parts.network(), accuracy()  # the module's own
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    random = torch.get_rng_state()

    def restless(model, batch):
        model.net.train()(batch[0])
        torch.rand(3)
        return model.seen(model.net(batch[0]), batch[1])

    judge(restless, net)
    judge(metric, net, step=lambda model, batch: model.net(batch[0]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert net.training
    assert metric.update_count == net.seen.update_count == 0


def test_lower_may_be_better():
    net = nn.Linear(3, 1)
    batches = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(2)]
    measured = judge(MeanSquaredError(), net, batches, lambda model, batch: model(batch[0]).sum())
    assert not measured.higher_is_better
    assert measured.drop(measured.dense + 0.5) == pytest.approx(0.5)
    assert judge(right).drop(0.0) == judge(right).dense
    assert measured.drop(math.nan) == math.inf


def test_targets_stand_in_pairs_numbered_pairs_and_mappings():
    net, (x, y) = parts.network().eval(), parts.batches()[0]
    expected = float(right(net, (x, y)))
    for batch in ((x, y), (0, (x, y)), [x, {"labels": y}], (3, {"inputs": x, "target": y})):
        assert judge(accuracy(), net, [batch], lambda model, _: model(x)).dense == pytest.approx(expected)


def test_of_several_outputs_the_logits_are_given():
    class Two(nn.Module):
        def __init__(self, second):
            super().__init__()
            self.first, self.second = nn.Linear(6, 10), nn.Linear(6, second)  # one number, or classes as well

        def forward(self, x):
            return self.first(x), self.second(x)

    batches = [(torch.randn(8, 6), torch.randint(10, (8,)))]
    step = lambda model, batch: model(batch[0])[0].sum()  # noqa: E731
    net = Two(1)
    expected = float((net.first(batches[0][0]).argmax(1) == batches[0][1]).float().mean())
    assert judge(accuracy(), net, batches, step).dense == pytest.approx(expected)
    with pytest.raises(ConfigError, match="a step gives 2, 2 of them logits"):
        judge(accuracy(), Two(10), batches, step)


def test_one_process_measures_alone():
    """The other ranks wait for the answer: a metric that gathered theirs would wait for ever."""
    net = parts.network()
    assert judge(accuracy(distributed_available_fn=lambda: True), net).dense == judge(accuracy(), net).dense


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda net, batch: None, "metric returned None, which is not a number"),
        (lambda net, batch: net(batch[0]), r"a tensor of shape \(16, 10\)"),
        (lambda net, batch: {}["gone"], "cannot be measured on a batch .KeyError"),
        (lambda net, batch: math.nan, "is nan for the dense model"),
        (MulticlassAccuracy(3), "MulticlassAccuracy cannot be measured"),
    ],
)
def test_a_metric_that_gives_no_number_is_refused(metric, message):
    with pytest.raises(ConfigError, match=message):
        judge(metric)


def test_a_torchmetric_needs_a_target():
    with pytest.raises(ConfigError, match="neither a pair of input and target nor a mapping"):
        judge(accuracy(), batches=[parts.batches()[0][0]], step=lambda model, batch: model(batch).sum())


@pytest.mark.parametrize(
    ("metric", "max_loss", "message"),
    [
        ("accuracy", 0.1, "neither a function"),
        (MeanMetric(), 0.1, "does not say whether higher is better"),
        (right, None, "without max_loss"),
        (right, -0.1, "max_loss must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(metric, max_loss, message):
    with pytest.raises(ConfigError, match=message):
        check_metric(metric, max_loss)
    with pytest.raises(ConfigError, match=message):
        fit_to_budget(parts.network(), parts.step, parts.batches(), max_loss=max_loss, metric=metric, **PATIENT)


def test_every_second_batch_beyond_those_looked_at_is_the_metrics_alone():
    chosen_by, unseen = set_aside(range(13))
    assert chosen_by == [*range(8), 8, 10, 12]
    assert unseen == [9, 11]
    assert set_aside(range(3)) == ([0, 1, 2], [])


@pytest.fixture(scope="module")
def fitted():
    net, data = learnt()
    random, modes = torch.get_rng_state(), [module.training for module in net.modules()]
    fit = fit_to_budget(net, parts.step, data, max_loss=0.2, metric=accuracy(), **PATIENT)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(modes)
    assert all(module.training for module in net.modules())
    return net, data, fit


@pytest.mark.slow
def test_the_metric_of_the_answer_is_that_of_the_model_as_the_user_gets_it(fitted):
    net, data, fit = fitted
    assert not fit.is_dense
    assert fit.metric.dense == 1.0
    assert fit.metric.n_batches == 1
    with torch.no_grad():
        found = float(right(net.eval(), data[3]))  # of four batches the one that nothing is fitted to
    net.train()
    assert fit.metric.chosen == pytest.approx(found)
    assert fit.metric.drop == pytest.approx(1.0 - found)
    assert fit.metric.drop <= 0.2


@pytest.mark.slow
def test_the_account_names_the_metric_and_is_read_again(fitted):
    fit = fitted[2]
    chosen = next(row for row in fit.considered if row.is_chosen)
    assert chosen.metric == fit.metric.chosen
    assert f"In the metric: MulticlassAccuracy 1.0000 dense, {fit.metric.chosen:.4f} chosen on 1 batch" in str(fit)
    again = BudgetFit.from_json(fit.to_json())
    assert again.metric == fit.metric
    assert again.considered == fit.considered
    assert str(again) == str(fit)


def size(net, _batch):
    return float(sum(p.numel() for p in net.parameters()))


@pytest.mark.slow
def test_where_nothing_may_be_lost_the_answer_is_dense_and_found_soon(monkeypatch):
    refined = []
    monkeypatch.setattr(trials.Bench, "refined", lambda _, trial: refined.append(trial) or trial)
    net, data = learnt()
    fit = fit_to_budget(net, parts.step, data, max_loss=0, metric=size, **PATIENT)
    assert fit.is_dense
    assert fit.metric.drop == 0.0
    assert refined == []


@pytest.mark.slow
def test_what_no_candidate_keeps_to_is_said_with_the_least_drop(monkeypatch):
    monkeypatch.setattr(trials.Bench, "refined", lambda _, trial: trial)
    net, data = learnt()
    most = 0.5 * size(net, None)
    with pytest.raises(InfeasibleBudgetError, match=r"The least drop of size .* write max_loss="):
        fit_to_budget(net, parts.step, data, SMALL, max_loss=most, metric=size, **PATIENT)
    assert size(net, None) == 2 * most
