"""The rules of the code base, as tests: what a reviewer should never have to say twice."""

import ast
import re
import subprocess
import sys
import zipfile
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import ctdr_lightning
from ctdr_lightning.basics.devices import DEVICES

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "ctdr_lightning").rglob("*.py"))
KNOWN = ("decompose", "plan", "max-batch", "explain", "recipes", "report")
PRODUCT = PACKAGE + sorted((ROOT / "recipes").rglob("*.py")) + sorted((ROOT / "benchmarks").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
CORE = [path for path in PACKAGE if {"basics", "decomposition", "joint", "memory", "pages"} & set(path.parts)]
MOST_LINES_IN_A_FILE = 400
MOST_LINES_IN_A_FUNCTION = 50


@cache
def parsed(path):
    return ast.parse(path.read_text())


def functions(path):
    return [node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def where(path, node):
    return f"{path.relative_to(ROOT)}:{node.lineno} {getattr(node, 'name', '')}"


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def matches(paths, pattern):
    return [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_there_is_something_to_check():
    assert len(PACKAGE) > 5
    assert len(CORE) > 3


def test_files_are_short():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in PRODUCT}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES_IN_A_FILE} == {}


@pytest.mark.slow
def test_functions_are_short():
    def length(node):
        docstring = ast.get_docstring(node, clean=False) or ""
        return node.end_lineno - node.lineno + 1 - docstring.count("\n")

    long = [where(p, f) for p in PRODUCT for f in functions(p) if length(f) > MOST_LINES_IN_A_FUNCTION]
    assert long == []


def test_every_function_says_what_it_returns():
    assert [where(p, f) for p in PACKAGE for f in functions(p) if f.returns is None and f.name != "__init__"] == []


def public_definitions(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from public_definitions(child)


def test_everything_public_has_a_docstring():
    bare = [str(path.relative_to(ROOT)) for path in PRODUCT if not ast.get_docstring(parsed(path))]
    bare += [where(p, d) for p in PACKAGE for d in public_definitions(parsed(p)) if not ast.get_docstring(d)]
    assert bare == []


def test_torch_load_reads_weights_only():
    def is_torch_load(node):
        return isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"

    def is_safe(call):
        return any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in call.keywords)

    calls = [(path, node) for path in PRODUCT for node in ast.walk(parsed(path)) if is_torch_load(node)]
    assert [where(path, call) for path, call in calls if not is_safe(call)] == []


def test_nothing_evaluates_text_or_unpickles():
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    found = []
    for path in PRODUCT:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
                found.append(where(path, node))
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [where(path, node) for name in names if name.partition(".")[0] in forbidden]
    assert found == []


OWNERS = "trainer|pl_module|strategy|logger|fit_loop|epoch_loop|val_loop|loop|precision_plugin|datamodule|lightning"
MODULES = "from (?:lightning|pytorch_lightning)"
PRIVATE = rf"\b(?:{OWNERS})\._[a-z]|{MODULES}[\w.]*\._|{MODULES}.*import _"


def test_no_private_attribute_of_lightning_is_used():
    for sample in ("trainer._logger_connector", "from lightning.pytorch._private import x", "from lightning import _x"):
        assert re.search(PRIVATE, sample)
    assert matches(PRODUCT, PRIVATE) == []


def test_type_ignores_carry_a_code_and_no_work_is_left_for_later():
    assert matches(PRODUCT + TESTS, r"type: ig" r"nore(?!\[)") == []
    assert matches(PRODUCT, r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b") == []


def test_no_test_is_skipped():
    """But those of the virtual GPU, which wants a compiler."""
    needing_none = [path for path in TESTS if path != ROOT / "tests/virtual_cuda/conftest.py"]
    assert matches(needing_none, r"pytest\.(mark\.)?(sk" r"ip|skip" r"if|xf" r"ail|import" r"orskip)\b") == []


def loaded_after_importing(modules):
    code = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.slow
def test_the_core_loads_neither_lightning_nor_hydra():
    loaded = loaded_after_importing(["ctdr_lightning", *map(module_name, CORE)])
    assert "torch" in loaded
    assert loaded.isdisjoint({"lightning", "pytorch_lightning", "hydra", "omegaconf", "matplotlib", "torchvision"})


def test_the_package_never_imports_hydra():
    assert matches(PACKAGE, r"^\s*(import|from) (hydra|omegaconf)\b") == []


def test_public_names_exist():
    missing = [name for name in ctdr_lightning.__all__ if not hasattr(ctdr_lightning, name)]
    assert missing == []
    assert "CTDRCallback" in ctdr_lightning.__all__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_typed_package_the_recipes_and_nothing_else(wheel):
    names = set(wheel.namelist())
    recipes = {str(path.relative_to(ROOT / "recipes")) for path in (ROOT / "recipes").rglob("*.py")}
    configs = {f"ctdr_recipes/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert len(configs) > 15
    package = {str(path.relative_to(ROOT)) for path in PACKAGE}
    assert package | recipes | configs | {"ctdr_lightning/py.typed"} <= names
    assert {name.partition("/")[0].split("-")[0] for name in names} == {"ctdr_lightning", "ctdr_recipes"}


def test_version_and_licence_agree_everywhere(wheel):
    metadata = next(wheel.read(n).decode() for n in wheel.namelist() if n.endswith("METADATA"))
    version = ctdr_lightning.__version__
    assert f"\nVersion: {version}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_constraints_pin_what_pyproject_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))
    asked = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    for requirement in map(Requirement, asked):
        pin = pins.get(requirement.name.lower())
        assert pin, f"{requirement.name} is not pinned in constraints.txt"
        assert pin in requirement.specifier, f"{requirement.name}=={pin} is outside {requirement.specifier}"


def test_the_repositorys_address_is_that_of_pyproject():
    address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    assert f'pip install "git+{address}"' in (ROOT / "README.md").read_text()
    assert f"\nrepo_url: {address}\n" in (ROOT / "mkdocs.yml").read_text()


def test_the_versions_of_the_questions_page_are_those_of_pyproject_and_constraints():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {r.name.lower(): r.specifier for r in map(Requirement, project["dependencies"])}
    asked["python"] = SpecifierSet(project["requires-python"])
    lines = (ROOT / "constraints.txt").read_text().lower().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line) | {"python": "3.11"}
    rows = re.findall(
        r"^\| (\w+) \| ([\d.]+) or newer.*? \| ([\d.]+)", (ROOT / "docs/faq.md").read_text(), re.MULTILINE
    )
    assert len(rows) == 6
    for name, least, tested in rows:
        key = {"hydra": "hydra-core"}.get(name.lower(), name.lower())
        assert f">={least}" in str(asked[key]).split(","), name
        assert tested.rstrip(".") == pins[key], name


def test_the_commands_page_lists_every_card():
    page = (ROOT / "docs/command.md").read_text()
    assert len(DEVICES) >= 25
    assert [name for name in DEVICES if f"`{name}`" not in page] == []


def code_blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_commands_in_the_documents_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shell = "\n".join(block for path in DOCUMENTS for block in code_blocks(path, "bash"))
    asked = re.findall(r"^make ([\w-]+)", shell, re.MULTILINE)
    assert {"demo", "test"} <= set(asked) <= targets
    modules = re.findall(r"^python -m ([\w.]+)", shell, re.MULTILINE)
    assert [name for name in modules if find_spec(name) is None] == []
    assert set(re.findall(r"^ctdr ([\w-]+)", shell, re.MULTILINE)) <= set(KNOWN)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_python_in_the_documents_parses_and_imports_what_exists(path):
    for block in code_blocks(path, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ctdr_lightning"):
                module = import_module(node.module)
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_links_and_pictures_in_the_documents_lead_somewhere():
    broken = []
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            if "://" not in target and not target.startswith("mailto:") and not (path.parent / target).exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert broken == []
