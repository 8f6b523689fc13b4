"""torch's private names stand in one file, its compiler's in another, and nobody else says them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

from ctdr_lightning.basics import torch_private

ROOT = Path(__file__).parents[2]
THE_ONE = ROOT / "ctdr_lightning" / "basics" / "torch_private.py"
OF_THE_COMPILER = THE_ONE.with_name("torch_compiler.py")
SOURCES = [
    path
    for folder in ("ctdr_lightning", "recipes")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path not in (THE_ONE, OF_THE_COMPILER)
]


def dotted_name(node):
    """``a.b.c`` of a chain of attributes that starts with a name; empty for any other."""
    if isinstance(node, ast.Name):
        return node.id
    before = dotted_name(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if before else ""


def is_private(dotted):
    parts = dotted.split(".")
    return parts[0] == "torch" and any(p.startswith("_") and not p.startswith("__") for p in parts)


def private_names(source):
    """Every private name of torch that a source imports or spells out."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found.append(dotted_name(node))
    return sorted({name for name in found if is_private(name)})


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nobody_else_says_a_private_name_of_torch(path):
    assert private_names(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._ops import OpOverload",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch.utils.data import _utils",
        "x = torch._C._current_graph_task_id()",
        "torch.cuda.memory._dump_snapshot(path)",
    ],
)
def test_the_rule_finds_what_it_is_for(source):
    assert private_names(source)


def test_the_rule_lets_public_names_pass():
    assert private_names("import torch\nfrom torch import nn\nx = torch.__version__, torch.ops.aten.relu_") == []


def test_the_floor_in_pyproject_is_the_floor_that_is_checked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [r for r in map(Requirement, project["dependencies"]) if r.name == "torch"]
    assert str(torch.specifier) == f">={torch_private.OLDEST_TORCH}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("removed", "version", "sentence"),
    [
        (
            "torch._C._autograd._top_saved_tensors_default_hooks",
            "2.7.1+cpu",
            "ctdr_lightning needs torch 2.8 or newer; found 2.7.1+cpu.",
        ),
        ("torch._C._current_graph_task_id", "3.1.0", "ctdr_lightning does not work with torch 3.1.0 ("),
        ("torch.UntypedStorage._cdata", "3.1.0", "ctdr_lightning does not work with torch 3.1.0 (no attribute _cdata)"),
    ],
)
def test_a_torch_without_a_name_fails_at_import_with_one_sentence(removed, version, sentence):
    owner, _, name = removed.rpartition(".")
    hide = f"delattr({owner}, {name!r})"
    if name == "_cdata":  # a slot of the base class, which cannot be deleted
        hide = f"{owner} = type('UntypedStorage', (), {{}})"
    code = f"import torch; {hide}; torch.__version__ = {version!r}\nimport ctdr_lightning.basics.torch_private"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {sentence}"), last


@pytest.mark.slow
def test_a_torch_without_a_name_of_the_compiler_fails_where_it_is_asked_for():
    code = (
        "import torch._functorch.partitioners as p; del p._is_tangent\n"
        "try:\n    import ctdr_lightning.basics.torch_compiler\n"
        "except ValueError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.startswith("Compiled models are planned with torch 2.9 or newer; found"), done.stderr


def test_replays_run_below_the_autocast_of_every_device():
    assert all(torch_private.AUTOCAST_KEYS.has(key) for key in (
        torch_private.DispatchKey.AutocastCPU, torch_private.DispatchKey.AutocastCUDA
    ))  # fmt: skip
