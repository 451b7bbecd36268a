PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.neartie-stamp
# Optional engines; leave out llama or mlx where there is no wheel for the machine: their tests are then skipped.
EXTRAS ?= transformers,llama,mlx,dev
# More words for pip, such as an index that holds the CPU build of torch.
PIP_ARGS ?=
# The seven rows that the README shows; any of conf/variant/ can be named instead.
VARIANTS ?= f32,f64_islands,device_kda,incremental_chunk,bf16_stream,transformers_mirror,oracle
GOLDEN ?= gate
# The shipped model is too small for a second thread to gain, and on a busy machine one waits for the other.
THREADS ?= 1
# Test processes, each on one thread; a file's tests stay together, since they share what is slow to make.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help venv gate test test-slow lint format figures clean

help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

venv: $(STAMP) ## Set-up: .venv with the pinned versions (make venv PYTHON=python3.12 PIP_ARGS=...)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "neartie needs Python 3.11 or later; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

gate: $(STAMP) ## Seven variants against the recorded vLLM tokens, one table
	$(BIN)/neartie gate -m variant=$(VARIANTS) golden=$(GOLDEN) device.threads=$(THREADS)

test: $(STAMP) ## Lint, types and the default tests
	$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

test-slow: $(STAMP) ## The slow tier
	$(BIN)/python -m pytest -m slow

lint: $(STAMP) ## ruff (lint and format) and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP) ## Put imports and layout in order
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

figures: $(STAMP) ## The pictures of docs/ again; needs chromium
	$(BIN)/python docs/figures.py

clean: ## Remove the environment and what tools left; the ledger stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
