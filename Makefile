# Everything a person types here. Each target first brings .venv up to date, which takes no time when it is.
#   PYTHON=/path/to/python3.11   which Python to build .venv from
#   EXTRAS="gpu bench"           extras of pyproject.toml to install (cpu and dev come with the lock)
#   DORA_TORCH_INDEX=URL         where pip looks for torch besides its usual index

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

EXTRAS ?=
VENV := .venv/bin
# A broken .venv (its Python was removed) has a dangling link here, which make takes for a missing file.
SETUP_PYTHON = $(if $(wildcard $(VENV)/python),$(VENV)/python,"$$(scripts/find-python)")
export PYTHONUNBUFFERED := 1

.PHONY: help setup demo docs check lint types fast test accept

help: ## what can be made
	@sed -n 's/^\([a-z]*\):[^#]*## /\1: /p' Makefile

setup: ## the environment in .venv, as requirements.lock has it
	@$(SETUP_PYTHON) -I scripts/setup.py $(EXTRAS)

demo: setup ## a real model learns; then see runs/
	@echo "demo: dora-rl train examples/quickstart.toml"
	@$(VENV)/dora-rl train examples/quickstart.toml

docs: setup ## docs/configuration.md, from the code
	@$(VENV)/python -m dora_rl.cli.reference > docs/configuration.md

check: setup ## lint, types and fast tests
	@echo "check: ruff, then mypy beside the fast tests"
	@$(MAKE) lint
	@$(MAKE) -j2 --output-sync=target types fast

lint:
	@$(VENV)/ruff check --quiet .
	@$(VENV)/ruff format --check --quiet . || { echo "run: .venv/bin/ruff format ."; exit 1; }

types:
	@$(VENV)/mypy --no-error-summary

fast:
	@OMP_NUM_THREADS=1 DORA_TESTS=quick $(VENV)/pytest -q -m "not engine"

test: setup ## everything that must hold: lint, types, every property in full, real engines
	@echo "test: ruff and mypy, then all tests, those with real engines last"
	@$(MAKE) lint
	@$(MAKE) types
	@OMP_NUM_THREADS=1 $(VENV)/pytest -q -m "not engine"
	@$(VENV)/pytest -q -m engine --durations=5

accept: setup ## make accept STEP=n: measure what step n must show, into docs/results/step-n/ (ONLY="LINE ...": these lines)
	@test -n "$(STEP)" || { echo "accept: needs STEP=n, for example make accept STEP=1" >&2; exit 2; }
	@echo "accept: measuring step $(STEP)"
	@$(VENV)/python -m acceptance --step $(STEP) $(if $(ONLY),--only $(ONLY))
