"""Layers without outputs: what is asked of these is answered as by the real ones, up to rounding."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ctdr_lightning.decomposition import decompose
from ctdr_lightning.memory.lazy import chunked_loss
from ctdr_lightning.memory.lazy.heads import LazyHeads
from ctdr_lightning.memory.lazy.logits import Logits

CLASSES, WIDTH, BATCH, LENGTH = 1003, 16, 4, 160


class Model(nn.Module):
    """Tokens to scores."""

    def __init__(self, *, tied=False, bias=True):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def hidden(self, tokens):
        return torch.tanh(self.body(self.embedding(tokens)))

    def forward(self, tokens):
        return self.head(self.hidden(tokens))


def flat(z, y):
    return F.cross_entropy(z.view(-1, CLASSES), y.view(-1))


def shifted(z, y):
    return F.cross_entropy(z[:, :-1].contiguous().view(-1, z.size(-1)).float(), y[..., 1:].reshape(-1))


def smoothed(z, y):
    weights = torch.linspace(0.5, 2, CLASSES)
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), weight=weights, label_smoothing=0.1, reduction="sum")


def ignoring(z, y):
    return nn.CrossEntropyLoss(ignore_index=7)(z.reshape(BATCH * LENGTH, -1), torch.where(y < 300, 7, y).flatten())


def each(z, y):
    return (F.cross_entropy(z.transpose(1, 2), y, reduction="none") * torch.linspace(0, 1, LENGTH)).mean()


def soft(z, y):
    return F.cross_entropy(
        z.view(-1, CLASSES), F.one_hot(y.flatten(), CLASSES).to(z.dtype).softmax(1), label_smoothing=0.2
    )


def masked(z, y):
    return F.cross_entropy(z[y > 500], y[y > 500])


def one_sample(z, y):
    return F.cross_entropy(z[1], y[1]) + F.cross_entropy(z.permute(0, 2, 1)[2:], y[2:])


def with_accuracy(z, y):
    with torch.no_grad():
        right = (z.argmax(-1) == y).float().mean() + (z.detach().argmax(dim=2, keepdim=True)[..., 0] == y).sum()
    return flat(z, y) + 0 * right


def twice(z, y):
    return flat(z, y) + 0.5 * F.cross_entropy(z[:, 3:].reshape(-1, CLASSES), y[:, 3:].flatten())


def z_loss(z, y):
    return flat(z, y) + 1e-3 * z.logsumexp(-1).square().mean()


def by_hand(z, y):
    return F.nll_loss(z.log_softmax(-1).view(-1, CLASSES), y.view(-1))


def tempered(z, y):
    return flat(z / 1.5, y)


def written(z, y):
    view = z.view(-1, CLASSES)
    z[..., 3] = -5.0
    return F.cross_entropy(view, y.view(-1))


def written_after_a_copy(z, y):
    wide = z.float().contiguous() + 0 if z.dtype is torch.bfloat16 else z[y >= 0]
    z.mul_(0.5)
    return F.cross_entropy(wide.view(-1, CLASSES), y.view(-1)) + flat(z, y)


def in_classes(z, y):
    return F.cross_entropy(z[..., :500].reshape(-1, 500), y.clamp_max(499).view(-1))


def hooked(z, y):
    z.register_hook(lambda slope: slope * 2)
    return flat(z, y)


def retained(z, y):
    z.retain_grad()
    loss = flat(z, y)
    return loss + 0 * z.sum()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, slope):
        return slope * 2


def own_function(z, y):
    return flat(Double.apply(z), y)


def own_function_of_a_view(z, y):
    return F.cross_entropy(Double.apply(z.transpose(1, 2)), y)


def weights_learned(z, y):
    return F.cross_entropy(z.view(-1, CLASSES), z.detach().view(-1, CLASSES).softmax(1))


def joined(z, y):
    return F.cross_entropy(torch.cat([z, z], 0).view(-1, CLASSES), torch.cat([y, y]).view(-1))


def distilled(z, y):
    teacher = torch.linspace(-1, 1, CLASSES).softmax(0).expand(BATCH, LENGTH, CLASSES)
    return flat(z, y) + F.kl_div(z.log_softmax(-1), teacher, reduction="batchmean")


CHUNKED = [
    flat, shifted, smoothed, ignoring, each, soft, masked, one_sample, with_accuracy, twice,
]  # fmt: skip
MADE = [
    z_loss, by_hand, tempered, written, written_after_a_copy, in_classes, hooked, retained, own_function,
    own_function_of_a_view, weights_learned, joined, distilled,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(chunked_loss, "LEAST_OUTPUTS", 0)
    torch.manual_seed(0)


def gradients(model, loss_of, tokens, **options):
    model.zero_grad()
    with LazyHeads(model, **options) as heads:
        loss = loss_of(model(tokens), tokens)
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()], heads.outcomes.get("head")


def agree(found, wanted, tolerance=1e-6):
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine - theirs).norm()) <= tolerance * float(theirs.norm()) + 1e-12


@pytest.mark.parametrize("loss_of", [*CHUNKED, *MADE], ids=lambda f: f.__name__)
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"bias": False}], ids=str)
def test_losses_and_gradients_are_those_of_the_real_output(loss_of, options):
    model, tokens = Model(**options), torch.randint(CLASSES, (BATCH, LENGTH))
    wanted = gradients(model, loss_of, tokens, names=())
    found = gradients(model, loss_of, tokens)
    assert type(model(tokens)) is torch.Tensor
    if loss_of is soft:  # torch's own gradients are rounded by up to 6e-6 on an AMD EPYC, those of chunks by 8e-7
        wanted = gradients(model.double(), loss_of, tokens, names=())
    agree([found[0], *found[1]], [wanted[0], *wanted[1]])
    if loss_of in CHUNKED:
        assert found[2].chunks >= 1
        assert found[2].asked_by == ""
    elif "own_function" not in loss_of.__name__:  # which passes by every notice
        assert found[2].asked_by != ""


@pytest.mark.parametrize("loss_of", CHUNKED, ids=lambda f: f.__name__)
def test_autocast(loss_of):
    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))
    exact = gradients(model, loss_of, tokens, names=())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = gradients(model, loss_of, tokens, names=())
        found = gradients(model, loss_of, tokens)
    assert found[0].dtype == wanted[0].dtype
    for mine, theirs, true in zip(found[1], wanted[1], exact[1], strict=True):
        noise = float((theirs - true).norm())
        assert float((mine - true).norm()) <= 1.2 * noise + 1e-6 * float(true.norm())


@pytest.mark.parametrize("loss_of", [flat, each, soft], ids=lambda f: f.__name__)
def test_weights_in_16_bits(loss_of):
    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))
    exact = gradients(model, loss_of, tokens, names=())
    model.bfloat16()
    wanted, found = gradients(model, loss_of, tokens, names=()), gradients(model, loss_of, tokens)
    assert [g.dtype for g in found[1]] == [g.dtype for g in wanted[1]]
    for mine, theirs, true in zip(found[1], wanted[1], exact[1], strict=True):
        assert float((mine - true).norm()) <= 1.2 * float((theirs - true).norm())


def test_facts_are_known_without_the_output():
    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))
    with LazyHeads(model) as heads:
        z = model(tokens)
        assert isinstance(z, Logits)
        assert (z.shape, z.dim(), z.size(-1), z.numel()) == ((BATCH, LENGTH, CLASSES), 3, CLASSES, z.nelement())
        assert (z.dtype, z.device, z.requires_grad, len(z)) == (torch.float32, tokens.device, True, BATCH)
        assert z.float() is not None
        assert hash(z) == id(z)
    assert heads.outcomes["head"].asked_by == ""
    wanted = model(tokens)
    assert torch.equal(z.argmax(-1), wanted.argmax(-1))
    assert torch.equal(z, wanted)


def test_frozen_parts_have_no_gradients():
    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))
    model.head.requires_grad_(False)
    with LazyHeads(model) as heads:
        flat(model(tokens), tokens).backward()
    found = model.body.weight.grad.clone()
    assert model.head.weight.grad is None
    assert heads.outcomes["head"].chunks == 5
    model.zero_grad()
    flat(model(tokens), tokens).backward()
    agree([found], [model.body.weight.grad])


@pytest.mark.parametrize("loss_of", [flat, each], ids=lambda f: f.__name__)
def test_a_second_backward_needs_the_graph(loss_of):
    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))
    with LazyHeads(model):
        loss = loss_of(model(tokens), tokens)
    loss.backward(retain_graph=True)
    once = model.head.weight.grad.clone()
    loss.backward()
    agree([model.head.weight.grad], [2 * once])
    with pytest.raises(RuntimeError):
        loss.backward()


def test_all_ignored_is_not_a_number_as_in_torch():
    model, tokens = Model(), torch.full((BATCH, LENGTH), -100)
    with LazyHeads(model):
        loss = F.cross_entropy(model(tokens.abs()).view(-1, CLASSES), tokens.view(-1))
    assert loss.isnan()


def test_infinite_logits_of_ignored_rows_count_nothing():
    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))
    with torch.no_grad():
        model.head.bias[0] = -torch.inf
    targets = torch.where(tokens < 500, -100, tokens)

    def loss_of(z, y):
        return F.cross_entropy(z.view(-1, CLASSES), targets.view(-1))

    wanted, found = gradients(model, loss_of, tokens, names=()), gradients(model, loss_of, tokens)
    agree([found[0], *found[1]], [wanted[0], *wanted[1]])


def test_an_output_that_outlives_the_forward_is_made_before_the_weights_change():
    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))
    wanted = model(tokens)
    with LazyHeads(model) as heads:
        z = model(tokens)
        heads.settle()
    with torch.no_grad():
        model.head.weight.zero_()
    assert torch.equal(z + 0, wanted)
    assert heads.outcomes["head"].asked_by == "its own use after the forward"


def test_an_output_asked_for_after_the_weights_changed_is_refused():
    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))
    with LazyHeads(model):
        z = model(tokens)
    with torch.no_grad():
        model.head.weight.zero_()
    with pytest.raises(RuntimeError, match="rounding=False"):
        z.softmax(-1)
    with pytest.raises(RuntimeError, match="rounding=False"):
        flat(z, tokens)


def test_nothing_changes_in_evaluation_and_without_gradients():
    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))
    with LazyHeads(model):
        with torch.no_grad():
            assert type(model(tokens)) is torch.Tensor
        assert type(model.eval()(tokens)) is torch.Tensor


def test_a_checkpointed_head_runs_again():
    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))

    def loss_of(reentrant):
        model.zero_grad()
        return checkpoint(lambda h: flat(model.head(h), tokens), model.hidden(tokens), use_reentrant=reentrant)

    loss_of(False).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    for reentrant in (False, True):
        with LazyHeads(model):
            loss = loss_of(reentrant)
        loss.backward()
        agree([p.grad for p in model.parameters()], wanted)


def test_transforms_of_torch_func_see_real_outputs():
    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(weights):
        return flat(torch.func.functional_call(model, weights, (tokens,)), tokens)

    wanted = torch.func.grad(loss_of)(weights)
    with LazyHeads(model):
        found = torch.func.grad(loss_of)(weights)
    agree(found.values(), wanted.values())


def test_compiled_regions_are_left_alone():
    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))
    wanted = gradients(model, flat, tokens, names=())
    model.head.compile(backend="eager")
    found = gradients(model, flat, tokens)
    agree([found[0], *found[1]], [wanted[0], *wanted[1]])


def test_the_rest_may_be_compiled():
    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))
    wanted = gradients(model, flat, tokens, names=())
    torch._dynamo.reset()
    model.body.compile(backend="aot_eager")
    found = gradients(model, flat, tokens)
    assert found[2].chunks > 1
    agree([found[0], *found[1]], [wanted[0], *wanted[1]])


def test_a_factorized_head_leaves_the_output_of_its_last_factor_out():
    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))
    decompose(model, rank=8, method="svd", select="head", progress=False)
    wanted = gradients(model, flat, tokens, names=())
    with LazyHeads(model) as heads:
        model.zero_grad()
        loss = flat(model(tokens), tokens)
    loss.backward()
    (name,) = heads.names
    assert name.startswith("head.")
    assert heads.outcomes[name].chunks > 1
    agree([loss.detach(), *(p.grad for p in model.parameters())], [wanted[0], *wanted[1]], 3e-6)


def test_a_copy_made_within_a_step_has_its_own_weights():
    model, tokens = Model(), torch.randint(CLASSES, (BATCH, LENGTH))
    with LazyHeads(model):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.head.weight.zero_()
            twin.head.bias.zero_()
        assert not twin(tokens).any()


def test_layers_that_are_small_or_run_their_own_forward_are_left_alone():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = nn.ModuleDict({"own": Own(8, 2000), "small": nn.Linear(8, 100), "large": nn.Linear(8, 2000)})
    assert LazyHeads(model).names == ("large",)
    vars(model["large"])["forward"] = lambda x: x
    assert LazyHeads(model).names == ()


def test_state_dict_and_forwards_are_as_before():
    model = Model()
    keys = list(model.state_dict())
    with LazyHeads(model):
        assert list(model.state_dict()) == keys
    assert "forward" not in vars(model.head)


def test_an_error_in_the_step_leaves_the_model_as_it_was():
    model = Model()
    with pytest.raises(ValueError, match="somewhere"), LazyHeads(model):
        raise ValueError("somewhere")
    assert "forward" not in vars(model.head)
