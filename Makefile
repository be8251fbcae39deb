# Holdfast: set-up, checks, measurements. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV    := .venv
BIN     := $(VENV)/bin
DONE    := $(VENV)/done
EXTRAS  := dev,demo,bench,compressors,secure,mooncake,nixl,object,peers,shell
MINUTES ?=
PYTHON  ?= python3
RESOLUTION ?= highest
BENCH   ?= tiers movement metrics seal codec convert quota pool object files prestage plan calibrate vllm offload serve \
    saves kinds engines transformers sglang traces policies sim

# The tests of what Holdfast promises: formats, names, contracts, the stateful test, past incidents.
PROMISES := tests/blocks tests/codec tests/incidents tests/index tests/plan tests/policy \
    tests/client/test_session.py tests/store/test_fetch.py tests/store/test_stateful.py \
    tests/testing tests/tiers/test_host.py tests/tiers/disk/test_tier.py
# It ends with 3 if pytest itself failed, for example because a worker could not report a test.
ALL_TESTS := $(BIN)/pytest --hypothesis-profile=ci -n 3 --no-loadscope-reorder
OTHER    := build/compatible-$(notdir $(PYTHON))-$(RESOLUTION)

# Compiled once and kept, whatever the environment says: engines and nodes are started all the time.
export PYTHONDONTWRITEBYTECODE :=

# $(call quietly,what,command): a line on screen; the command's output only if it fails.
quietly = echo "set-up: $(1)"; mkdir -p $(DONE); \
	{ $(2); } >$@.log 2>&1 || { cat $@.log; exit 1; }; touch $@

.PHONY: help setup run test quick compatible coverage lint format docs architecture bench peers sglang lmcache \
    soak release clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

run: setup ## set up, then show a real engine getting its context back (holdfast demo)
	@$(BIN)/holdfast demo

test: lint docs ## set up, then every check and all tests but the long ones (make soak)
	@echo "test: pytest"
	@$(ALL_TESTS) || { status=$$?; [ $$status = 3 ] || exit $$status; \
	    echo "test: not a test failed but pytest, as said above; all tests run once more"; \
	    $(ALL_TESTS); }

quick: setup ## only the tests of what Holdfast promises, without engines, in about a minute
	@$(BIN)/pytest -q -n 2 -m 'not vllm' $(PROMISES)

compatible: ## the tests of `quick` with another PYTHON and RESOLUTION of the dependencies
	@$(PYTHON) -m venv $(OTHER) && $(OTHER)/bin/pip install -q uv
	@$(OTHER)/bin/uv pip install -q --python $(OTHER)/bin/python --resolution $(RESOLUTION) \
	    -e '.[dev,secure,shell]'
	@$(OTHER)/bin/pytest -q -n 2 -m 'not vllm' $(PROMISES)

coverage: setup ## all tests with branch coverage: a table, and pages in build/coverage
	@$(ALL_TESTS) --cov --cov-report=term:skip-covered --cov-report=html:build/coverage

lint: setup ## ruff, mypy, pyright, the import contract, spelling
	@echo "lint: ruff";         $(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .
	@echo "lint: mypy, pyright"; $(BIN)/pyright >$(DONE)/pyright.log & types=$$!; \
	    $(BIN)/mypy --no-error-summary; wait $$types || { cat $(DONE)/pyright.log; exit 1; }
	@echo "lint: lint-imports"; $(BIN)/lint-imports --no-logo
	@echo "lint: codespell";    $(BIN)/codespell

format: setup ## put the code in ruff's shape
	@$(BIN)/ruff check --quiet --fix-only . && $(BIN)/ruff format --quiet .

docs: setup ## build the documentation and the man page; a warning is an error
	@echo "docs: sphinx"
	@$(BIN)/sphinx-build -W --keep-going -q -b html docs build/docs
	@$(BIN)/sphinx-build -W --keep-going -q -b man docs build/man

architecture: setup ## rewrite the module list of ARCHITECTURE.md from the docstrings
	@$(BIN)/python tools/architecture.py

bench: setup ## measure this machine, tiers then the engine, and render docs/benchmarks.md
	@missed=0; for what in $(BENCH); do \
	    $(BIN)/holdfast bench $$what --json docs/benchmarks/$$what.json || missed=1; done; \
	    $(BIN)/python tools/benchmarks.py; exit $$missed

peers: setup ## install the servers that `holdfast bench pool` compares with (apt)
	@for package in redis-server libibverbs1; do \
	    if dpkg -s $$package >/dev/null 2>&1; then echo "peers: $$package is there"; \
	    else echo "peers: installing $$package"; \
	        apt-get install -y --no-install-recommends $$package >$(DONE)/peers.log 2>&1 \
	        || { cat $(DONE)/peers.log; exit 1; }; fi; done

sglang: setup ## install SGLang for the CPU in an environment of its own (3 GB), for its long tests
	@echo "sglang: installing, once"; $(BIN)/python -m holdfast_bench.peers.sglang_environment

lmcache: setup ## install LMCache for the CPU in a folder of its own (60 MB), for its tests
	@$(BIN)/python -m holdfast_bench.peers.lmcache_environment

soak: setup ## every campaign at full length, or all for MINUTES; then the long tests
	@mkdir -p build
	@$(BIN)/holdfast soak $(if $(MINUTES),--minutes $(MINUTES)) --json build/soak.json
	@HOLDFAST_SOAK_MINUTES=$(or $(MINUTES),10) \
	    $(BIN)/pytest -m soak --timeout=0 --hypothesis-profile=soak

release: setup ## wheel, source distribution, image, list of components and checksums, in dist
	@rm -rf dist
	@image=$$(command -v podman || command -v docker || true); \
	    $(BIN)/python tools/release.py dist $${image:+--image "$$image"}

clean: ## remove everything that make made, except reports in docs/benchmarks
	rm -rf $(VENV) build dist calibrated.yaml docs/reference/commands.md \
	    .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find src tests tools docs examples -name __pycache__ -prune -exec rm -rf {} +

# Set-up. Each step leaves a stamp and runs again only when what it reads has changed.

setup: $(DONE)/holdfast $(DONE)/triton ## install torch, vLLM, Holdfast and the tools in .venv

$(DONE)/tools:
	@$(call quietly,a virtual environment in $(VENV),\
	    { python3 -m venv $(VENV) || { apt-get update && apt-get install -y python3-venv \
	    && python3 -m venv --clear $(VENV); }; } \
	    && $(BIN)/pip install -U pip uv)

$(DONE)/torch: requirements/torch.txt | $(DONE)/tools
	@$(call quietly,torch for the CPU,$(BIN)/pip install -r $<)

$(DONE)/triton: requirements/triton.txt | $(DONE)/torch
	@$(call quietly,Triton for the tests of the GPU kernels,rm -rf $(VENV)/triton && \
	    $(BIN)/pip install --no-deps --target $(VENV)/triton -r $<)

$(DONE)/vllm: requirements/vllm.txt requirements/vllm-overrides.txt | $(DONE)/torch
	@$(call quietly,vLLM for the CPU,$(BIN)/uv pip install --python $(BIN)/python \
	    --overrides requirements/vllm-overrides.txt -r $<)

$(DONE)/holdfast: pyproject.toml $(DONE)/vllm
	@$(call quietly,holdfast and its tools,$(BIN)/uv pip install --python $(BIN)/python \
	    -e '.[$(EXTRAS)]')
