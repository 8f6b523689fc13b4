"""The bytes of a card at the peak of a step: ViT-L/16 with Adam on a 24 GiB card, with and without a plan.

The step is recorded on fake tensors for that card, as ``ctdr plan torchvision:vit_l_16 --device rtx4090`` does. Its
account, the model of CUDA's allocator and the table of devices give the parts; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ctdr_lightning.basics.devices import DeviceModel, device_model
from ctdr_lightning.memory import Plan, Timeline, plan, record_fake, simulate
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.allocator.reserved import Reserved, reserved_by
from ctdr_lightning.memory.holders.optimizer_bytes import predict_for
from ctdr_lightning.memory.recorder.gpu_workspace import cublas_bytes

CARD, BATCH, SHARE = "rtx4090", 64, 0.9


@dataclass(frozen=True)
class Use:
    """Bytes at the peak of a step.

    Attributes:
        name: Of the step.
        card: The card.
        context: Outside of the allocator or of the step: CUDA's context, and cuBLAS.
        weights: Weights and buffers.
        gradients: Those of the step before until the backward, then those of this step.
        optimizer: The optimizer's state.
        activations: The batch, and tensors of the forward that are alive.
        temporaries: Everything else that is alive.
        allocator: Reserved beyond the tensors.
        budget_bytes: The budget; 0 for the plain step.
        budget_share: The same as a share of the reported memory.
    """

    name: str
    card: DeviceModel
    context: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int
    allocator: int
    budget_bytes: int = 0
    budget_share: float = 0.0


def vit_l_16() -> nn.Module:
    """torchvision's, without memory for its weights."""
    import torchvision

    with torch.device("meta"):
        return torchvision.models.vit_l_16()


def uses(network: nn.Module | None = None, image: Sequence[int] = (3, 224, 224), batch: int = BATCH) -> list[Use]:
    """The plain step, and the step under a budget of a share of the card.

    Args:
        network: From images to logits; ViT-L/16 where it is None.
        image: Shape of a sample.
        batch: Samples.
    """
    card, model = device_model(CARD), network or vit_l_16()
    inputs = torch.empty(batch, *image, device="meta")
    trace = record_fake(model, inputs, _loss, device=CARD)
    parameters = list(model.parameters())
    weights = sum(tensor.nbytes for tensor in (*parameters, *model.buffers()))
    gradients = sum(parameter.nbytes for parameter in parameters)
    account = BatchAccount(trace, predict_for(None, parameters), kept_bytes=gradients)
    # The callback frees the last step's gradients before a forward that would exceed the budget with them.
    freed = BatchAccount(trace, account.optimizer)
    budget_bytes = int(SHARE * card.memory_bytes)
    planned = plan(freed.standing, budget_bytes)
    name = f"{'ViT-L/16' if network is None else type(model).__name__}, batch {batch}"
    resident = (weights, account.optimizer.state, inputs.nbytes)
    plain = _use(f"{name},\nplain", card, account, simulate(account.standing), resident)
    return [plain, _use(f"{name},\nunder the budget", card, freed, planned, resident)]


def _loss(model: nn.Module, images: Tensor) -> Tensor:
    return model(images).sum()


def _use(name: str, card: DeviceModel, account: BatchAccount, made: Plan | Timeline, resident: tuple[int, ...]) -> Use:
    weights, state, batch = resident
    line = made.timeline if isinstance(made, Plan) else made
    reserved = _reserved(account, made)
    trace, peak = account.standing, line.peak_tick
    by_forward = {trace.values[v].storage for op in trace.ops if not op.backward for v in op.outputs if v >= 0}
    alive = [i for i, s in enumerate(trace.storages) if 0 <= s.born <= peak <= line.ends[i]]
    activations = batch + sum(trace.storages[i].n_bytes for i in alive if i in by_forward)
    new = [trace.storages[i] for i in alive if i not in by_forward and trace.storages[i].end >= trace.n_ticks - 1]
    gradients = account.kept_bytes if peak < trace.forward_ticks else sum(storage.n_bytes for storage in new)
    plans = isinstance(made, Plan)
    return Use(
        name, card, card.context_bytes + cublas_bytes(card), weights, gradients, state, activations,
        line.peak_bytes - weights - gradients - state - activations, reserved.reserved_bytes - line.peak_bytes,
        made.budget_bytes or 0 if plans else 0, SHARE if plans else 0.0,
    )  # fmt: skip


def _reserved(account: BatchAccount, made: Plan | Timeline) -> Reserved:
    return made.reserved if isinstance(made, Plan) else reserved_by(account.standing)
