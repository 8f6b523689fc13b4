"""Every command line of the README and of docs/, run as a user runs it: from an installed wheel, in an empty folder.

The networks that the commands name are small ones that the test writes, as torchvision and timm may not be importable
beside this torch. What is not run here is listed in ``ELSEWHERE`` with the place where it is; of a recipe's training
the configuration is composed, and a benchmark is asked for its options.
"""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

START = re.compile(r"(?:ctdr|python -m|make|pip)\s")
ELSEWHERE = {
    r"pip install .*": "the wheel of this test; extras by the Makefile",
    r"make (demo|test|test-slow|docs|bench)": "the Makefile's own targets, which CI runs",
    r"python -m benchmarks\.\w+.*": "takes minutes to hours",
    r"ctdr plan --policy \.\.\.": "no whole command",
    r"python -m ctdr_recipes\.train .*": "trained on few batches in tests/recipes",
    r"ctdr recipes run image_folder .*": "needs a folder of images: tests/recipes writes one",
    r"ctdr recipes run (evaluate|pareto).*": "takes many minutes: tests/recipes runs a small part",
}
KNOWN = {"decompose", "plan", "max-batch", "explain", "recipes", "report"}
NETS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4 * width, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(x + self.bn3(self.conv3(y)))


class Net(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, stride=8, padding=3, bias=False), nn.BatchNorm2d(64)
        self.layer1, self.fc = nn.Sequential(*(Block(16) for _ in range(4))), nn.Linear(64, n_classes)

    def forward(self, x):
        return self.fc(self.layer1(torch.relu(self.bn1(self.conv1(x)))).mean((2, 3)))


def resnet50():
    return Net(1000)


def list_models():
    return ["resnet50"]


def get_model(name, weights=None):
    return globals()[name]()


"""


def blocks(path):
    """The shell blocks of a document, as lists of commands; a command in running text is a block of its own."""
    text = path.read_text()
    fenced = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL)
    inline = re.findall(r"`((?:ctdr|python -m|make|pip) [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [[line.split("  #")[0].split(" # ")[0].strip() for line in block.splitlines()] for block in fenced]
    return [[line for line in block if line] for block in [*lines, *([" ".join(one.split())] for one in inline)]]


ALL = [(path, block) for path in DOCUMENTS for block in blocks(path)]


def elsewhere(command):
    """Why a command is not run here, or None."""
    return next((why for pattern, why in ELSEWHERE.items() if re.fullmatch(pattern, command)), None)


def runnable(start):
    """The blocks with something to run that starts so."""
    found = [(path, [c for c in block if c.startswith(start) and not elsewhere(c)]) for path, block in ALL]
    return [
        pytest.param(
            block,
            id=f"{path.stem}-{i}",
            marks=[pytest.mark.slow]
            * any(word in " ".join(block) for word in ("max-batch", "--multirun", "init_from")),
        )
        for i, (path, block) in enumerate(found)
        if block
    ]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which the wheel of this working tree was installed."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "wheel")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = (folder / "wheel").glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(folder / "site"), wheel]
    subprocess.run(install, cwd=folder, check=True, capture_output=True)
    return folder / "site"


@pytest.fixture
def run(installed, tmp_path):
    """Run a command in the folder; it must end well. Returns what it printed."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "models.py").write_text(NETS)
    paths = {"PYTHONPATH": str(installed), "PATH": f"{installed / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    def call(words):
        words = [sys.executable, *words[1:]] if words[0] == "python" else words
        environment = {**os.environ, **paths, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, f"{shlex.join(map(str, words))}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return call


def test_every_command_is_run_here_or_said_to_be_run_elsewhere():
    commands = [command for _, block in ALL for command in block if START.match(command)]
    starts = {c.split()[0] if c.startswith("ctdr") else " ".join(c.split()[:3]) for c in commands if not elsewhere(c)}
    assert starts == {"ctdr"}, "a new kind of command: run it here, or list it"
    assert {c.split()[1] for c in commands if c.startswith("ctdr ")} == KNOWN
    unused = [pattern for pattern in ELSEWHERE if not any(re.fullmatch(pattern, command) for command in commands)]
    assert unused == [], "listed, but in no document any more"


@pytest.mark.slow
def test_the_installed_package_is_the_one_that_runs(run, installed):
    where = run(["python", "-c", "import ctdr_lightning; print(ctdr_lightning.__file__)"]).strip()
    assert Path(where).is_relative_to(installed)
    assert run(["ctdr", "--version"]).startswith("ctdr ")


@pytest.mark.slow
@pytest.mark.parametrize("block", runnable("ctdr "))
def test_the_commands_of_a_block_run_one_after_the_other(run, tmp_path, block):
    for command in block:
        printed = run(shlex.split(command))
        assert printed.strip()
    for path in re.findall(r"--save (\S+)", " ".join(block)):
        assert (tmp_path / path).stat().st_size > 100


def lines(start):
    """The command lines with such a start, each once."""
    return dict.fromkeys(command for _, block in ALL for command in block if command.startswith(start))


@pytest.mark.slow
@pytest.mark.parametrize("line", lines("python -m ctdr_recipes.train"))
def test_the_configuration_of_a_training_command_composes(run, tmp_path, line):
    shutil.rmtree(tmp_path / "torchvision")  # Lightning's metrics would take it for the real one
    words = [re.sub(r"^(ctdr\.rank=[^,]+),.*", r"\1", word) for word in shlex.split(line) if word != "--multirun"]
    printed = run([*words, "--cfg", "job"])
    given = [word.split("=")[1] for word in words if word.startswith(("ctdr.rank=", "data.root="))]
    assert given
    assert all(value in printed for value in given)


@pytest.mark.slow
@pytest.mark.parametrize("line", lines("python -m benchmarks"))
def test_a_benchmark_knows_the_options_that_a_page_gives_it(line, monkeypatch, capsys):
    words = shlex.split(line)
    monkeypatch.setattr(sys, "argv", [words[2], "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert all(word in shown for word in words[3:] if word.startswith("--"))
