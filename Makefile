# make run: the main job.  make test: lint, types, architecture, tests.  make slow: long tests.
# make help: all targets.

PYTHON ?= python3
VENV ?= .venv
# constraints.txt pins everything. torch is installed first, so that no other package pulls a second build in.
LOCKED_TORCH := $(shell grep -m1 -o '^torch==[^ ]*' constraints.txt)
TORCH ?= $(LOCKED_TORCH)
# NEWEST=1 installs the newest version of everything but torch: what a scheduled job tries.
NEWEST ?=
UPGRADE := $(if $(NEWEST),--upgrade --upgrade-strategy eager)
# These belong to one torch, and are free beside another.
OF_LOCKED_TORCH := $(if $(filter $(LOCKED_TORCH),$(TORCH)),,|triton|setuptools|(nvidia|cuda)-[^=]*)

BIN := $(VENV)/bin
PINNED := $(VENV)/constraints.txt
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
# Workers and processes of tests would otherwise each compile all that they import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test suite slow exhaustive gpu lint format docs lock clean FORCE
.DEFAULT_GOAL := help

help: ## Show the targets
	@grep -E '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

run: $(VENV)/installed ## Install, then find passkeys in a long document with half of the heads streaming
	$(BIN)/hpu-duo passkey

# A file's tests share what they load, so one worker runs all of a file. Slow ones share less, and differ more.
suite: PYTEST_ARGS ?= -n auto --dist loadfile
slow exhaustive: PYTEST_ARGS ?= -n auto --dist worksteal

# mypy keeps one core busy: the tests have the others meanwhile.
test: $(VENV)/installed-dev ## Install with the development tools, check everything, run the tests
	$(MAKE) --no-print-directory -j 2 lint suite

suite: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(PYTEST_ARGS)

slow: $(VENV)/installed-dev ## Run the tests that take minutes, which test leaves out
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "slow and not exhaustive"

exhaustive: $(VENV)/installed-dev ## Run all tests that take minutes, further cases of what slow tries included
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m slow

# What runs on a CUDA device, in minutes. With packages that are there already: make gpu BIN=folder
GPU_TESTS := $(wildcard tests/*/test_triton_*.py) tests/engine/test_on_cuda.py tests/modeling/test_kv_budget_triton.py \
  tests/graphs/test_capture_backends.py tests/graphs/test_step_inputs.py tests/watch/test_captured_engines.py \
  tests/latents tests/recurrent tests/offload tests/modeling/test_shared_keys.py tests/kernels_ref/test_formats.py
GPU_ARGS ?=
gpu: PYTEST_ARGS ?= -n 8 --dist worksteal
gpu: ## Run tests and benchmarks on a CUDA device; its report is in benchmarks/results
	$(BIN)/python -m pytest $(PYTEST_ARGS) $(GPU_TESTS)
	$(BIN)/python -m benchmarks.gpu $(GPU_ARGS)

lint: $(VENV)/installed-dev ## Formatting, lint, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/installed-dev ## Format and sort imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/installed-docs ## Build the pages of docs/ as a site, build/site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

lock: | $(BIN)/python ## Write the newest versions that fit into constraints.txt
	$(BIN)/python -m pip install -q uv
	echo '$(TORCH)' > $(VENV)/torch.txt
	{ sed '/^[^#]/d' constraints.txt; $(BIN)/uv pip compile -q --universal --python-version 3.10 --no-annotate --no-header \
	  --upgrade --extra dev --extra docs -c $(VENV)/torch.txt pyproject.toml; } > $(VENV)/lock.txt
	mv $(VENV)/lock.txt constraints.txt

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/installed: pyproject.toml $(PINNED) $(if $(NEWEST),FORCE)
	$(BIN)/python -m pip install -q -c $(PINNED) "$(TORCH)"
	$(BIN)/python -m pip install -q $(UPGRADE) -c $(PINNED) -e .
	@touch $@

# pip compiles 300 MB of sources one file at a time. Here all cores do, torch's while pip installs the rest; what few
# tests import, and tests of packages, are left out.
RARE := /(tests|transformers/models|chardet|fontTools|jieba|mypy|pip|pygments|setuptools|ray/(data|rllib|train|tune))/
COMPILE = $(BIN)/python -m compileall -q -x '$(RARE)' >/dev/null 2>&1
$(VENV)/installed-dev: pyproject.toml $(PINNED) $(if $(NEWEST),FORCE)
	$(BIN)/python -m pip install -q --no-compile -c $(PINNED) "$(TORCH)"
	@$(COMPILE) $(VENV)/lib/*/site-packages/torch & \
	  $(BIN)/python -m pip install -q --no-compile $(UPGRADE) -c $(PINNED) -e '.[dev]'; status=$$?; wait; exit $$status
	@$(COMPILE) -j 0 $(VENV)/lib || true
	@touch $@ $(VENV)/installed

$(VENV)/installed-docs: pyproject.toml $(PINNED) $(if $(NEWEST),FORCE) | $(VENV)/installed
	$(BIN)/python -m pip install -q $(UPGRADE) -c $(PINNED) -e '.[docs]'
	@touch $@

# Rewritten only when a wanted version changes, so that a second make installs nothing.
$(PINNED): FORCE | $(BIN)/python
	@{ [ "$(NEWEST)" ] || grep -Ev '^(#|(torch$(OF_LOCKED_TORCH))==)' constraints.txt; echo '$(TORCH)'; } > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "expected Python 3.10 to 3.12, got $$($(PYTHON) --version); name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@# Older ones compare versions of all packages for a minute, newer ones print notes of builds.
	$(BIN)/python -m pip install -q 'pip>=25,<26'
