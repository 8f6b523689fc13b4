"""Under a hard cap of the address space: what dies plainly survives under a budget, from the first batch on."""

import os
import subprocess
import sys

import pytest

HEADROOM_MIB = 192

# sixteen outputs of 16 MiB are saved plainly; a run with a tiny batch first loads every library and makes every thread
SCRIPT = f"""
import resource, sys
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from ctdr_lightning.trainer.reports.event_words import words_of
from ctdr_lightning import CTDRCallback

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[layer for _ in range(16) for layer in (nn.Linear(256, 256), nn.Tanh())])

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)

def fit(budget, n_samples, batches):
    seed_everything(0, verbose=False)
    net, images = Net(), torch.randn(n_samples, 256)
    callbacks = [CTDRCallback(rank=None, memory_budget=budget, verbose=False)] if budget else []
    trainer = Trainer(
        max_steps=batches, max_epochs=-1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
    )
    trainer.fit(net, DataLoader(TensorDataset(images), batch_size=n_samples))
    return callbacks

budget = sys.argv[1]
fit(budget if budget != "none" else "1GiB", 64, 2)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + {HEADROOM_MIB} * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
callbacks = fit(budget if budget != "none" else None, 16384, 3)
for callback in callbacks:
    print(*map(words_of, callback.run.memory.session.events), sep="\\n")
print("finished")
"""


def run(budget, tmp_path):
    # what is freed goes back, and counts no more; no second arena takes 64 MiB of the limit when an allocation fails
    allocator = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_ARENA_MAX": "1"}
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | allocator
    command = [sys.executable, "-c", SCRIPT, budget]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize(
    ("budget", "finishes", "rescued"),
    [
        pytest.param("none", False, False, marks=pytest.mark.slow),
        pytest.param("128MiB", True, False, marks=pytest.mark.slow),
        pytest.param("8GiB", True, True, marks=pytest.mark.exhaustive),
    ],
)
def test_a_hard_cap(budget, finishes, rescued, tmp_path):
    done = run(budget, tmp_path)
    assert ("finished" in done.stdout) is finishes, done.stdout + done.stderr[-3000:]
    assert ("ran out of memory" in done.stdout) is rescued, done.stdout
    assert finishes or "allocate memory" in done.stderr
