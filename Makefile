# The two that matter: `make demo` and `make test`. Everything is set up on the way, once.
SHELL := /bin/bash
VENV := .venv
RUN := $(VENV)/bin/python -m
PYTEST := $(RUN) pytest --durations=15
SOAK_SECONDS ?= 600
SOAK_SEED ?=
BENCH_FILE ?= .build/bench.json

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast soak bench lint format lock clean clean-all

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@echo
	@echo "Can be set: PYTHON (which Python makes $(VENV)), CC, TORCH_PIP_ARGS (how pip finds torch), ARGS (for pytest), SOAK_SECONDS, SOAK_SEED, BENCH_FILE."

setup: ## virtual environment, torch, vLLM, this package and its native core; about 4 minutes the first time
	@scripts/setup.sh

demo: setup ## two vLLM engines and a router on this machine, a few prompts, a table
	@$(VENV)/bin/pushkv demo

test: lint ## everything: linters and all tests, real vLLM engines among them
	$(PYTEST) $(ARGS)

test-fast: setup ## the tests that start no vLLM
	$(PYTEST) -m "not vllm" $(ARGS)

soak: setup ## two engines under random trouble for SOAK_SECONDS (600); a failure names its seed, SOAK_SEED repeats it
	$(RUN) tests.soak --seconds $(SOAK_SECONDS) $(if $(SOAK_SEED),--seed $(SOAK_SEED))

bench: setup ## KV transfers between processes of this machine beside NIXL and memcpy, about 3 minutes; rows go to BENCH_FILE
	@mkdir -p $(dir $(BENCH_FILE))
	$(RUN) benchmarks.transfer --json $(BENCH_FILE)

lint: setup ## ruff, mypy and the import contract
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy
	@mkdir -p .build && $(VENV)/bin/lint-imports --no-logo --cache-dir .build/import-linter

format: setup ## let ruff put the code in order
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

lock: setup ## write requirements/*.txt from what is installed in the environment
	$(VENV)/bin/python scripts/lock.py

clean: ## remove what was built, cached and logged; keep the environment
	rm -rf .build build pushkv-logs .ruff_cache .hypothesis *.egg-info $(VENV)/.setup/package
	find neuron_pushkv gpu_compat tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
	find neuron_pushkv -name '_*.so' -delete

clean-all: clean ## remove the environment too
	rm -rf $(VENV)
