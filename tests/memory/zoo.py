"""Nets of every kind, small enough to run on one core: what the exactness battery runs through."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[nn.Module], Tensor]
Made = tuple[nn.Module, Step]
ZOO: dict[str, Callable[[], Made]] = {}


def build(name: str) -> Made:
    """A net of the zoo, in training mode, and its step: from the net to a scalar loss."""
    torch.manual_seed(0)
    model, step = ZOO[name]()
    return model.train(), step


def _first(out: Any) -> Tensor:
    """The loss of whatever a net returns: all of its outputs count."""
    tensors = [out] if isinstance(out, Tensor) else list(out.values() if isinstance(out, dict) else out)
    return sum((t * t).mean() for t in tensors if isinstance(t, Tensor))


def _narrow(net: nn.Module) -> nn.Module:
    """VGG's and AlexNet's classifiers hold most of their weights and of their time; a narrow one has the same ops."""
    if isinstance(getattr(net, "classifier", None), nn.Sequential) and len(net.classifier) >= 6:
        for index, layer in enumerate(net.classifier):
            if isinstance(layer, nn.Linear):
                first = layer.in_features > 4096
                net.classifier[index] = nn.Linear(layer.in_features if first else 32, 32)
    return net


def _vision(name: str, size: tuple[int, ...], batch: int = 2, **options: Any) -> None:
    def make() -> Made:
        models = import_module("torchvision.models")
        net = _narrow(models.get_model(name, **options))
        images = torch.randn(batch, 3, *size)
        return net, lambda net: _first(net(images))

    ZOO[name] = make


_SMALL = {"num_classes": 10}
for _name, _pixels in {
    "alexnet": 64, "vgg11_bn": 32, "vgg16": 32, "resnet18": 64, "resnet50": 32, "resnext50_32x4d": 32,
    "squeezenet1_0": 48, "densenet121": 32, "shufflenet_v2_x0_5": 64, "mobilenet_v2": 32,
    "mobilenet_v3_small": 64, "mobilenet_v3_large": 32, "mnasnet0_5": 64, "regnet_x_400mf": 32, "regnet_y_400mf": 32,
    "efficientnet_b0": 32, "efficientnet_v2_s": 32, "convnext_tiny": 32, "swin_t": 32, "swin_v2_t": 32,
}.items():  # fmt: skip
    _vision(_name, (_pixels, _pixels), **_SMALL)
_vision("googlenet", (64, 64), aux_logits=True, init_weights=False, **_SMALL)
_vision("inception_v3", (80, 80), aux_logits=False, init_weights=False, **_SMALL)
for _name in ("fcn_resnet50", "deeplabv3_resnet50"):
    _vision(_name, (32, 32), weights_backbone=None, aux_loss=True, **_SMALL)
for _name in ("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"):
    _vision(_name, (64, 64), weights_backbone=None, **_SMALL)
for _name in ("r3d_18", "mc3_18", "r2plus1d_18"):
    _vision(_name, (4, 24, 24), **_SMALL)
_vision("swin3d_t", (4, 32, 32), **_SMALL)


def _small_vit() -> Made:
    from torchvision.models.vision_transformer import VisionTransformer

    net = VisionTransformer(32, 8, 3, 4, 64, 128, dropout=0.1, attention_dropout=0.1, num_classes=10)
    images = torch.randn(2, 3, 32, 32)
    return net, lambda net: _first(net(images))


ZOO["vision_transformer"] = _small_vit


def _small_s3d() -> Made:
    net = import_module("torchvision.models").get_model("s3d", **_SMALL)
    net.avgpool, clips = nn.AdaptiveAvgPool3d(1), torch.randn(2, 3, 8, 32, 32)
    return net, lambda net: _first(net(clips))


ZOO["s3d"] = _small_s3d


def _small_maxvit() -> Made:
    from torchvision.models.maxvit import MaxVit

    net = MaxVit(
        (64, 64), 16, 2, [16, 32], [1, 2], 16, stochastic_depth_prob=0.2, attention_dropout=0.1, num_classes=10
    )
    images = torch.randn(2, 3, 64, 64)
    return net, lambda net: _first(net(images))


ZOO["maxvit"] = _small_maxvit


def _language(name: str, config: str, model: str, **options: Any) -> None:
    def make() -> Made:
        transformers = import_module("transformers")
        net = getattr(transformers, model)(getattr(transformers, config)(**options))
        words = torch.randint(3, 90, (2, 16))
        return net, lambda net: net(input_ids=words, labels=words).loss

    ZOO[name] = make


_language(
    "gpt2", "GPT2Config", "GPT2LMHeadModel", vocab_size=100, n_positions=32, n_embd=32, n_layer=3, n_head=4,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_SIZES = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
_language("bert", "BertConfig", "BertForMaskedLM", num_hidden_layers=3, max_position_embeddings=32, **_SIZES)
_language(
    "t5", "T5Config", "T5ForConditionalGeneration", vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2,
    num_heads=4, decoder_start_token_id=0,
)  # fmt: skip
_language(
    "llama", "LlamaConfig", "LlamaForCausalLM", num_hidden_layers=3, num_key_value_heads=2, attention_dropout=0.1,
    **_SIZES,
)  # fmt: skip
_language(
    "mixtral", "MixtralConfig", "MixtralForCausalLM", num_hidden_layers=2, num_key_value_heads=2, num_local_experts=4,
    attention_dropout=0.1, output_router_logits=True, **_SIZES,
)  # fmt: skip
_language(
    "opt", "OPTConfig", "OPTForCausalLM", vocab_size=100, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64,
    num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=32,
)  # fmt: skip
_language(
    "bart", "BartConfig", "BartForConditionalGeneration", vocab_size=100, d_model=32, encoder_layers=2,
    decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_attention_heads=4, decoder_attention_heads=4,
    max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
    forced_eos_token_id=2,
)  # fmt: skip


def _hugging_vit() -> Made:
    transformers = import_module("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    net, images, labels = (
        transformers.ViTForImageClassification(config),
        torch.randn(2, 3, 16, 16),
        torch.tensor([0, 1]),
    )
    return net, lambda net: net(pixel_values=images, labels=labels).loss


ZOO["vit"] = _hugging_vit


def _recurrent(kind: type[nn.RNNBase]) -> Made:
    net, sequence = kind(8, 16, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True), torch.randn(3, 12, 8)
    return net, lambda net: (net(sequence)[0] ** 2).mean()


ZOO["lstm"] = lambda: _recurrent(nn.LSTM)
ZOO["gru"] = lambda: _recurrent(nn.GRU)
