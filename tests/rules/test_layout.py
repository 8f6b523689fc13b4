"""The laws of the layout: which folder may know which, so that the listing tells the flow."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest

import ctdr_lightning

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ctdr_lightning"

# From the ground up: a folder imports from itself and from what stands before it.
FLOORS = (
    "basics",
    "decomposition.shapes", "decomposition.algorithms", "decomposition.methods", "decomposition.layers",
    "decomposition.choose", "decomposition.trials", "decomposition",
    "memory.traces", "memory.simulator", "memory.allocator", "memory.plans",
    "memory.bounds", "memory.search", "memory.policies",
    "memory.planner", "memory.account",
    "memory.values", "memory.codecs", "memory.holders", "memory.tape", "memory.recorder", "memory.lazy", "memory.tiles",
    "memory.lean", "memory.compiled",
    "memory.guide", "memory",
    "joint", "pages", "recovery",
    "trainer", "trainer.accuracy", "trainer.training_step", "trainer.reports", "trainer.fit_run",
    "callback", "command_line", "cli",
)  # fmt: skip
PLANNING = (
    "memory.traces", "memory.simulator", "memory.allocator", "memory.plans", "memory.bounds", "memory.search",
    "memory.policies", "memory.account",
)  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    paths = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in PACKAGE.rglob("*.py")}
    return {".".join(parts): path for parts, path in paths.items() if parts[-1] not in ("__init__", "__main__")}


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Every imported module, lazy imports and those for types included."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def own_imports(name: str) -> set[str]:
    """The modules of the package that a module imports from; a folder's own ``__init__`` counts as the folder."""
    found = set()
    for full in imports(modules()[name]):
        if full.startswith("ctdr_lightning."):
            inner = full.removeprefix("ctdr_lightning.")
            while inner and inner not in modules() and not (PACKAGE / inner.replace(".", "/")).is_dir():
                inner = inner.rpartition(".")[0]
            found.add(inner)
    return found - {""}


@cache
def floor_of(name: str) -> int:
    """The index of the longest floor name that the module lies in."""
    fitting = [floor for floor in FLOORS if name == floor or name.startswith(f"{floor}.")]
    assert fitting, f"{name} stands on no floor: name its folder in FLOORS"
    return FLOORS.index(max(fitting, key=len))


def within(name: str, folders: tuple[str, ...]) -> bool:
    return any(name == folder or name.startswith(f"{folder}.") for folder in folders)


@pytest.mark.parametrize("name", sorted(modules()))
def test_arrows_only_go_down(name):
    up = {other for other in own_imports(name) if floor_of(other) > floor_of(name)}
    assert up == set(), f"{name} stands below {up}"


def test_no_module_is_in_a_circle():
    graph = {name: {other for other in own_imports(name) if other in modules()} for name in modules()}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(graph) > 100


def test_the_planning_half_imports_no_torch():
    half = [name for name in modules() if within(name, PLANNING) or name == "memory.planner"]
    assert len(half) > 30
    outside = {f"{name}: {full}" for name in half for full in imports(modules()[name]) if full.split(".")[0] == "torch"}
    assert outside == set()
    below = ("basics", *PLANNING, "memory.planner")
    assert {f"{name}: {other}" for name in half for other in own_imports(name) if not within(other, below)} == set()


def test_what_the_planning_half_imports_of_the_basics_loads_torch_only_where_it_is_used():
    half = [name for name in modules() if within(name, PLANNING) or name == "memory.planner"]
    basics = {other for name in half for other in own_imports(name) if within(other, ("basics",))}
    loaded = {n for name in basics for n in ast.parse(modules()[name].read_text()).body if isinstance(n, ast.Import)}
    assert {alias.name for node in loaded for alias in node.names if alias.name.split(".")[0] == "torch"} == set()


def test_the_two_halves_do_not_know_each_other():
    halves = {"memory": "decomposition", "decomposition": "memory"}
    crossing = [
        f"{name}: {other}"
        for mine, others in halves.items()
        for name in modules()
        for other in own_imports(name)
        if within(name, (mine,)) and within(other, (others,))
    ]
    assert crossing == []


def test_only_the_trainer_folder_and_the_callback_know_lightning():
    allowed = ("trainer", "callback")
    knowing = {
        name
        for name, path in modules().items()
        for full in imports(path)
        if full.split(".")[0] in ("lightning", "pytorch_lightning")
    }
    assert {name for name in knowing if not within(name, allowed)} == set()
    pointing = {name for name in modules() if any(within(other, allowed) for other in own_imports(name))}
    assert {name for name in pointing if not within(name, (*allowed, "cli", "command_line"))} == set()


def test_no_module_bears_the_name_of_a_function_of_its_package():
    shadowed = []
    for name in ["ctdr_lightning", *(f"ctdr_lightning.{name}" for name in modules())]:
        parent, _, child = name.rpartition(".")
        if parent and isinstance(getattr(import_module(parent), child, None), FunctionType):
            shadowed.append(name)
    functions = {name for name in ctdr_lightning.__all__ if isinstance(getattr(ctdr_lightning, name), FunctionType)}
    assert {"decompose", "plan", "record"} <= functions
    assert functions.isdisjoint(path.parent.name for path in PACKAGE.rglob("*.py"))
    assert shadowed == []


def test_the_documents_list_every_folder():
    page = (ROOT / "docs" / "architecture.md").read_text()
    listing = page[page.index("```text") : page.index("```", page.index("```text") + 3)]
    listed = {line.split()[0].rstrip("/") for line in listing.splitlines() if line.split() and "/" in line.split()[0]}
    assert {path.parent.name for path in PACKAGE.rglob("__init__.py")} - {PACKAGE.name} <= listed


def test_every_file_and_folder_that_the_documents_list_is_there():
    page = (ROOT / "docs" / "architecture.md").read_text()
    listing = page[page.index("```text") + len("```text") : page.index("```", page.index("```text") + 3)]
    above: dict[int, Path] = {-1: ROOT}
    for line in listing.strip().splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        above[depth] = above[depth - 1] / line.split()[0]
        assert above[depth].exists(), above[depth]
        for word in line.split()[1:]:
            if word.rstrip(":,;.").endswith(".py"):
                assert (above[depth] / word.rstrip(":,;.")).exists(), word


def test_one_word_means_one_thing():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = [line.split("|")[1] for line in page[page.index("## Words") :].splitlines() if line.startswith("| *")]
    words = [word.strip(" *") for row in rows for word in row.split(",")]
    assert len(words) > 20
    assert len(words) == len(set(words))
