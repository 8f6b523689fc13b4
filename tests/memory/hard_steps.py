"""Training steps that are hard on an engine below autograd: one small model and one step each, by name.

A maker returns the model, its step (from the model to a scalar loss) and, where it is not ``loss.backward()``, what is
done with the loss.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, rnn, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from tests.memory.harness import noise
from tests.memory.programs import IMAGES, X, mlp

Step = Callable[[nn.Module], Tensor]
Made = tuple[nn.Module, Step] | tuple[nn.Module, Step, Callable[[Tensor], None]]
HARD: dict[str, Callable[[], Made]] = {}
TOKENS = torch.arange(24).view(4, 6) % 11
SEQUENCE = noise(4, 6, 16, seed=3)
LABELS = torch.arange(6) % 4


def hard(make: Callable[[], Made]) -> Callable[[], Made]:
    """Enter a maker under its name."""
    HARD[make.__name__] = make
    return make


def convs(*last: nn.Module, norm: Callable[[int], nn.Module] = nn.BatchNorm2d, inplace: bool = True) -> nn.Sequential:
    """A small convolutional net."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(inplace=inplace), nn.Conv2d(8, 8, 3, padding=1), norm(8),
        nn.ReLU(inplace=inplace), *last,
    )  # fmt: skip


def on_images(net: nn.Module) -> Tensor:
    return net(IMAGES).square().mean()


def on_rows(net: nn.Module) -> Tensor:
    return net(X).exp().mean()


class Model(nn.Module):
    """A body, a head and a buffer; steps use them as they like."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.body = mlp(*[16] * depth, width)
        self.head = mlp(width, 16, 16, 4)
        self.register_buffer("state", torch.linspace(0.5, 1.5, width))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def simple(name: str, net: Callable[[], nn.Module], step: Step) -> None:
    """Enter a step that needs no more than a line."""
    HARD[name] = lambda: (net(), step)


# -- numbers, shapes, layouts -----------------------------------------------------------------------------------------

simple("float64", lambda: convs().double(), lambda net: net(IMAGES.double()).square().mean())
simple("bfloat16", lambda: convs().bfloat16(), lambda net: net(IMAGES.bfloat16()).float().square().mean())
simple(
    "conv1d",
    lambda: nn.Sequential(nn.Conv1d(16, 8, 3), nn.GELU(), nn.Conv1d(8, 4, 2)),
    lambda net: net(SEQUENCE.mT).square().mean(),
)
simple(
    "conv3d",
    lambda: nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2)),
    lambda net: net(IMAGES.view(1, 3, 4, 12, 12)).square().mean(),
)
simple("transposed_conv", lambda: convs(nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Sigmoid()), on_images)
simple(
    "depthwise_and_dilated",
    lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.SiLU(), nn.Conv2d(6, 6, 3, dilation=2), nn.Hardswish()),
    on_images,
)
simple("pixel_shuffle", lambda: convs(nn.PixelShuffle(2), nn.PixelUnshuffle(2)), on_images)
simple("pooling_kinds", lambda: convs(nn.AvgPool2d(2), nn.LPPool2d(2, 2), nn.AdaptiveMaxPool2d(2)), on_images)
simple("padding_kinds", lambda: convs(nn.ReflectionPad2d(1), nn.ReplicationPad2d(1), nn.CircularPad2d(1)), on_images)
simple("upsampling", lambda: convs(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 2, 3)), on_images)
simple("local_response_norm", lambda: convs(nn.LocalResponseNorm(2)), on_images)
simple("an_empty_batch", lambda: mlp(16, 16, 4), lambda net: net(X[:0]).sum() + net(X).sum())
simple("a_batch_of_one", lambda: mlp(16, 16, 1), lambda net: net(X[:1]).sum())
simple(
    "broadcasts_and_expands",
    lambda: mlp(16, 16),
    lambda net: (net(X).unsqueeze(1) * net(X).unsqueeze(0).expand(6, 6, 16)).exp().mean(),
)
simple(
    "einsum_and_bmm",
    lambda: mlp(16, 16),
    lambda net: torch.einsum("bi,bj->bij", net(X), net(X)).bmm(X.unsqueeze(-1)).sin().sum(),
)
simple("sort_topk_cumsum", lambda: mlp(16, 16), lambda net: net(X).sort(1).values.cumsum(1).topk(3).values.exp().sum())
simple(
    "gather_and_scatter",
    lambda: mlp(16, 4),
    lambda net: (
        net(X).gather(1, LABELS[:, None]).exp().sum()
        + torch.zeros(6, 4).scatter_add(1, LABELS[:, None].expand(6, 4), net(X)).sin().sum()
    ),
)
simple("indexing_by_mask", lambda: mlp(16, 16), lambda net: net(X)[X > 0].exp().sum())
simple(
    "where_with_nan_unused",
    lambda: mlp(16, 16),
    lambda net: torch.where(X > 0, net(X).exp(), net(X).abs().log1p()).sum(),
)
simple("fft_and_complex", lambda: mlp(16, 16), lambda net: (torch.fft.rfft(net(X)) * 1j).abs().sum())
simple(
    "views_of_another_dtype",
    lambda: mlp(16, 16),
    lambda net: net(X).sin().detach().view(torch.int32).float().mean() + net(X).exp().sum(),
)
simple("as_strided", lambda: mlp(16, 16), lambda net: net(X).exp().as_strided((5, 16), (16, 1), 16).sin().sum())
simple("unfold_and_fold", lambda: convs(nn.Unfold(3), nn.Fold((12, 12), 3)), lambda net: net(IMAGES).square().mean())
simple(
    "sparse_product",
    lambda: mlp(16, 16),
    lambda net: torch.sparse.mm(torch.eye(6).to_sparse(), net(X).exp()).sin().sum(),
)
simple("embedding_bag", lambda: nn.EmbeddingBag(11, 8, mode="mean"), lambda net: net(TOKENS).exp().sum())
simple(
    "sparse_embedding_lookup",
    lambda: nn.Sequential(nn.Embedding(11, 16, padding_idx=0), mlp(16, 16)),
    lambda net: net(TOKENS).exp().mean(),
)
simple(
    "linear_algebra", lambda: mlp(16, 6), lambda net: torch.linalg.cholesky(net(X) @ net(X).mT + torch.eye(6)).logdet()
)


@hard
def channels_last() -> Made:
    images = IMAGES.to(memory_format=torch.channels_last)
    return convs().to(memory_format=torch.channels_last), lambda net: net(images).square().mean()


@hard
def autocast_to_bfloat16() -> Made:
    def step(net: nn.Module) -> Tensor:
        with torch.autocast(X.device.type, dtype=torch.bfloat16):
            return net(IMAGES).float().square().mean()

    return convs(nn.Flatten(), nn.Linear(8 * 144, 4)), step


@hard
def grid_sampling() -> Made:
    grid = noise(4, 5, 5, 2, seed=0).tanh()
    return convs(), lambda net: F.grid_sample(net(IMAGES), grid, align_corners=False).square().mean()


@hard
def pooling_with_indices() -> Made:
    def step(net: nn.Module) -> Tensor:
        pooled, places = F.max_pool2d(net(IMAGES), 2, return_indices=True)
        return F.max_unpool2d(pooled.exp(), places, 2).square().mean()

    return convs(), step


# -- norms and parametrizations ---------------------------------------------------------------------------------------

simple("batch_norm", convs, on_images)
simple("batch_norm_averaging_all", lambda: convs(norm=lambda n: nn.BatchNorm2d(n, momentum=None)), on_images)
simple("batch_norm_without_weights", lambda: convs(norm=lambda n: nn.BatchNorm2d(n, affine=False)), on_images)
simple(
    "batch_norm_without_statistics",
    lambda: convs(norm=lambda n: nn.BatchNorm2d(n, track_running_stats=False)),
    on_images,
)
simple(
    "instance_norm_with_statistics",
    lambda: convs(norm=lambda n: nn.InstanceNorm2d(n, affine=True, track_running_stats=True)),
    on_images,
)
simple("group_norm", lambda: convs(norm=lambda n: nn.GroupNorm(2, n)), on_images)
simple(
    "layer_and_rms_norm",
    lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.RMSNorm(16), nn.Linear(16, 4)),
    on_rows,
)
simple(
    "spectral_norm",
    lambda: nn.Sequential(*[parametrizations.spectral_norm(nn.Linear(16, 16)) for _ in range(3)], nn.Tanh()),
    on_rows,
)
simple(
    "weight_norm",
    lambda: nn.Sequential(*[parametrizations.weight_norm(nn.Linear(16, 16)) for _ in range(3)], nn.Tanh()),
    on_rows,
)
simple(
    "spectral_and_weight_norm_of_convs",
    lambda: nn.Sequential(
        parametrizations.spectral_norm(nn.Conv2d(3, 8, 3)),
        nn.LeakyReLU(0.1, True),
        parametrizations.weight_norm(nn.Conv2d(8, 8, 3)),
        nn.LeakyReLU(0.1, True),
    ),
    lambda net: (net(IMAGES) - net(IMAGES.flip(0))).square().mean(),
)
simple(
    "orthogonal_weights",
    lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 4)),
    on_rows,
)
simple(
    "weights_normed_by_hooks",
    lambda: nn.Sequential(spectral_norm(nn.Linear(16, 16)), nn.Tanh(), weight_norm(nn.Linear(16, 16)), nn.Tanh()),
    on_rows,
)
simple(
    "convs_normed_by_hooks",
    lambda: nn.Sequential(spectral_norm(nn.Conv2d(3, 8, 3)), nn.LeakyReLU(0.1, True), weight_norm(nn.Conv2d(8, 8, 3))),
    lambda net: (net(IMAGES) - net(IMAGES.flip(0))).square().mean(),
)
simple(
    "pruned_weights",
    lambda: nn.Sequential(prune.l1_unstructured(nn.Linear(16, 16), "weight", 0.5), nn.Tanh(), nn.Linear(16, 4)),
    on_rows,
)


class Symmetric(nn.Module):
    """A parametrization of a user's own."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


@hard
def two_parametrizations_of_one_weight() -> Made:
    layer = nn.Linear(16, 16)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(parametrizations.spectral_norm(layer), nn.Tanh(), nn.Linear(16, 4)), on_rows


@hard
def a_parametrization_that_is_cached() -> Made:
    def step(net: nn.Module) -> Tensor:
        with parametrize.cached():
            return (net(X) + net(2 * X)).square().mean()

    return nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 16)), nn.Tanh()), step


@hard
def a_frozen_batch_norm() -> Made:
    def step(net: nn.Module) -> Tensor:
        net[1].eval()
        return on_images(net)

    return convs(), step


@hard
def weight_standardisation() -> Made:
    def step(net: nn.Module) -> Tensor:
        weight = net[0].weight
        mean, std = weight.mean((1, 2, 3), keepdim=True), weight.std((1, 2, 3), keepdim=True)
        return net[1:](F.conv2d(IMAGES, (weight - mean) / (std + 1e-5), net[0].bias, padding=1)).square().mean()

    return convs(), step


# -- random numbers ---------------------------------------------------------------------------------------------------

simple(
    "dropout_kinds",
    lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(16, 4)),
    on_rows,
)
simple("dropout_of_channels", lambda: convs(nn.Dropout2d(0.5), nn.Conv2d(8, 4, 3)), on_images)
simple("random_slopes", lambda: nn.Sequential(nn.Linear(16, 16), nn.RReLU(), nn.Linear(16, 4)), on_rows)
simple("noise", lambda: mlp(16, 16, 16), lambda net: net[3:](net[:3](X) + 0.1 * torch.randn(6, 16)).exp().mean())
simple("gumbel_softmax", lambda: mlp(16, 16, 4), lambda net: F.gumbel_softmax(net(X), hard=True).mul(net(X)).sum())
simple(
    "sampled_labels",
    lambda: mlp(16, 16, 4),
    lambda net: F.cross_entropy(net(X), net(X).softmax(1).detach().multinomial(1)[:, 0]),
)
simple("stochastic_depth", lambda: nn.ModuleList([mlp(16, 16) for _ in range(6)]), lambda net: sum_of_some(net))


def sum_of_some(net: nn.Module) -> Tensor:
    hidden = X
    for block in net:
        if torch.rand(()) < 0.7:
            hidden = hidden + block(hidden)
    return hidden.exp().mean() + 0 * sum(p.sum() for p in net.parameters())


@hard
def a_generator_of_its_own() -> Made:
    def step(net: nn.Module) -> Tensor:
        noise = torch.randn(6, 16, generator=torch.Generator(X.device).manual_seed(5))
        return net(X + noise).exp().mean()

    return mlp(16, 16, 16), step


@hard
def python_s_random_numbers() -> Made:
    def step(net: nn.Module) -> Tensor:
        scale = random.Random(3).random()
        return net(X * scale).exp().mean()

    return mlp(16, 16, 16), step


# -- recurrent nets and attention -------------------------------------------------------------------------------------

simple("lstm", lambda: nn.LSTM(16, 8, 2, batch_first=True, dropout=0.2), lambda net: net(SEQUENCE)[0].square().mean())
simple("gru_both_ways", lambda: nn.GRU(16, 8, bidirectional=True), lambda net: net(SEQUENCE)[0].exp().mean())
simple(
    "attention",
    lambda: nn.MultiheadAttention(16, 4, batch_first=True),
    lambda net: net(SEQUENCE, SEQUENCE, SEQUENCE)[0].square().mean(),
)
simple(
    "attention_with_dropout",
    lambda: nn.MultiheadAttention(16, 4, dropout=0.3, batch_first=True),
    lambda net: net(SEQUENCE, SEQUENCE, SEQUENCE, need_weights=False)[0].square().mean(),
)
simple(
    "encoder_layer",
    lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
    lambda net: net(SEQUENCE).square().mean(),
)
simple(
    "encoder_layer_norm_first",
    lambda: nn.TransformerEncoderLayer(16, 4, 32, 0.0, "gelu", batch_first=True, norm_first=True),
    lambda net: net(SEQUENCE).square().mean(),
)
simple(
    "decoder_layer",
    lambda: nn.TransformerDecoderLayer(16, 4, 32, batch_first=True),
    lambda net: net(SEQUENCE, SEQUENCE.flip(0)).square().mean(),
)


@hard
def cells_in_a_loop() -> Made:
    def step(net: nn.Module) -> Tensor:
        hidden = cell = torch.zeros(4, 8)
        for item in SEQUENCE.unbind(1):
            hidden, cell = net(item, (hidden, cell))
        return hidden.square().mean()

    return nn.LSTMCell(16, 8), step


@hard
def packed_sequences() -> Made:
    def step(net: nn.Module) -> Tensor:
        packed = rnn.pack_padded_sequence(SEQUENCE, torch.tensor([6, 5, 3, 1], device="cpu"), batch_first=True)
        return rnn.pad_packed_sequence(net(packed)[0])[0].square().mean()

    return nn.RNN(16, 8, batch_first=True), step


@hard
def causal_attention_with_a_mask_and_rotations() -> Made:
    def step(net: nn.Module) -> Tensor:
        q, k, v = net.body(SEQUENCE).view(4, 6, 2, 8).transpose(1, 2), SEQUENCE.view(4, 2, 6, 8), None
        angles = torch.arange(6)[:, None] * net.state[:4]
        q = torch.cat((q[..., :4] * angles.cos() - q[..., 4:] * angles.sin(), q[..., 4:] * angles.cos()), -1)
        v = F.scaled_dot_product_attention(q, k, q.exp(), is_causal=True)
        scores = (q @ k.mT).masked_fill(torch.ones(6, 6).triu(1).bool(), -1e9).softmax(-1)
        return net.head((v + scores @ v).transpose(1, 2).reshape(4, 6, 16)).square().mean()

    return Model(), step


# -- writes in place --------------------------------------------------------------------------------------------------


@hard
def in_place_chains() -> Made:
    return mlp(16, 16), lambda net: (net(X) * 2).add_(1).relu_().sin().mul_(2).sub_(0.1).sum()


@hard
def writes_through_views() -> Made:
    def step(net: nn.Module) -> Tensor:
        hidden = net.body(X).clone()
        hidden[:, 0] = 1.0
        hidden[1:3].mul_(2)
        hidden.view(-1)[::3].add_(0.5)
        return net.head(hidden.masked_fill_(X > 1, 0.0)).exp().mean()

    return Model(), step


@hard
def a_preallocated_output() -> Made:
    def step(net: nn.Module) -> Tensor:
        out = torch.zeros(6, 16)
        for row, item in enumerate(X):
            out[row] = net.body(item[None])[0]
        return net.head(out).exp().mean()

    return Model(), step


@hard
def out_arguments_and_foreach() -> Made:
    def step(net: nn.Module) -> Tensor:
        with torch.no_grad():
            torch.add(net.state, 1.0, out=net.state)
            torch._foreach_mul_([net.state], 0.5)
        return net.head(net.body(X) + net.state).exp().mean()

    return Model(), step


@hard
def index_writes() -> Made:
    def step(net: nn.Module) -> Tensor:
        hidden = net.body(X)
        table = torch.zeros(4, 16).index_add_(0, LABELS, hidden).index_copy(0, torch.tensor([1]), hidden[:1])
        return net.head(table.index_put((torch.tensor([0, 2]),), hidden[:2], accumulate=True)).exp().mean()

    return Model(), step


@hard
def a_moving_average_in_a_buffer() -> Made:
    def step(net: nn.Module) -> Tensor:
        hidden = net.body(X)
        shifted = (hidden + net.state).exp()
        with torch.no_grad():
            net.state.lerp_(hidden.mean(0), 0.1)
            net.count += 1
        return net.head(shifted + net.state).exp().mean()

    return Model(), step


@hard
def a_queue_in_a_buffer() -> Made:
    def step(net: nn.Module) -> Tensor:
        hidden = net.body(X)
        loss = net.head(hidden).mean() + (hidden @ net.queue.clone().T).exp().mean()
        with torch.no_grad():
            net.queue[int(net.count) : int(net.count) + 6] = hidden
            net.count.add_(6)
        return loss

    net = Model()
    net.register_buffer("queue", torch.ones(32, 16))
    return net, step


@hard
def a_codebook_with_a_straight_through_gradient() -> Made:
    def step(net: nn.Module) -> Tensor:
        hidden = net.body(X)
        nearest = torch.cdist(hidden, net.book).argmin(1)
        chosen = net.book[nearest]
        with torch.no_grad():
            net.book.index_add_(0, nearest, hidden, alpha=0.01)
        return net.head(hidden + (chosen - hidden).detach()).exp().mean() + F.mse_loss(hidden, chosen)

    net = Model()
    net.register_buffer("book", noise(5, 16, seed=1))
    return net, step


@hard
def a_write_through_data() -> Made:
    def step(net: nn.Module) -> Tensor:
        shifted = (net.body(X) + net.state).exp()
        net.state.data.mul_(1.5)
        return net.head(shifted + net.state).exp().mean()

    return Model(), step


@hard
def data_that_is_exchanged() -> Made:
    def step(net: nn.Module) -> Tensor:
        kept = torch.ones(6, 16)
        shifted = (net.body(X) + kept).exp()
        kept.data = torch.zeros(6, 16)
        return net.head(shifted + kept).exp().mean()

    return Model(), step


# -- teachers and blocks without gradients ----------------------------------------------------------------------------


class Taught(Model):
    """A model with a teacher of its body that moves after it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = mlp(16, 16, 16, 16).requires_grad_(False)

    def follow(self) -> None:
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.body.parameters(), strict=False):
                mine.lerp_(other, 0.1)


def taught_step(net: nn.Module) -> Tensor:
    hidden = net.body(X)
    with torch.no_grad():
        target = net.teacher(X).tanh()
    return F.mse_loss(hidden, target) + net.head(hidden).exp().mean()


@hard
def a_teacher() -> Made:
    return Taught(), taught_step


@hard
def a_teacher_that_follows_after() -> Made:
    def step(net: nn.Module) -> Tensor:
        loss = taught_step(net)
        net.follow()
        return loss

    return Taught(), step


@hard
def a_teacher_that_follows_before() -> Made:
    def step(net: nn.Module) -> Tensor:
        net.follow()
        return taught_step(net)

    return Taught(), step


def inferring(mode: bool) -> Made:
    def step(net: nn.Module) -> Tensor:
        hidden = net.body(X)
        with torch.inference_mode(mode):
            target = net.teacher(X) * torch.ones(16)
            net.head(torch.zeros(2, 16))
        return net.head(hidden + target.clone().detach() + torch.zeros(16)).exp().mean()

    return Taught(), step


HARD["inference_mode"] = lambda: inferring(True)
HARD["inference_mode_that_is_off"] = lambda: inferring(False)


@hard
def gradients_on_inside_off() -> Made:
    def step(net: nn.Module) -> Tensor:
        with torch.no_grad():
            hidden = net.body(X)
            with torch.enable_grad():
                hidden = net.body[:3](X)
        return net.head(hidden).exp().mean() + 0 * sum(p.sum() for p in net.body.parameters())

    return Model(), step


# -- the graph --------------------------------------------------------------------------------------------------------

simple("a_module_twice", lambda: mlp(16, 16), lambda net: net(net(net(X))).exp().mean())
simple(
    "tied_weights", lambda: nn.Embedding(11, 16), lambda net: (net(TOKENS).tanh() @ net.weight.T).logsumexp(-1).mean()
)
simple("a_deep_chain", lambda: nn.Sequential(*[nn.Linear(16, 16) for _ in range(60)]), on_rows)
simple("residual_sums", lambda: nn.ModuleList([mlp(16, 16) for _ in range(5)]), lambda net: residual(net).exp().mean())
simple(
    "experts",
    lambda: nn.ModuleList([mlp(16, 16) for _ in range(4)]),
    lambda net: torch.stack([net[int(k)](x[None])[0] for x, k in zip(X, LABELS, strict=True)]).exp().mean(),
)
simple(
    "a_branch_on_data",
    lambda: Model(),
    lambda net: net.head(net.body(X) * 2 if net.body(X).sum() > 0 else net.body(X).sin()).exp().mean(),
)
simple(
    "ctc_loss",
    lambda: mlp(16, 5),
    lambda net: F.ctc_loss(
        net(SEQUENCE.transpose(0, 1)).log_softmax(-1),
        torch.ones(4, 2, dtype=torch.long),
        torch.full((4,), 6),
        torch.full((4,), 2),
    ),
)
simple(
    "many_losses",
    lambda: mlp(16, 16, 4),
    lambda net: (
        F.cross_entropy(net(X), LABELS, label_smoothing=0.1)
        + F.huber_loss(net(X), X[:, :4])
        + F.kl_div(net(X).log_softmax(1), X[:, :4].softmax(1))
        + F.triplet_margin_loss(net(X), X[:, :4], X[:, 4:8])
    ),
)


def residual(net: nn.Module) -> Tensor:
    hidden = X
    for block in net:
        hidden = hidden + block(hidden)
    return hidden


@hard
def frozen_layers_and_unused_outputs() -> Made:
    net = Model()
    net.body[0].requires_grad_(False)

    def step(net: nn.Module) -> Tensor:
        hidden = net.body(X)
        net.head(hidden).exp()
        return net.head(hidden * 2).exp().mean()

    return net, step


def checkpointed(use_reentrant: bool) -> Made:
    def step(net: nn.Module) -> Tensor:
        hidden = net.body(X)
        return net.head(checkpoint(net.body, hidden, use_reentrant=use_reentrant)).exp().mean()

    return Model(), step


HARD["checkpoint_inside"] = lambda: checkpointed(False)
HARD["reentrant_checkpoint_inside"] = lambda: checkpointed(True)


@hard
def hooks_for_saved_tensors_inside() -> Made:
    def step(net: nn.Module) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
            hidden = net.body(X).exp()
        with torch.autograd.graph.save_on_cpu():
            return net.head(hidden).exp().mean()

    return Model(), step


@hard
def hooks_on_tensors_and_modules() -> Made:
    net = Model()
    net.head[0].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 2,))
    net.body[0].register_forward_hook(lambda module, args, out: out * 1.5)

    def step(net: nn.Module) -> Tensor:
        hidden = net.body(X)
        hidden.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
        return net.head(hidden).exp().mean()

    return net, step


def doubled(buffer: Tensor) -> None:
    buffer.mul_(2)


@hard
def a_backward_hook_that_writes_a_buffer() -> Made:
    net = Model()
    net.head.register_full_backward_hook(lambda *_: doubled(net.state))
    return net, lambda net: net.head((net.body(X) + net.state).exp()).exp().mean()


class Cube(torch.autograd.Function):
    """Saves its input and its output and holds a product as a plain attribute."""

    @staticmethod
    def forward(ctx, x):
        out = x**3
        ctx.save_for_backward(x, out)
        ctx.square = x * x
        return out

    @staticmethod
    def backward(ctx, grad):
        x, out = ctx.saved_tensors
        return grad * 3 * ctx.square + 0 * out * x


@hard
def a_function_of_the_program() -> Made:
    return Model(), lambda net: net.head(Cube.apply(net.body(X)).exp()).exp().mean()


@hard
def a_gradient_penalty() -> Made:
    def step(net: nn.Module) -> Tensor:
        inputs = X.clone().requires_grad_()
        score = net(inputs)
        (grad,) = torch.autograd.grad(score.sum(), inputs, create_graph=True)
        return score.mean() + (grad.norm(dim=1) - 1).square().mean()

    return mlp(16, 16, 1), step


@hard
def a_graph_that_is_retained() -> Made:
    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    return convs(), on_images, twice


@hard
def a_backward_through_the_backward() -> Made:
    net = mlp(16, 16, 1)

    def penalty(loss: Tensor) -> None:
        grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        (loss + sum(g.square().sum() for g in grads)).backward()

    return net, lambda net: net(X).square().mean(), penalty


@hard
def weights_that_move_between_two_backwards() -> Made:
    """Sharpness-aware minimization: up the gradient, and down from there."""

    def step(net: nn.Module) -> Tensor:
        on_images(net).backward()
        weights = list(net.parameters())
        with torch.no_grad():
            norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
            moves = [weight.grad * (0.05 / norm) for weight in weights]
            for weight, move in zip(weights, moves, strict=True):
                weight.add_(move)
        net.zero_grad()
        loss = on_images(net)
        with torch.no_grad():
            for weight, move in zip(weights, moves, strict=True):
                weight.data.sub_(move)
        return loss

    return convs(), step


@hard
def vmap_over_a_functional_call() -> Made:
    def step(net: nn.Module) -> Tensor:
        weights = {name: p * 1.5 for name, p in net.named_parameters()}
        return torch.vmap(lambda row: torch.func.functional_call(net, weights, (row[None],)))(X).exp().mean()

    return mlp(16, 16), step


@hard
def cond() -> Made:
    def step(net: nn.Module) -> Tensor:
        hidden = net.body(X)
        return net.head(torch.cond(hidden.sum() > 0, torch.sin, torch.cos, (hidden,))).exp().mean()

    return Model(), step


@hard
def an_exception_that_is_caught() -> Made:
    def step(net: nn.Module) -> Tensor:
        hidden = net.body(X)
        try:
            net.head(hidden[:, :3])
        except RuntimeError:
            hidden = hidden.exp()
        return net.head(hidden).exp().mean()

    return Model(), step
