from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ctdr_lightning.basics.errors import CheckpointError, ConfigError
from ctdr_lightning.recovery import Distillation
from ctdr_lightning.recovery.distill import Teacher, softened


def test_the_softened_term_is_the_cross_entropy_less_the_teachers_entropy():
    student, teacher = torch.randn(5, 7), torch.randn(5, 7)
    p, q = (student / 4).log_softmax(-1), (teacher / 4).softmax(-1)
    expected = 16 * (-(q * p).sum(-1).mean() + (q * q.log()).sum(-1).mean())
    torch.testing.assert_close(softened(student, teacher, 4.0), expected)
    assert softened(teacher, teacher, 4.0).abs() < 1e-6


@pytest.mark.parametrize("keep", ["host", "bf16", "device"])
def test_the_loss_is_blended_and_gradients_reach_the_student_only(keep):
    student = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    teacher = Teacher(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), Distillation(weight=0.25, keep=keep))
    x = torch.randn(6, 4)
    loss = teacher.around(student, lambda: student(x).sum())
    assert loss.item() == pytest.approx(0.75 * student(x).sum().item() + 0.25 * teacher.loss.item(), rel=1e-4)
    loss.backward()
    assert all(p.grad is not None for p in student.parameters())
    assert all(p.grad is None for p in teacher.net.parameters())
    assert teacher.n_bytes == sum(p.numel() for p in student.parameters()) * (2 if keep == "bf16" else 4)
    assert teacher.seconds > 0


@pytest.mark.parametrize("keep", ["host", "bf16", "device"])
def test_the_teacher_comes_to_the_students_device(keep, monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # torch has none for the meta device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)
    student = nn.Linear(4, 3, device="meta")
    teacher = Teacher(nn.Linear(4, 3), Distillation(keep=keep))
    if keep == "bf16":
        student.bfloat16()
    if keep == "host":  # there is no way back from the meta device
        teacher.net.cpu = lambda: None
    loss = teacher.around(student, lambda: student(torch.ones(6, 4, device="meta", dtype=student.weight.dtype)).sum())
    assert loss.device.type == "meta"
    assert {tensor.device.type for tensor in teacher.net.parameters()} == {"meta"}


def test_dict_outputs_and_objects_with_logits():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 3)

        def forward(self, x):
            return SimpleNamespace(logits=self.net(x))

    student = Wrapped()
    teacher = Teacher(Wrapped(), Distillation())
    output = teacher.around(student, lambda: {"loss": student(torch.ones(2, 4)).logits.sum(), "extra": 1})
    assert output["extra"] == 1
    assert output["loss"].requires_grad


def test_mistakes_are_named():
    student = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="head"):
        Teacher(student, Distillation(module="head"))
    teacher = Teacher(student, Distillation(module="0"))
    with pytest.raises(ConfigError, match="did not call"):
        teacher.around(student, lambda: torch.ones(1))
    assert teacher.around(student, lambda: None) is None
    with pytest.raises(CheckpointError):
        teacher.load_state_dict({"weight": torch.ones(1)})
