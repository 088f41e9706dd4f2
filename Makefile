# The one door to everything: `make` lists the commands. Progress goes to stderr, results to stdout.
#   PYTHON=         the Python (3.11 or newer) that the environments are made from; default python3
#   ORBITKV_CACHE=  where what takes long to make is kept (the engine, Kubernetes, images); default ~/.cache/orbitkv

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup engine lint generate test bench demo demo-k8s cluster-programs cluster cluster-down images clean

PYTHON ?= python3
export PYTHON
python := .venv/bin/python

help: ## list the commands
	@echo "OrbitKV: make COMMAND"
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/\1 \2/p' Makefile | while read -r name does; do printf '  %-16s %s\n' "$$name" "$$does"; done

setup: ## make .venv: OrbitKV and the tools that check it
	@tools/dev_env.sh

engine: setup ## make the environment of the real vLLM (CPU): minutes, 6 GB, outside the tree, once
	@$(python) -m tools.engine_env

lint: setup ## style, types, and that generated pages are up to date
	@status=0; \
	$(python) -m ruff check . || status=1; \
	$(python) -m ruff format --check . || status=1; \
	$(python) -m mypy || status=1; \
	$(python) -m tools.generate --check || status=1; \
	exit $$status

generate: setup ## write the pages and tables that are made from the code
	@$(python) -m tools.generate

test: setup ## run the tests; ONLY=node_agent (protocol, client, vllm, guards, ...) or ONLY=PATH for a part
	@$(python) -m tools.run_tests $(if $(ONLY),--only '$(ONLY)')

bench: setup ## measure; NAME=query for one bench, JSON=1 for one JSON object as the last line
	@$(python) -m bench $(if $(NAME),'$(NAME)') $(if $(JSON),--json)

demo: setup ## a real engine with OrbitKV, start to end, on a GPU if there is one; ENGINE=vllm, JSON=1 for one JSON object as the last line
	@ORBITKV_TEST_DEVICE=$$($(python) -m tools.engine_env --print-device) && export ORBITKV_TEST_DEVICE && \
	ORBITKV_ENGINE_PYTHON=$$($(python) -m tools.engine_env | tail -1) && export ORBITKV_ENGINE_PYTHON && \
	$(python) -m tools.demo $(if $(ENGINE),--engine '$(ENGINE)') $(if $(JSON),--json)

demo-k8s: setup ## the same on a real Kubernetes of this machine, by one annotation (needs root); ENGINE=vllm, JSON=1
	@$(python) -m tools.demo_k8s $(if $(ENGINE),--engine '$(ENGINE)') $(if $(JSON),--json)

cluster-programs: setup ## build Kubernetes, Helm and the like from Go modules: 20 minutes, outside the tree, once
	@$(python) -m e2e.cluster build

cluster: setup ## start a real Kubernetes of two nodes on this machine, with OrbitKV installed (needs root and Go)
	@$(python) -m e2e

cluster-down: setup ## end that Kubernetes and remove all of it
	@$(python) -m e2e.cluster down

images: setup ## build the container images (needs root), and load them into the cluster if it runs
	@$(python) -m images $(if $(REGISTRY),--push $(REGISTRY))

clean: ## remove what was made in the tree (what takes long to make stays in ORBITKV_CACHE)
	@rm -rf .venv .venv.lock build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "The engine's environment and the cluster's programs were left in $${ORBITKV_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/orbitkv}"
