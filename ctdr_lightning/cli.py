# PYTHON_ARGCOMPLETE_OK
"""The command ``ctdr``: decompose and plan a model without training it, and without the memory that it would take.

A command's arguments name policies, methods and codecs, whose modules import torch. So they are added once the command
is chosen, and ``ctdr --help`` takes a tenth of a second.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from ctdr_lightning import __version__
from ctdr_lightning.basics.errors import CTDRError, meant

EXAMPLES = """\
examples:
  ctdr decompose torchvision:resnet18 --rank 0.25 --save layers.json
  ctdr plan torchvision:resnet50 --input 64,3,224,224 --device rtx4090
  ctdr plan torchvision:resnet50 --input 64,3,224,224 --device rtx4090 --budget 3GiB --save plan.json
  ctdr plan my_project:bert --input input_ids=8,128:int64 --input attention_mask=8,128:int64 --budget 2GiB
  ctdr plan my_project:LitNet --data my_project:DigitsData --budget 2GiB
  ctdr max-batch torchvision:resnet50 --input 3,224,224 --device a100 --precision bf16-mixed
  ctdr explain plan.json --top 10
  ctdr report outputs/digits -o report.html
  ctdr recipes run digits ctdr.rank=0.1

A model is named module:callable, with arguments where it takes some: 'my_project:net(depth=6)'; the callable is
imported, from the current folder too. torchvision:NAME, timm:NAME and transformers:CONFIG.json are models of these
libraries. A LightningModule runs its own training_step.
"""

# By command: the module and function that add its arguments, and its help.
COMMANDS = {
    "decompose": ("planned", "add_decompose", "show the decomposition of each layer"),
    "plan": ("planned", "add_plan", "plan the memory of a step on fake tensors: no GPU, no memory"),
    "max-batch": ("planned", "add_max_batch", "find the largest batch for a budget, on fake tensors too"),
    "explain": ("planned", "add_explain", "explain a saved memory plan, by layer and by tensor"),
    "report": ("pages", "add_report", "write an HTML page on a run, on several, or on a saved plan"),
    "recipes": ("recipe_commands", "add_recipes", "list, copy or run the recipes: training by config, the demo"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The command line after ``ctdr``; None takes the process's.

    Returns:
        The exit status: 0, or 2 after an error that the user can mend.
    """
    parser = _parser()
    with suppress(ImportError):
        from argcomplete import autocomplete

        autocomplete(parser)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except CTDRError as error:
        said = f"ctdr: {error}".replace("memory_budget", "--budget").replace("max_slowdown=", "--max-slowdown ")
        print(said, file=sys.stderr)  # as the arguments are named here
        return 2
    return 0


class _Command(argparse.ArgumentParser):
    """A command whose arguments are added when it is chosen."""

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        """Add the arguments, once, and parse."""
        if self.prog.split()[1:] and (added := COMMANDS.get(self.prog.split()[-1])) and self.get_default("run") is None:
            module, function, _ = added
            getattr(import_module(f"ctdr_lightning.command_line.{module}"), function)(self)
        options, unknown = super().parse_known_args(*given, **named)
        names = [name for action in self._actions for name in action.option_strings]
        near = [meant(name.partition("=")[0], names) for name in unknown if name.startswith("--")]
        if any(near):
            self.error(f"unrecognized arguments: {' '.join(unknown)}. {''.join(near).strip()}")
        return options, unknown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ctdr",
        description=(__doc__ or "").split("\n\n")[0].replace("``", ""),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ctdr {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=_Command)
    for name, (_, _, said) in COMMANDS.items():
        commands.add_parser(name, help=said)
    return parser


if __name__ == "__main__":
    sys.exit(main())
