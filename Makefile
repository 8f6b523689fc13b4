# make demo | make test | make test-slow | make docs | make bench. Each makes .venv and installs what it needs, once.
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q -c constraints.txt
MADE_FROM := constraints.txt pyproject.toml

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-exhaustive test-browser lint docs bench clean

help:
	@echo "make demo       dense vs CTDR on handwritten digits: a table and outputs/demo/memory.png"
	@echo "make test       lint, types and tests"
	@echo "make test-slow  the tests that take seconds each, and longer"
	@echo "make test-exhaustive  rows of long tables of which CI has a sample, and the longest runs: before a release"
	@echo "make test-browser  the HTML report in a real Chromium"
	@echo "make docs       the documentation, in site/"
	@echo "make bench      all tables against the peers, and outputs/bench/bench.json, on few nets: 40 minutes"
	@echo "                BENCH='engine decompose' runs some, BENCH=--full those of the documents, in hours"

demo: $(VENV)/.for-demo
	$(BIN)/python -m ctdr_recipes.demo $(DEMO_ARGS)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test-slow: $(VENV)/.for-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m 'slow and not exhaustive'

test-exhaustive: $(VENV)/.for-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m exhaustive

test-browser: $(VENV)/.for-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser tests/pages

lint: $(VENV)/.for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.for-docs
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.for-tests
	PYTHONPATH=.:$(VENV)/models $(BIN)/python -m benchmarks $(BENCH)

clean:
	rm -rf $(VENV) site dist outputs multirun .mypy_cache .ruff_cache .pytest_cache

$(VENV)/.for-demo: $(MADE_FROM)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "constraints.txt is for Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (some minutes the first time) ..."
	$(PIP) -e '.[recipes]'
	@touch $@

# torchvision and timm go without their dependencies, which are here already (resolving them anew may replace torch), and
# into a folder that only pytest looks into: a torchvision that does not match torch breaks every `import lightning`.
$(VENV)/.for-tests: $(VENV)/.for-demo
	$(PIP) -e '.[recipes,slurm,optuna,dev]' transformers
	$(PIP) --no-deps --target $(VENV)/models torchvision timm
	@touch $@

$(VENV)/.for-docs: $(VENV)/.for-demo
	$(PIP) -e '.[docs]'
	@touch $@
