"""What torch's own dispatch runs on a virtual GPU; run as a module it prints the operators as JSON."""

import json

import torch
import torch.nn.functional as F

from ctdr_lightning.basics.devices import DEVICES
from ctdr_lightning.basics.torch_private import FakeTensorMode, TorchDispatchMode
from ctdr_lightning.memory.recorder.on_gpu import GpuFakes

HALF, BF16, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


def normalised(x, weights, training):
    w = torch.ones(x.shape[1], device=x.device, dtype=weights)
    stats = torch.ones(x.shape[1], device=x.device), torch.ones(x.shape[1], device=x.device)
    return F.batch_norm(x, *stats, w, w, training)


CALLS = {
    "dropout": ((4, 8), FULL, lambda x: F.dropout(x, 0.1)),
    "dropout_all": ((4, 8), FULL, lambda x: F.dropout(x, 1.0)),
    "softmax": ((4, 8), HALF, lambda x: F.softmax(x, -1, dtype=FULL)),
    "log_softmax": ((4, 8), HALF, lambda x: F.log_softmax(x, -1, dtype=FULL)),
    "softmax_bf16": ((4, 8), BF16, lambda x: F.softmax(x, -1, dtype=FULL)),
    "batch_norm": ((4, 8, 5, 5), FULL, lambda x: normalised(x, FULL, True)),
    "batch_norm_half": ((4, 8, 5, 5), HALF, lambda x: normalised(x, FULL, True)),
    "batch_norm_all_half": ((4, 8, 5, 5), HALF, lambda x: normalised(x, HALF, True)),
    "batch_norm_bf16": ((4, 8, 5, 5), BF16, lambda x: normalised(x, FULL, True)),
    "batch_norm_double": ((4, 8, 5, 5), DOUBLE, lambda x: normalised(x, DOUBLE, True)),
    "batch_norm_rows": ((4, 8), FULL, lambda x: normalised(x, FULL, True)),
    "batch_norm_fixed": ((4, 8, 5, 5), FULL, lambda x: normalised(x, FULL, False)),
    "batch_norm_bare": ((4, 8, 5, 5), FULL, lambda x: F.batch_norm(x, None, None, training=True)),
}


class _Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "prim":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def ops_of(name):
    """The operators of a call's forward and backward."""
    shape, dtype, call = CALLS[name]
    x = torch.empty(shape, dtype=dtype, device="cuda").requires_grad_()
    with _Names() as seen:
        call(x).sum().backward()
    return [op for op in seen.names if op not in ("aten.empty.memory_format", "aten.ones.default")]


def by_rule(name):
    """The operators that the rules choose for an A100."""
    mode = GpuFakes(DEVICES["a100"])
    with mode, mode.kernels():
        return ops_of(name)


def by_torch(name):
    """The operators that torch chooses, with no rule in between."""
    with FakeTensorMode():
        return ops_of(name)


if __name__ == "__main__":
    print(json.dumps({name: by_torch(name) for name in CALLS}))
