"""Language models whose logits are never made: unchanged models of transformers and a plain one, by vocabulary.

One thread. *Lean* is the model's own step in ``LazyHeads``; *by hand* is the same backbone with torch's
``linear_cross_entropy`` in chunks, written for each model. Peaks are true ones by the profiler, weights and gradients
included; times are medians of thread time over rounds in which all take turns. Gradients are compared with the plain
step's, losses over 20 steps of SGD.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import Benchmark, table
from benchmarks.steps import in_turns, keep_freed_memory, step_peak_bytes
from benchmarks.vision_import import import_torchvision
from ctdr_lightning.memory.lazy.heads import LazyHeads

MIB = 2**20
WIDTH, LAYERS, HEADS, BATCH, TOKENS = 256, 4, 4, 8, 256
Step = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """One model at one vocabulary.

    Attributes:
        model: Its name.
        words: Size of the vocabulary.
        plain_bytes: Peak of the plain step.
        lean_bytes: Peak of the same step without logits.
        by_hand_bytes: Peak of the step by hand; None where this torch has no such function.
        lean_slowdown: Time without logits over the plain one.
        by_hand_slowdown: The same by hand.
        gradients: Relative difference of all gradients from the plain step's.
        losses: Largest difference of a loss in 20 steps of SGD.
        chunks: Chunks of the loss.
    """

    model: str
    words: int
    plain_bytes: int
    lean_bytes: int
    by_hand_bytes: int | None
    lean_slowdown: float
    by_hand_slowdown: float | None
    gradients: float
    losses: float
    chunks: int


class _Plain(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        layer = partial(nn.TransformerEncoderLayer, WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.body = nn.Sequential(*[layer() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, words)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(ids)))


def _by_hand(hidden: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    rows = hidden.reshape(-1, hidden.shape[-1])
    return F.linear_cross_entropy(rows, head.weight, targets.reshape(-1), linear_bias=head.bias, options=options)


def plain(words: int) -> tuple[nn.Module, Step, Step]:
    """A model in torch alone."""
    return (
        _Plain(words),
        lambda net, ids: F.cross_entropy(net(ids).transpose(1, 2), ids),
        lambda net, ids: _by_hand(net.body(net.embedding(ids)), net.head, ids),
    )


def _causal(backbone: str) -> tuple[Step, Step]:
    def by_hand(net: Any, ids: Tensor) -> Tensor:
        hidden = getattr(net, backbone)(ids)[0]
        return _by_hand(hidden[:, :-1], net.lm_head, ids[:, 1:])

    return lambda net, ids: net(ids, labels=ids).loss, by_hand


def gpt2(words: int) -> tuple[nn.Module, Step, Step]:
    """GPT-2 with tied weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "n_positions": TOKENS, "vocab_size": words}
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    net = GPT2LMHeadModel(GPT2Config(**sizes, **still, bos_token_id=1, eos_token_id=1, loss_type="ForCausalLMLoss"))
    return net, *_causal("transformer")


def llama(words: int) -> tuple[nn.Module, Step, Step]:
    """Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS}
    net = LlamaForCausalLM(LlamaConfig(vocab_size=words, num_attention_heads=HEADS, **sizes))
    return net, *_causal("model")


def t5(words: int) -> tuple[nn.Module, Step, Step]:
    """T5, whose decoder's output is scaled before a tied head."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": WIDTH, "d_ff": 4 * WIDTH, "num_layers": LAYERS // 2, "num_heads": HEADS, "d_kv": 64}
    net = T5ForConditionalGeneration(T5Config(vocab_size=words, dropout_rate=0.0, decoder_start_token_id=0, **sizes))

    def by_hand(net: Any, ids: Tensor) -> Tensor:
        begun = F.pad(ids[:, :-1], (1, 0))
        hidden = net.decoder(input_ids=begun, encoder_hidden_states=net.encoder(ids)[0])[0]
        scale = WIDTH**-0.5 if net.config.tie_word_embeddings else 1.0
        return _by_hand(hidden * scale, net.lm_head, ids)

    return net, lambda net, ids: net(ids, labels=ids).loss, by_hand


def bert(words: int) -> tuple[nn.Module, Step, Step]:
    """BERT with the loss of masked words."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "intermediate_size": 4 * WIDTH}
    still = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    net = BertForMaskedLM(BertConfig(vocab_size=words, num_attention_heads=HEADS, **sizes, **still))

    def by_hand(net: Any, ids: Tensor) -> Tensor:
        predictions = net.cls.predictions
        return _by_hand(predictions.transform(net.bert(ids)[0]), predictions.decoder, ids)

    return net, lambda net, ids: net(ids, labels=ids).loss, by_hand


MODELS = {"plain": plain, "gpt2": gpt2, "llama": llama, "t5": t5, "bert": bert}


def _leanly(heads: LazyHeads, step: Step, net: nn.Module, ids: Tensor) -> Tensor:
    with heads:
        return step(net, ids)


def _gradients(net: nn.Module, step: Step, ids: Tensor) -> Tensor:
    net.zero_grad(set_to_none=True)
    step(net, ids).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def _losses(net: nn.Module, step: Callable[[nn.Module], Step], ids: Tensor) -> Tensor:
    twin = deepcopy(net)
    run, optimizer, found = step(twin), torch.optim.SGD(twin.parameters(), 0.01), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = run(twin, ids)
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def measured(name: str, words: int, rounds: int) -> Row:
    """One model at one vocabulary."""
    torch.manual_seed(0)
    net, step, by_hand = MODELS[name](words)
    net.train()
    ids = torch.randint(2, words, (BATCH, TOKENS))
    heads = LazyHeads(net)
    lean = partial(_leanly, heads, step)
    steps = [step, lean, *([by_hand] if hasattr(torch.nn, "LinearCrossEntropyOptions") else [])]
    standing = sum(p.nbytes for p in net.parameters())
    peaks = [standing + step_peak_bytes(net, lambda run=run: run(net, ids).backward()) for run in steps]
    chunks = max(outcome.chunks for outcome in heads.outcomes.values())
    wanted, found = (_gradients(net, run, ids) for run in (step, lean))
    difference = float((found - wanted).norm() / wanted.norm())
    of_plain = _losses(net, lambda _: step, ids)
    of_lean = _losses(net, lambda twin: partial(_leanly, LazyHeads(twin), step), ids)
    times = in_turns([lambda run=run: _gradients(net, run, ids) for run in steps], rounds, warm_up=True)
    plain_s, lean_s, *by_hand_s = [thread_s for _, thread_s in times]
    plain_bytes, lean_bytes, *by_hand_bytes = peaks
    return Row(
        name, words, plain_bytes, lean_bytes, *by_hand_bytes or [None], lean_s / plain_s,
        by_hand_s[0] / plain_s if by_hand_s else None, difference, float((of_plain - of_lean).abs().max()), chunks,
    )  # fmt: skip


def figures(
    *, models: Sequence[str] = tuple(MODELS), words: Sequence[int] = (8000, 32000, 128000), rounds: int = 5
) -> Iterator[Row]:
    """Every model at every vocabulary.

    Args:
        models: Their names.
        words: Sizes of vocabularies.
        rounds: Behind each time.
    """
    import_torchvision()  # transformers imports it where it is installed
    keep_freed_memory()
    for name in models:
        for size in words:
            yield measured(name, size, rounds)


def _line(row: Row) -> str:
    hand = f"{row.by_hand_bytes / row.plain_bytes:.2f} | x{row.by_hand_slowdown:.2f}" if row.by_hand_bytes else " | "
    peak = f"{row.plain_bytes / MIB:.0f} MiB | {row.lean_bytes / row.plain_bytes:.2f} | x{row.lean_slowdown:.2f}"
    return f"{row.model}, {row.words:,} words | {peak} | {hand} | {row.gradients:.0e} | {row.losses:.0e}"


TABLE = table(
    Row,
    "model | peak | without logits | time | by hand | time | gradients differ by | 20 losses by",
    _line,
)
BENCHMARK = Benchmark("logits", figures, {"rows": Row}, {"table": TABLE}, key=("model", "words"))

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
