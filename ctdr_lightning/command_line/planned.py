"""``ctdr decompose | plan | max-batch | explain``: a model decomposed and planned on tensors without data."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from ctdr_lightning.basics.devices import DEVICES, device_model
from ctdr_lightning.basics.errors import ConfigError, InfeasibleBudgetError
from ctdr_lightning.basics.files import write_text
from ctdr_lightning.basics.units import format_bytes, format_seconds, is_share, parse_budget
from ctdr_lightning.command_line.batches import Input, from_data, from_inputs, resized
from ctdr_lightning.command_line.in_tables import budgets, layers
from ctdr_lightning.command_line.named import build_model
from ctdr_lightning.command_line.pages import write_plan_page
from ctdr_lightning.command_line.steps import step_of
from ctdr_lightning.command_line.sub_batches import parts_in_words, read_number, sub_batch_peaks
from ctdr_lightning.decomposition import METHODS, Report, decompose
from ctdr_lightning.memory import POLICIES, Plan, max_batch, plan, record_fake, simulate
from ctdr_lightning.memory.account.batch import BatchAccount
from ctdr_lightning.memory.allocator.reserved import served_in_words
from ctdr_lightning.memory.codecs import CODECS
from ctdr_lightning.memory.helpful_places import place_that_fits
from ctdr_lightning.memory.holders.base import HOLDERS
from ctdr_lightning.memory.holders.optimizer_bytes import OPTIMIZERS, optimizer_of, predict
from ctdr_lightning.memory.holders.places import Places, codecs_of
from ctdr_lightning.memory.lean.choice import choose_lean
from ctdr_lightning.memory.lean.lean_step import LeanStep
from ctdr_lightning.memory.planner import resolve_budget
from ctdr_lightning.memory.recorder.gpu_workspace import beside_the_step
from ctdr_lightning.memory.recorder.precision import PRECISIONS
from ctdr_lightning.memory.traces.optimizer import NO_OPTIMIZER, OptimizerBytes
from ctdr_lightning.memory.traces.trace import ASSUMED, LEAN, Trace

# Chosen, not tuned: who asks for the largest batch means to train with it. Without a limit ResNet-50 takes 16 plain
# steps' time for its last 15 % of batch.
MOST_TIME = 2.0

if TYPE_CHECKING:
    from ctdr_lightning.trainer.training_step.sub_batches.peaks import SubBatchPeaks


def _decompose(options: argparse.Namespace) -> None:
    report = decompose(build_model(options.model), options.rank, options.method, options.select)
    print(report)
    if options.save:
        write_text(options.save, json.dumps(report.choices.to_dict(), indent=2) + "\n")


def _plan(options: argparse.Namespace) -> None:
    batch = from_data(options.data) if options.data else from_inputs(_inputs(options))
    _check_budget(options)
    asked = options.budget or options.policy or options.save or options.html
    options.policy = options.policy or ("auto" if options.budget else "sqrt")
    codecs = options.codecs or codecs_of(options.policy, budgeted=bool(options.budget))
    places = Places.read(options.offload, options.disk_folder, None if codecs == ["none"] else codecs)
    options.places = places.on("cuda") if (options.device or "").lower() in DEVICES else places
    step = _step(options)
    account, parts = _recorded(options, step, batch)
    if not asked:
        print(f"{parts}{budgets(account.whole)}\n{_assumed(account.step)}", end="")
        print("Write one as --budget; --policy plans without one.")
        return
    try:
        made = plan(account.whole, options.budget, options.policy)
    except InfeasibleBudgetError as error:
        raise _advised(error, account, options, step, batch) from error
    plain = simulate(account.whole)
    lean = account.step.meta.get(LEAN)
    print(parts, f"{lean}\n" if lean else "", sep="", end="")
    print(f"Plain step: peak {format_bytes(plain.peak_bytes)}, {format_seconds(plain.seconds)}.")
    _say(made, options)
    if options.html:
        dense = None
        if step.report is not None:  # the model's own step, to compare with
            whole = argparse.Namespace(**{**vars(options), "rank": None})
            dense = simulate(_recorded(whole, _step(whole), batch)[0].whole)
        write_plan_page(options.html, options.model, made, step.report, dense)


def _advised(
    error: InfeasibleBudgetError, account: BatchAccount, options: argparse.Namespace, step: _Step, batch: Any
) -> InfeasibleBudgetError:
    """The planner's error, with the place, codec or number of sub-batches that would help before its hint."""
    policy, limit_bytes = options.policy, resolve_budget(options.budget, account.step.device).peak_bytes or 0
    found = place_that_fits(account, limit_bytes, options.places, policy, options.device)
    if found is None and options.sub_batches is None:
        print("ctdr: the budget does not fit the whole batch; looking for a number of sub-batches ...", file=sys.stderr)
        found = _sub_batches(options, step, batch).change()
    return error if found is None else error.but_first(found.as_option)


@dataclass(frozen=True)
class _Step:
    """The model as the options decompose it, the account of a batch and the report on its layers."""

    model: nn.Module
    account: Callable[[Any, bool], BatchAccount]
    report: Report | None


def _step(options: argparse.Namespace) -> _Step:
    model, taken, report = _training(options)
    run = step_of(model, spare=bool(options.data))
    limit_bytes = resolve_budget(options.budget, "cpu").peak_bytes if options.budget else None

    def recorded(batch: Any, lean_step: LeanStep) -> BatchAccount:
        trace = record_fake(
            model, batch, lean_step.step(run), device=options.device, precision=options.precision, reads_values=True
        )
        return BatchAccount(options.places.equip(trace, options.device), taken)

    def account(batch: Any, tiles: bool) -> BatchAccount:
        plain, policy = recorded(batch, LeanStep()), options.policy or "auto"
        lean_bytes = limit_bytes if options.rounding else None
        found = choose_lean(model, partial(recorded, batch), lean_bytes, plain=plain, policy=policy, tiles=tiles)
        return found.account if found is not None else plain

    return _Step(model, account, report)


def _recorded(options: argparse.Namespace, step: _Step, batch: Any) -> tuple[BatchAccount, str]:
    """The batch, or the largest of its sub-batches, recorded on fake tensors; and a line on the sub-batches."""
    if options.sub_batches is None:
        return step.account(batch, True), ""
    if options.sub_batches == "auto" and options.budget is None:
        raise ConfigError("--sub-batches auto needs a budget to fit.", "Give --budget, or a number.")
    asked = read_number(options.sub_batches)
    peaks = _sub_batches(options, step, batch)
    number = min((peaks.fewest() or peaks.most) if isinstance(asked, str) else asked, peaks.most)
    options.sub_batches = str(number)  # so that the dense step is split the same way
    return peaks.account(number), parts_in_words(step.model, peaks.n_samples, number)


def _sub_batches(options: argparse.Namespace, step: _Step, batch: Any) -> SubBatchPeaks:
    """The bytes of the batch by the number of its sub-batches."""
    limit_bytes = resolve_budget(options.budget, "cpu").peak_bytes if options.budget else None
    # parts take less time than modules in tiles
    return sub_batch_peaks(step.model, batch, lambda part: step.account(part, False), limit_bytes or 0, options.policy)


def _max_batch(options: argparse.Namespace) -> None:
    sizes = resized(from_data(options.data)) if options.data else partial(from_inputs, _inputs(options))
    if options.budget is None:
        options.budget = _device_budget(options.device)
    _check_budget(options)
    model, taken, _ = _training(options)
    found = max_batch(
        model,
        sizes,
        step_of(model, spare=bool(options.data)),
        options.budget,
        options.policy or "auto",
        optimizer=taken,
        device=options.device,
        precision=options.precision,
        rounding=options.rounding,
        max_slowdown=options.max_slowdown,
    )
    print(f"Largest batch in {options.budget}: {found.size}; {found.plain_size} without a plan.")
    _say(found.plan, options)


def _say(made: Plan, options: argparse.Namespace) -> None:
    print(made.explain().splitlines()[0])
    print(_assumed(made.trace), end="")
    if options.device and options.device != "cpu":
        print(made.reserved)
        if made.budget_bytes:
            trouble = served_in_words(made.trace, made.actions, made.budget_bytes)
            print(trouble or f"Under a limit of {format_bytes(made.budget_bytes)} it serves each step all the same.")
        print(beside_the_step(device_model(options.device)))
    if options.save:
        made.to_json(options.save)


def _assumed(trace: Trace) -> str:
    names = trace.meta.get(ASSUMED)
    said = f"The step reads values of tensors ({names}). They were assumed, as if each number of an activation was 2.\n"
    return said if names else ""


def _inputs(options: argparse.Namespace) -> list[Input]:
    if not options.input:
        raise ConfigError("Neither --input nor --data is given.", f"Write --input {options.shape}.")
    return [Input.read(text) for text in options.input]


def _device_budget(device: str | None) -> str:
    """The memory of the named card that torch's allocator can use, as a budget."""
    if device is None or device == "cpu":
        raise ConfigError("Neither --budget nor --device names memory.", "Write --budget 8GiB, or --device rtx4090.")
    return format_bytes(device_model(device).usable_bytes)


def _check_budget(options: argparse.Namespace) -> None:
    """Refuse a budget that cannot be read before any time is spent; read a share as one of the named card's memory."""
    if options.budget is not None:
        card = options.device is not None and options.device != "cpu"
        total_bytes = device_model(options.device).memory_bytes if card else None
        n_bytes = parse_budget(options.budget, total_bytes=total_bytes, name="--budget")
        options.budget = format_bytes(n_bytes) if is_share(options.budget) else options.budget


def _training(options: argparse.Namespace) -> tuple[nn.Module, OptimizerBytes, Report | None]:
    """The model for training, the bytes of its optimizer, and the report of its decomposition."""
    model = build_model(options.model).train()
    report = None
    if options.rank == "auto":
        raise ConfigError(
            "--rank auto chooses ranks by training batches, and a plan on tensors without data has none.",
            'Give a share, such as --rank 0.25; or train with CTDRCallback(rank="auto", memory_budget="8GiB").',
        )
    if options.rank is not None:
        report = decompose(model, options.rank, options.method, options.select)
    optimizers = [optimizer_of(options.optimizer, [p for p in model.parameters() if p.requires_grad])]
    on_gpu = (options.device or "").lower() in DEVICES  # where torch steps for each by default
    return model, predict(optimizers, foreach=on_gpu) or NO_OPTIMIZER, report


def _explain(options: argparse.Namespace) -> None:
    if options.top is not None and options.top < 1:
        raise ConfigError(f"--top {options.top} shows nothing.", "Write a number of at least 1.")
    print(layers(Plan.from_json(options.plan), options.top))


def _rank(text: str) -> float | int | str:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def add_decompose(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ctdr decompose``."""
    _add_layers(parser, rank=0.5)
    parser.set_defaults(run=_decompose)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ctdr plan``."""
    _add_batch(parser, "shape of the batch, such as 64,3,224,224")
    parser.add_argument(
        "--budget", help="such as 8GiB, or 0.9 of the device's memory; without it and --policy, a table of budgets"
    )
    _add_memory(parser)
    parser.add_argument("--offload", nargs="+", help=f"places for tensors: {', '.join(HOLDERS)}")
    parser.add_argument("--disk-folder", help="folder of the disk's file")
    parser.add_argument(
        "--codecs",
        nargs="+",
        help=f"exact, none, auto or the policy's own by default, or some of {', '.join(CODECS)}",
    )
    parser.add_argument("--sub-batches", metavar="N", help="parts that the batch runs in; auto: the fewest that fit")
    parser.add_argument("--html", help="file for a page on the plan: memory over the step, layers, tensors")
    parser.set_defaults(run=_plan)


def add_max_batch(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ctdr max-batch``."""
    _add_batch(parser, "shape of one sample, such as 3,224,224")
    parser.add_argument("--budget", help="such as 8GiB, or 0.9 of the device's memory; by default what --device has")
    parser.add_argument(
        "--max-slowdown", type=float, default=MOST_TIME, metavar="X",
        help="longest step, in steps of the same batch without a plan; 2 by default",
    )  # fmt: skip
    _add_memory(parser)
    parser.set_defaults(run=_max_batch)


def add_explain(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ctdr explain``."""
    parser.add_argument("plan", help="a plan file")
    parser.add_argument("--top", type=int, metavar="N", help="the largest layers and tensors alone")
    parser.set_defaults(run=_explain)


def _add_batch(parser: argparse.ArgumentParser, shape: str) -> None:
    parser.set_defaults(shape=shape.split()[-1])
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--input", action="append", metavar="[NAME=]SHAPE[:DTYPE]",
        help=f"{shape}; once for each tensor: input_ids=8,128:int64",
    )  # fmt: skip
    source.add_argument(
        "--data", metavar="MODULE:CALLABLE", help="builder of a data module or loader; its first batch is used"
    )


def _add_memory(parser: argparse.ArgumentParser) -> None:
    _add_layers(parser, rank=None)
    parser.add_argument("--policy", help=f"one of {', '.join(POLICIES)}; auto by default where there is a budget")
    parser.add_argument("--device", help="GPU that the step is for, such as rtx4090; this processor by default")
    parser.add_argument("--precision", help=f"{', '.join(PRECISIONS)}; the model's own by default")
    parser.add_argument(
        "--no-rounding", dest="rounding", action="store_false",
        help="make the outputs of large layers and run modules whole, even where the loss is the same up to rounding",
    )  # fmt: skip
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adam", help="whose step counts as well")


def _add_layers(parser: argparse.ArgumentParser, rank: float | None) -> None:
    parser.add_argument(
        "model",
        help="module:callable, torchvision:NAME, timm:NAME or transformers:CONFIG.json; with arguments: 'net(depth=6)'",
    )
    parser.add_argument("--rank", type=_rank, default=rank, help="share of parameters, a rank, vbmf, error=0.05")
    parser.add_argument("--method", default="auto", help=f"auto, or one of {', '.join(METHODS)}")
    parser.add_argument("--select", nargs="+", help="patterns of layer names; ! leaves out")
    parser.add_argument("--save", help="file for the plan, as JSON")
