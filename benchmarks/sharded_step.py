"""One rank's step of a Llama-like model that FSDP2 shards over many cards: recorded, with nothing there.

``fully_shard`` runs on tensors without data and in torch's fake process group, which exchanges nothing. So gathers,
buffers and shards are FSDP2's own, and no account of them. Operators are those of a processor; their seconds are a
roofline's of the card, those of collectives a ring's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ctdr_lightning.basics.devices import DeviceModel
from ctdr_lightning.memory import Trace, record
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.holders.optimizer_bytes import optimizer_of, predict
from ctdr_lightning.memory.recorder.on_cpu import CpuFakes
from ctdr_lightning.memory.values.op_seconds import behind_host
from ctdr_lightning.memory.values.tensors import own_part


@dataclass(frozen=True)
class Model:
    """Sizes of a Llama-like model, and of a sample; the default is Llama 2 7B (arXiv 2307.09288, table 1)."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    hidden: int = 11008
    vocabulary: int = 32000
    tokens: int = 4096


SEVEN_B = Model()


@dataclass(frozen=True)
class Wires:
    """Connections of a card.

    Attributes:
        within_bytes_per_s: From a card to the others of its machine, one way.
        machine_bytes_per_s: From a machine to the others, one way.
        hop_s: Latency of a hop within a machine.
    """

    within_bytes_per_s: float
    machine_bytes_per_s: float
    hop_s: float


# Rates of sheets, one way; SUSTAINED of them is assumed, as `cards.py` assumes it of memory. Not measured here.
# h100: NVIDIA's data sheet of DGX H100: NVLink 900 GB/s both ways, eight ConnectX-7 of 400 Gb/s a machine.
# a10g: PCI Express 4.0 x16, 32 GB/s one way, and the 100 Gb/s of AWS's g5.48xlarge with eight cards (EC2 G5's page).
# Latencies: NCCL's own of the ring with its protocol Simple: `baseLat` and `hwLat` of NVLINK, PCI and NET in its
# src/graph/tuning.cc.
WIRES = {
    "h100": Wires(450e9, 8 * 400e9 / 8, 3.4e-6),
    "a10g": Wires(32e9, 100e9 / 8, 5.7e-6),
}
SUSTAINED, MACHINE = 0.8, 8
BASE_S, MACHINE_HOP_S = 8.4e-6, 9.6e-6
GATHER, SCATTER, COPY_OUT = (
    "c10d._allgather_base_.default", "c10d._reduce_scatter_base_.default", "fsdp.split_with_sizes_copy.default",
)  # fmt: skip


def ring_s(n_bytes: int, cards: int, wires: Wires) -> float:
    """Seconds of a ring's all-gather or reduce-scatter: NCCL's own model, `ncclTopoGetAlgoTime` in src/graph/tuning.cc.

    Rings of a machine share its cards' links and its network: the slower of both limits them.

    Args:
        n_bytes: Of the whole tensor.
        cards: In the ring.
        wires: Of the cards.
    """
    machines = -(-cards // MACHINE)
    rate = wires.within_bytes_per_s if machines == 1 else min(wires.within_bytes_per_s, wires.machine_bytes_per_s)
    hops_s = (cards - machines) * wires.hop_s + (machines - 1) * MACHINE_HOP_S
    return BASE_S + hops_s + (cards - 1) / cards * n_bytes / (SUSTAINED * rate)


class Block(nn.Module):
    """A block of Llama: RMSNorm, attention with rotary positions, SwiGLU."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.heads = model.heads
        self.n1, self.n2 = nn.RMSNorm(model.width), nn.RMSNorm(model.width)
        linear = partial(nn.Linear, bias=False)
        self.q, self.k, self.v, self.o = (linear(model.width, model.width) for _ in range(4))
        self.gate, self.up = linear(model.width, model.hidden), linear(model.width, model.hidden)
        self.down = linear(model.hidden, model.width)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Shape ``(N, T, width)``; ``turns`` has the cosines and sines, ``(2, T, width / heads)``."""
        y = self.n1(x)
        q, k, v = (of(y).view(*y.shape[:2], self.heads, -1).transpose(1, 2) for of in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(_turned(q, turns), _turned(k, turns), v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(x.shape))
        y = self.n2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * turns[0] + torch.cat((-x[..., half:], x[..., :half]), -1) * turns[1]


class Llama(nn.Module):
    """The model, with a loss in fp32 over all logits.

    Args:
        model: Its sizes.
        checkpointed: Whether each block runs in torch's checkpoint.
    """

    def __init__(self, model: Model, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.words = nn.Embedding(model.vocabulary, model.width)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm, self.head = nn.RMSNorm(model.width), nn.Linear(model.width, model.vocabulary, bias=False)
        self.register_buffer("turns", torch.zeros(2, model.tokens, model.width // model.heads, dtype=torch.bfloat16))

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of ids, shape ``(N, T)``, each for the word after it."""
        x = self.words(ids)
        for block in self.blocks:
            run = partial(checkpoint, block, use_reentrant=False) if self.checkpointed else block
            x = run(x, self.turns)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return F.cross_entropy(logits, ids.roll(-1, 1).flatten())


def sharded(net: Llama, mesh: DeviceMesh) -> Llama:
    """Shard each block, then the rest: fp32 shards, bf16 arithmetic, gradients that are sent in fp32."""
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for unit in (*net.blocks, net):
        fully_shard(unit, mesh=mesh, mp_policy=precision)
    return net


@contextmanager
def pretended(cards: int) -> Iterator[DeviceMesh]:
    """A process group in which this process is the first of so many, and nothing is exchanged."""
    distributed.init_process_group("fake", rank=0, world_size=cards)
    try:
        yield init_device_mesh("cpu", (cards,))
    finally:
        distributed.destroy_process_group()


@dataclass(frozen=True)
class Step:
    """A rank's recorded step.

    Attributes:
        account: The batch's.
        stays_bytes: Shards of weights, gradients and AdamW's state, and buffers.
    """

    account: BatchAccount
    stays_bytes: int


def recorded(model: Model, batch: int, cards: int, card: DeviceModel | None, checkpointed: bool = False) -> Step:
    """Record a rank's step on fake tensors.

    Args:
        model: The sizes.
        batch: Samples of this rank.
        cards: Ranks.
        card: The card; None is this processor, whose bytes alone count then.
        checkpointed: Whether each block runs in torch's checkpoint.
    """
    with pretended(cards) as mesh, CpuFakes():
        net = sharded(Llama(model, checkpointed), mesh)
        ids = torch.zeros(batch, model.tokens, dtype=torch.int64)
        net(ids).backward()  # the first step makes what later ones find
        net.zero_grad()
        standing = [*net.parameters(), *net.buffers()]
        trace = record(lambda: net(ids), device=card or DeviceModel("cpu", 1.0, 1.0, 1.0), standing=standing, root=net)
        shards = [nn.Parameter(own_part(p)) for p in net.parameters()]
        optimizer = predict([optimizer_of("adamw", shards)], foreach=True)
        assert optimizer is not None
        weights = sum(p.nbytes for p in shards)
        stays = 2 * weights + optimizer.state + sum(b.nbytes for b in net.buffers())
    return Step(BatchAccount(_on(trace, card), optimizer), stays)


def _on(trace: Trace, card: DeviceModel | None) -> Trace:
    """The step as of a GPU whose collectives take no time of its own; `seconds` adds theirs."""
    if card is None:
        return trace
    seconds = [0.0 if op.name in (GATHER, SCATTER) else op.seconds for op in trace.ops]
    return replace(trace.with_costs(behind_host(card, seconds), {}), device="cuda")


def step_s(trace: Trace, cards: int, wires: Wires, again_s: float = 0.0) -> float:
    """Seconds of a step in which the network works beside the arithmetic, as FSDP2 lets it.

    A unit's gather begins once the weights of the unit before are copied out, a reduce-scatter once its gradients are
    there; one collective runs at a time, and neither slows the arithmetic down.

    Args:
        trace: The recorded step.
        cards: Ranks.
        wires: Of the cards.
        again_s: Of recomputation, spread over the backward in proportion to its ops.
    """
    backward_s = sum(op.seconds for op in trace.ops if op.backward)
    slower = 1 + again_s / backward_s if backward_s else 1.0
    card_s = network_s = copied_s = 0.0
    for op in trace.ops:
        if op.name in (GATHER, SCATTER):
            n_bytes = max(trace.value_bytes(v) for v in (*op.inputs, *op.outputs))
            network_s = max(network_s, copied_s if op.name == GATHER else card_s) + ring_s(n_bytes, cards, wires)
            continue
        if op.name == COPY_OUT:
            card_s = max(card_s, network_s)
        card_s += op.seconds * (slower if op.backward else 1.0)
        copied_s = card_s if op.name == COPY_OUT else copied_s
    return max(card_s, network_s)
