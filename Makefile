# `make train` and `make test` are all that a fresh machine needs: each makes .venv, installs into it and runs.
# A second call reuses .venv until pyproject.toml or constraints.txt changes. `make test-oldest` has an environment of its own.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
# Options for `pip install torch` alone, such as the index that holds the build for this machine's accelerator.
TORCH_PIP_ARGS ?=
# Test processes, and the threads of each; a rank that a test starts has as many.
WORKERS ?= 2
THREADS ?= 1
ARGS ?=

# Compiled modules are kept, whatever the shell says: else each of the many processes of the tests compiles them anew.
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
OLDEST := .venv-oldest
OLDEST_STAMP := $(OLDEST)/.installed-axolotl
# axolotl, for its plugins' base and commands and its Trainer, and what these import of what it asks for; the rest is gigabytes.
AXOLOTL := axolotl addict colorama numba llvmlite
# LLaMA-Factory, for the registry and the trainer of its v1, and what these import of what it asks for.
LLAMAFACTORY := llamafactory antlr4-python3-runtime omegaconf torchdata
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# Variables that a command to go on with must name again, if they were given.
SET := PYTHON VENV CONSTRAINTS TORCH_PIP_ARGS

.DEFAULT_GOAL := help
.PHONY: help train test test-all test-oldest docs lint style format clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo '  Variables: ARGS="--method dense" (passed on by train and test), PYTHON, VENV, WORKERS, THREADS, TORCH_PIP_ARGS'

train: $(STAMP)  ## Fine-tune: the built-in example, or what ARGS asks for
	@SLIVERTUNE_MAKE='make$(if $(filter $(CURDIR),$(PWD)),, -C $(CURDIR)) train $(strip $(foreach name,$(SET),$(if $(filter command,$(origin $(name))),$(name)=$($(name)))))' \
		$(BIN)/slivertune train $(ARGS)

test: $(if $(strip $(ARGS)),$(DEV_STAMP),style)  ## Lint, type-check and run the tests, but for the slow ones; ARGS=path: pytest alone
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder -m "not slow" $(ARGS)

test-all: style $(OLDEST_STAMP)  ## Run every test of a clean tree, in parts, and record it; ARGS="ranks planning" runs these parts
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m tests.full_run --workers $(WORKERS) $(ARGS)

test-oldest: $(OLDEST_STAMP)  ## Run the tests that are not slow with the oldest versions, in .venv-oldest
	OMP_NUM_THREADS=$(THREADS) $(OLDEST)/bin/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder -m "not slow" $(ARGS)

docs: $(DEV_STAMP)  ## Build the pages of docs/ as a site, build/docs/index.html
	@$(BIN)/python -m sphinx -q -W -b html docs build/docs
	@echo 'The site is build/docs/index.html'

lint: style  ## Lint and type-check
	$(BIN)/mypy

style: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV_STAMP)  ## Sort imports and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environments, caches and built packages
	rm -rf $(VENV) $(OLDEST) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone, so that TORCH_PIP_ARGS reaches no other package; a whole environment is used again as it is,
# a broken one (its Python is gone, or it was interrupted before it had pip) is made anew.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("slivertune needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo 'Installing into $(VENV); the first time this takes minutes'
	@$(PIP) install $(TORCH_PIP_ARGS) --constraint $(CONSTRAINTS) torch
	@$(PIP) install --constraint $(CONSTRAINTS) --editable '.[all]'
	@touch $@

# What only tests and lint need comes on top.
$(DEV_STAMP): $(STAMP)
	@$(PIP) install --constraint $(CONSTRAINTS) --editable '.[all,dev]'
	@touch $@

$(OLDEST_STAMP): pyproject.toml constraints-oldest.txt
	@$(MAKE) --no-print-directory VENV=$(OLDEST) CONSTRAINTS=constraints-oldest.txt $(OLDEST)/.installed-dev
	@$(OLDEST)/bin/python -m pip --quiet --disable-pip-version-check install --constraint constraints-oldest.txt --no-deps $(AXOLOTL) $(LLAMAFACTORY)
	@touch $@
