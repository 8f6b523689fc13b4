import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import ctdr_lightning
from ctdr_lightning.cli import COMMANDS, main
from ctdr_lightning.command_line.named import build_model
from ctdr_lightning.memory import Plan, record, simulate

pytestmark = pytest.mark.usefixtures("short_searches")


def net():
    """What the commands are given to build."""
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers)


def pooled():
    """Outputs of ReLU that a pooling reads, which take a bit or a byte an element."""
    layers = [(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)) for a, b in pairwise([3, 16, 32, 64])]
    return nn.Sequential(*(layer for block in layers for layer in block))


class Lit(LightningModule):
    """Asks its trainer, logs, and measures; trains on pairs, on dicts, or on a tensor alone."""

    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())))
        self.accuracy = MulticlassAccuracy(32)

    def training_step(self, batch, batch_idx):
        if isinstance(batch, dict):
            batch = batch["x"], batch["y"]
        x, y = batch if isinstance(batch, tuple | list) else (batch, torch.zeros(len(batch), dtype=torch.long))
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        assert self.trainer.training
        assert batch_idx == self.global_step == self.trainer.current_epoch == 0
        self.log("acc", self.accuracy(logits, y), prog_bar=True)
        self.log_dict({"loss": loss})
        return {"loss": loss, "logits": logits}


class Data(LightningDataModule):
    def setup(self, stage):
        self.pairs = TensorDataset(torch.randn(40, 32), torch.arange(40) % 32)

    def train_dataloader(self):
        return DataLoader(self.pairs, 20)


class Words(nn.Module):
    """Takes keywords, as language models do, and returns a loss beside its logits."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, input_ids, labels=None, attention_mask=None):
        logits = self.out(torch.tanh(self.table(input_ids)) * attention_mask.unsqueeze(-1))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, y):
        return [torch.tanh(self.inner(x)), {"y": torch.tanh(self.inner(y))}]


def hand_stepped():
    module = Lit()
    module.automatic_optimization = False
    return module


def choosy():
    class Choosy(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2 if x.sum().item() > 0 else 1)

    return Choosy(4, 4)


def silent():
    class Silent(nn.Linear):
        def forward(self, x):
            return super().forward(x).detach()

    return Silent(4, 4)


NAME = f"{__name__}:net"
INPUT = ["--input", "16,3,24,24"]


def test_decompose_shows_each_layer_and_saves_a_plan_to_edit(tmp_path, capsys):
    path = tmp_path / "layers.json"
    assert main(["decompose", NAME, "--rank", "0.25", "--select", "!0", "--save", str(path)]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{index} " in shown for index in (2, 5, 8, 11, 14, 17))
    assert "2" in json.dumps(json.loads(path.read_text()))


def test_plan_needs_no_memory_and_can_be_explained(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["plan", NAME, *INPUT, "--policy", "sqrt", "--device", "h100", "--save", str(path)]) == 0
    plain, planned, reserved, room = capsys.readouterr().out.splitlines()
    assert plain.startswith("Plain step: peak ")
    assert planned.startswith("Policy sqrt: predicted peak ")
    assert reserved.startswith("CUDA's allocator reserves ")
    assert room.startswith("In addition: about 512.0 MiB for CUDA's context, 64.0 MiB for cuBLAS, of 79.10 GiB in all.")
    assert main(["explain", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == planned
    assert not Plan.from_json(path).keeps_all


def test_a_share_is_one_of_the_named_cards_memory(capsys):
    assert main(["plan", NAME, *INPUT, "--budget", "1%", "--device", "h100"]) == 0
    assert "budget 810.0 MiB" in capsys.readouterr().out
    assert main(["plan", NAME, *INPUT, "--budget", "1%"]) == 2
    assert "the device's memory is not known here" in capsys.readouterr().err


def test_a_budget_that_no_allocator_serves_is_said(capsys):
    assert main(["plan", NAME, *INPUT, "--budget", "1GiB", "--device", "h100"]) == 0
    assert "A card of" not in capsys.readouterr().out
    assert main(["plan", NAME, *INPUT, "--budget", "5MiB", "--policy", "dtr", "--device", "h100"]) == 0
    assert "A card of 5.0 MiB cannot serve the step" in capsys.readouterr().out


def chain(depth=2, width=16):
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))


def of_another_torch():
    raise RuntimeError("operator torchvision::nms does not exist")


def test_an_argument_that_is_not_known_names_the_nearest(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", NAME, *INPUT, "--budgte", "8GiB"])
    assert "unrecognized arguments: --budgte 8GiB. Did you mean '--budget'?" in capsys.readouterr().err


@pytest.mark.slow
def test_without_a_budget_a_table_says_what_budgets_cost(capsys):
    assert main(["plan", f"{__name__}:chain(12, width=32)", "--input", "512,32"]) == 0
    head, *lines, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["budget", "of", "the", "plain", "peak", "step"]
    assert len(lines) == 6
    shares = [float(re.search(r"iB\s+([\d.]+)", line).group(1)) for line in lines]
    times = [float(re.search(r"x([\d.]+)", line).group(1)) for line in lines]
    assert shares[0] == times[0] == 1
    assert shares == sorted(shares, reverse=True)
    assert times[-1] == max(times) > 1
    assert last.startswith("Write one as --budget")
    budget = "".join(lines[3].split()[:2])
    assert main(["plan", f"{__name__}:chain(12, width=32)", "--input", "512,32", "--budget", budget]) == 0


@pytest.mark.slow
def test_the_table_of_the_document_is_what_the_command_prints(capsys):
    document = Path(__file__).parents[1] / "docs" / "command.md"
    command, *printed = re.search(r"```text\n\$ ctdr (plan .*?)```", document.read_text(), re.DOTALL)[1].splitlines()
    assert main(command.split()) == 0
    found = capsys.readouterr().out.splitlines()
    # budgets between follow from the least peak that was found, which a slow machine's clock may end earlier
    assert [found[0], found[1], found[-1]] == [printed[0], printed[1], printed[-1]]
    assert [line.split()[4:] for line in found[2:-1]] == [line.split()[4:] for line in printed[2:-1]]


def test_a_step_that_no_plan_makes_smaller_has_one_line(capsys):
    assert main(["plan", f"{__name__}:chain(1)", "--input", "2,16"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["torchvision:resnet18(num_classes=7)", "timm:resnet10t(num_classes=7)", "transformers:{}(num_labels=7)"]
)
def test_models_of_libraries(tmp_path, model, capsys):
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "hidden_size": 16}
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | small))
    assert main(["decompose", model.format(path), "--rank", "0.9"]) == 0
    bias = "fc.bias" if "resnet" in model else "classifier.bias"
    assert bias.removesuffix(".bias") in capsys.readouterr().out
    assert build_model(model.format(path)).state_dict()[bias].shape == (7,)


def test_a_policy_that_is_about_codecs_brings_them(tmp_path):
    peaks = []
    for named in ([], ["--codecs", "exact"], ["--codecs", "none"]):
        path = tmp_path / "plan.json"
        pooled = ["plan", f"{__name__}:pooled", "--input", "8,3,64,64", "--policy", "gist"]
        main([*pooled, *named, "--save", str(path)])
        peaks.append(Plan.from_json(path).peak_bytes)
    assert peaks[0] == peaks[1] < peaks[2]


def test_a_plan_is_explained_by_layer(tmp_path, capsys):
    path = tmp_path / "plan.json"
    main(["plan", f"{__name__}:chain(6, width=32)", "--input", "512,32", "--policy", "sqrt", "--save", str(path)])
    capsys.readouterr()
    assert main(["explain", str(path), "--top", "2"]) == 0
    head, _, titles, *rows = capsys.readouterr().out.splitlines()
    assert head == Plan.from_json(path).explain().splitlines()[0]
    assert titles.split() == ["layer", "held", "recomputed", "for", "moved", "or", "smaller"]
    assert rows[2].startswith("all layers")
    assert len(rows) == 6
    assert main(["explain", str(path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 12


def test_recipes_alone_lists_them(capsys):
    assert main(["recipes"]) == 0
    assert "digits" in capsys.readouterr().out


def test_a_larger_batch_takes_more_and_an_optimizer_adds_its_state(tmp_path):
    peaks = []
    for batch, optimizer in ((8, "sgd"), (16, "sgd"), (16, "adam")):
        path = tmp_path / "plan.json"
        main(["plan", NAME, "--input", f"{batch},3,24,24", "--optimizer", optimizer, "--save", str(path)])
        peaks.append(Plan.from_json(path).peak_bytes)
    n_bytes = 4 * sum(parameter.numel() for parameter in net().parameters())
    assert peaks[0] < peaks[1]
    counters = 4 * len(list(net().parameters()))
    assert peaks[2] - peaks[1] == 2 * n_bytes + counters


@pytest.mark.slow
def test_the_largest_batch_with_and_without_a_plan(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["max-batch", NAME, "--input", "3,24,24", "--budget", "30MiB", "--save", str(path)]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    size, plain_size = (int(n) for n in re.findall(r"\d+", said.split(":")[1]))
    assert size > plain_size > 0
    assert Plan.from_json(path).peak_bytes <= 30 * 2**20
    limit = ["--budget", "30MiB", "--policy"]
    assert main(["plan", NAME, "--input", f"{plain_size},3,24,24", *limit, "keep"]) == 0
    assert main(["plan", NAME, "--input", f"{plain_size + 1},3,24,24", *limit, "keep"]) == 2


def plain_layers():
    """For the command: layers whose saved tensors are most of a step."""
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())])


LAYERS = ["tests.test_cli:plain_layers", "--input", "4096,32", "--device", "a100", "--optimizer", "sgd"]


def test_a_batch_in_parts_takes_less_and_adds_to_the_gradients_of_the_others(tmp_path):
    peaks = {}
    for number in (1, 2, 4):
        path = tmp_path / "plan.json"
        assert main(["plan", *LAYERS, "--policy", "keep", "--sub-batches", str(number), "--save", str(path)]) == 0
        made = Plan.from_json(path)
        peaks[number] = made.peak_bytes - made.trace.resident_bytes
    assert peaks[1] > 1.9 * peaks[2]
    assert peaks[2] > 1.9 * peaks[4]


@pytest.mark.slow
def test_the_fewest_parts_that_fit_are_found(tmp_path, capsys):
    path = tmp_path / "plan.json"
    limit = ["--budget", "1MiB", "--policy", "keep", "--save", str(path)]
    assert main(["plan", *LAYERS, *limit]) == 2
    told = capsys.readouterr().err
    named = int(re.search(r"Write --sub-batches (\d+), with which it takes", told)[1])
    assert "or raise --budget to " in told
    assert main(["plan", *LAYERS, *limit, "--sub-batches", "auto"]) == 0
    number = int(re.search(r"The batch of 4096 runs as (\d+) sub-batches", capsys.readouterr().out)[1])
    assert named == number
    assert Plan.from_json(path).peak_bytes <= 2**20
    assert main(["plan", *LAYERS, *limit, "--sub-batches", str(number - 1)]) == 2


def test_parts_of_a_network_with_batch_norm_are_planned_with_a_line_on_it(capsys):
    assert main(["plan", NAME, *INPUT, "--sub-batches", "16"]) == 0
    said = capsys.readouterr().out
    assert "The batch of 16 runs as 8 sub-batches of 2 samples or less." in said  # BatchNorm takes no single sample
    assert "3 (BatchNorm2d) normalises each by itself" in said


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "max-batch"])
def test_a_step_that_reads_values_is_planned_with_a_line_on_it(command, capsys):
    said = "The step reads values of tensors (aten._local_scalar_dense.default). They were assumed"
    shape = "3,4" if command == "plan" else "4"
    assert main([command, f"{__name__}:choosy", "--input", shape, "--budget", "1MiB"]) == 0
    assert said in capsys.readouterr().out
    assert main([command, NAME, *(INPUT if command == "plan" else ["--input", "3,24,24"]), "--budget", "1GiB"]) == 0
    assert "reads values" not in capsys.readouterr().out


def test_planning_with_a_rank_plans_the_decomposed_model(tmp_path):
    path = tmp_path / "plan.json"
    main(["plan", NAME, *INPUT, "--rank", "0.25", "--policy", "keep", "--save", str(path)])
    modules = {decision.module for decision in Plan.from_json(path).decisions}
    assert any(name.startswith("2.") for name in modules)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["decompose", "nowhere:net"], "cannot be built"),
        (["decompose", "nowhere:net"], "HINT: Install nowhere, or write module:callable, such as"),
        (["decompose", "json.nothing:net"], "HINT: Write module:callable, such as"),
        (["decompose", "json:dumps"], "cannot be built"),
        (["decompose", f"{__name__}:nett"], "has no attribute 'nett'.\nHINT: Did you mean 'net'?"),
        (["decompose", f"{__name__}:chain(depth=x)"], "The arguments in 'chain(depth=x)' cannot be read"),
        (["decompose", f"{__name__}:chain(depth=open('x'))"], "cannot be read"),
        (["decompose", f"{__name__}:chain(deep=3)"], "unexpected keyword argument 'deep'"),
        (["decompose", "torchvision:resnet81"], "torchvision has no model 'resnet81'.\nHINT: Did you mean 'resnet18'?"),
        (["decompose", "timm:vit_tiny_patch16_22"], "HINT: Did you mean 'vit_tiny_patch16_224'?"),
        (["decompose", f"{__name__}:of_another_torch"], "HINT: This torchvision was built for another torch."),
        (["plan", NAME, *INPUT, "--budget", "8"], "--budget='8' is 8 bytes.\nHINT: Did you mean \"8GiB\"?"),
        (
            ["max-batch", NAME, "--device", "a100"],
            "HINT: Write --input 3,224,224.",
        ),
        (["decompose", "transformers:absent.json"], "cannot be built: FileNotFoundError"),
        (["explain", "absent.json", "--top", "0"], "--top 0 shows nothing"),
        (["decompose", "collections:OrderedDict"], "is a OrderedDict, no nn.Module"),
        (["decompose", NAME, "--rank", "-1"], "rank"),
        (["plan", NAME, *INPUT, "--policy", "sqrtt"], "Did you mean 'sqrt'"),
        (["plan", NAME, *INPUT, "--budget", "1KiB"], "HINT"),
        (["max-batch", NAME, "--input", "3,24,24", "--budget", "1KiB"], "Not even one sample"),
        (["plan", NAME, *INPUT, "--budget", "10KiB"], "the budget of 10KiB: its least peak"),
        (["plan", NAME, *INPUT, "--budget", "much"], "--budget='much' is not an amount of memory"),
        (["plan", NAME, "--input", "16,3,24"], "Sequential does not take 16,3,24:float32: Given groups=1"),
        (["plan", NAME, "--input", "3,wide"], "--input '3,wide' is not a shape"),
        (["plan", NAME, "--input", "3,2:int5"], "no dtype 'int5'"),
        (["plan", NAME, *INPUT, *INPUT], "does not take"),
        (["plan", NAME, "--input", "a=3", "--input", "4"], "do not make a batch"),
        (["plan", NAME], "Neither --input nor --data is given"),
        (["plan", NAME, *INPUT, "--device", "abacus"], "device 'abacus' is not in the table"),
        (["plan", NAME, *INPUT, "--device", "RTX 4090"], "Did you mean 'rtx4090'?"),
        (["plan", NAME, *INPUT, "--rank", "auto"], "--rank auto chooses ranks by training batches"),
        (["max-batch", NAME, "--input", "3,24,24"], "Neither --budget nor --device names memory"),
        (["plan", NAME, "--data", f"{__name__}:Words"], "gives no batch: TypeError"),
        (["plan", NAME, "--data", "nowhere:data"], "data 'nowhere:data' cannot be built: No module named 'nowhere'"),
        (["plan", f"{__name__}:hand_stepped", "--input", "3,4"], "uses manual optimization"),
        (["plan", f"{__name__}:silent", "--input", "3,4"], "which holds no tensor that requires grad"),
        (["plan", NAME, *INPUT, "--sub-batches", "none"], "--sub-batches 'none' is not a number of sub-batches"),
        (["plan", NAME, *INPUT, "--sub-batches", "auto"], "--sub-batches auto needs a budget"),
        (["explain", "absent.json"], "absent.json"),
    ],
)
def test_what_cannot_be_used_is_said_and_ends_with_status_two(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_models_are_found_in_the_current_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_nets.py").write_text(
        "from torch import nn\n\ndef mine():\n    return nn.Sequential(nn.Linear(64, 64))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    assert main(["decompose", "my_nets:mine"]) == 0
    assert "Linear" in capsys.readouterr().out


LIT = f"{__name__}:Lit"


def planned(path, *arguments):
    """The plan that ``ctdr plan`` writes."""
    assert main(["plan", *arguments, "--policy", "keep", "--save", str(path)]) == 0
    return Plan.from_json(path)


def test_a_modules_own_training_step_is_planned_from_pairs_names_or_data(tmp_path):
    path = tmp_path / "plan.json"
    pairs = planned(path, LIT, "--input", "20,32", "--input", "20:int64")
    named = planned(path, LIT, "--input", "x=20,32", "--input", "y=20:int64")
    data = planned(path, LIT, "--data", f"{__name__}:Data")
    single = planned(path, LIT, "--input", "20,32")
    assert pairs.peak_bytes == named.peak_bytes == data.peak_bytes
    assert [d.op for d in pairs.decisions] == [d.op for d in named.decisions] == [d.op for d in data.decisions]
    assert {d.op for d in pairs.decisions} < {d.op for d in single.decisions}
    assert any("log_softmax" in d.op for d in pairs.decisions), "the loss is the step's own, not a sum of outputs"


def test_the_planned_training_step_is_the_recorded_one(tmp_path):
    module = Lit()
    x, y = torch.randn(20, 32), torch.arange(20) % 32

    def step():
        return nn.functional.cross_entropy(module.net(x), y)

    step().backward()
    module.zero_grad(set_to_none=True)
    real = simulate(record(step)).peak_bytes
    found = planned(tmp_path / "plan.json", LIT, "--data", f"{__name__}:Data", "--optimizer", "sgd").peak_bytes
    assert found == pytest.approx(real, rel=0.01)


def test_keywords_of_any_dtype_and_a_loss_of_the_models_own(tmp_path):
    words = ["--input", "input_ids=8,12:int64", "--input", "labels=8,12:int64", "--input", "attention_mask=8,12"]
    assert any("log_softmax" in d.op for d in planned(tmp_path / "plan.json", f"{__name__}:Words", *words).decisions)
    two = planned(tmp_path / "plan.json", f"{__name__}:Two", "--input", "4,8", "--input", "6,8")
    assert sum("tanh" in d.op for d in two.decisions) == 2


def test_a_module_takes_as_many_of_a_loaders_entries_as_its_forward_has_arguments(tmp_path):
    plain = planned(tmp_path / "plan.json", f"{__name__}:linear", "--data", f"{__name__}:Data")
    assert plain.peak_bytes == planned(tmp_path / "plan.json", f"{__name__}:linear", "--input", "20,32").peak_bytes


def linear():
    return nn.Linear(32, 32)


def test_the_largest_batch_of_samples_with_labels_and_of_data(capsys):
    sample = ["--input", "32", "--input", ":int64"]
    for source in (sample, ["--data", f"{__name__}:Data"]):
        assert main(["max-batch", LIT, *source, "--budget", "20MiB", "--policy", "sqrt", "--device", "a100"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first in rest
    assert first.startswith("Largest batch in 20MiB: ")


def test_the_largest_batch_for_all_memory_of_a_card(monkeypatch, capsys):
    """Whose allocator has what CUDA's context leaves."""
    monkeypatch.setattr("ctdr_lightning.command_line.planned.max_batch", lambda *a, **k: pytest.fail(a[3]))
    with pytest.raises(pytest.fail.Exception, match=r"^23\.10 GiB$"):
        main(["max-batch", NAME, "--input", "3,24,24", "--device", "rtx4090"])


def test_help_shows_examples_and_loads_no_torch():
    code = (
        "import sys; from ctdr_lightning.cli import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.endswith("False\n")
    assert all(f"\n  ctdr {command} " in shown for command in COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "found"), [("ctdr ma", "max-batch"), ("ctdr explain --t", "--top")])
def test_tab_completes_commands_and_options(typed, found, tmp_path):
    """As argcomplete asks: by the environment, with the answer in a file."""
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": typed, "COMP_POINT": str(len(typed)), "_ARGCOMPLETE_COMP_WORDBREAKS": ""}
    answer = tmp_path / "answer"
    environment = {**os.environ, **asked, "_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    subprocess.run([sys.executable, "-m", "ctdr_lightning.cli"], env=environment, check=True, capture_output=True)
    assert answer.read_text().strip() == found


def test_the_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"ctdr {ctdr_lightning.__version__}\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("no JSON", "is not a plan: invalid JSON"),
        ("[1, 2]", "is not a plan: it holds a list"),
        ('{"version": 1, "layers": {}}', "is not a plan: it holds the layers of a decomposition"),
        ('{"version": 2, "kind": "trace"}', "is not a plan: it holds a trace"),
        ('{"state": 1}', "is not a plan: it holds JSON of another kind"),
        ('{"kind": "plan", "version": 99}', "is a plan of version 99; this release reads version"),
        ("\x00\x01", "is not a plan"),
    ],
)
def test_what_is_no_plan_is_said_with_its_name(tmp_path, capsys, content, said):
    path = tmp_path / "given.json"
    path.write_text(content)
    assert main(["explain", str(path)]) == 2
    problem, hint = capsys.readouterr().err.splitlines()
    assert problem.startswith(f"ctdr: {str(path)!r} ")
    assert said in problem
    assert hint.startswith("HINT: ")
