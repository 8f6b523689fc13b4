"""Optimizers that behave as those of other libraries do, in a few lines each."""

from collections import defaultdict

import torch
from torch import Tensor
from torch.optim import Optimizer


class Projector:
    """Keeps the first rows of a decomposition, and with them, as they are a view, all of it."""

    def __init__(self, rank):
        self.rank, self.rows = rank, None

    def renew(self, gradient):
        self.rows = torch.linalg.svd(gradient, full_matrices=False).Vh[: self.rank]


class LowRank(Optimizer):
    """As GaLore: a decomposition every ``gap`` steps, in an object of its own, and moments of fewer columns."""

    def __init__(self, groups, lr=0.01):
        super().__init__(groups, {"lr": lr})
        for index, param in enumerate(p for group in self.param_groups for p in group["params"]):
            self.state[param]["seed"] = 10**9 + index

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure_loss(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(group, param)
        return loss

    def _update(self, group, param):
        state, low = self.state[param], "rank" in group
        count = state.setdefault("step", 0)
        gradient = param.grad
        if low:
            projector = state.setdefault("projector", Projector(group["rank"]))
            if count % group["gap"] == 0:
                projector.renew(gradient)
            gradient = gradient @ projector.rows.T
        if "moment" not in state:
            state["moment"] = torch.zeros_like(gradient)
        state["step"] += 1
        update = state["moment"].lerp_(gradient, 0.1)
        param.add_(update @ state["projector"].rows if low else update, alpha=-group["lr"])


class Seeded(LowRank):
    """As APOLLO: seeds in the state before the first step, a generator of the device, numbers read from tensors."""

    def _update(self, group, param):
        state = self.state[param]
        generator = torch.Generator(device=param.device).manual_seed(state["seed"])
        state["seed"] = int(torch.randint(0, 1000, (2,), generator=torch.Generator().manual_seed(state["seed"])).sum())
        noise = torch.randn(param.shape[-1], generator=generator, device=param.device)
        param.add_(param.grad * noise, alpha=-group["lr"] / max(param.grad.norm(), 1.0))
        state["norm"] = param.grad.norm()


class Eighth(Tensor):
    """A tensor of whole numbers and a scale, which looks like one of floating point."""

    @staticmethod
    def __new__(cls, codes, scale):
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


class Compact(Optimizer):
    """As torchao's: moments in 8 bits, in a subclass, and an update that compiles itself."""

    compiles = True

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})
        self.share = 0.1

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure_loss(closure)
        update = torch.compile(moved, fullgraph=True, backend="eager") if self.compiles else moved
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    codes = torch.zeros(param.shape, dtype=torch.int8, device=param.device)
                    state["moment"] = Eighth(codes, torch.ones(1, device=param.device))
                update(
                    param.detach(), param.grad, state["moment"].codes, state["moment"].scale, group["lr"], self.share
                )
        return loss


def moved(param, gradient, codes, scale, lr, share):
    moment = torch.lerp(codes * scale, gradient, share)
    scale.copy_(moment.abs().amax() / 127 + 1e-12)
    codes.copy_(moment / scale)
    param.add_(moment, alpha=-lr)


class Lookahead(Optimizer):
    """Wraps an optimizer, which keeps all of the state."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.state = defaultdict(dict)

    def step(self, closure=None):
        return self.inner.step(closure)


def closure_loss(closure):
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


@torch.library.custom_op("ctdr_tests::wide_update", mutates_args={"param"}, device_types="cpu")
def wide_update(param: Tensor, gradient: Tensor, lr: float) -> None:
    several = [gradient.clone() for _ in range(8)]
    param.add_(several[-1], alpha=-lr)


@wide_update.register_fake
def _(param, gradient, lr):
    return None


class Wide(Optimizer):
    """As bitsandbytes' on a processor: one call of which only its kernel knows that it allocates."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure_loss(closure)
        for group in self.param_groups:
            for param in group["params"]:
                wide_update(param, param.grad, group["lr"])
        return loss
