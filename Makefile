# Each target makes or refreshes .venv by itself. PYTHON=... names another interpreter than python3.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/retoma-installed

.PHONY: train test soak bench lint up down clean help
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-6s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(INSTALLED) ## train the example job through the local stack, which is started if needed
	@$(BIN)/retoma train training/jobs/mnist_cnn.yaml

test: $(INSTALLED) ## run all tests; most of the time some of them wait for servers
	@$(BIN)/python -m pytest -n 3 --dist loadgroup

soak: $(INSTALLED) ## the tests that take many minutes
	@$(BIN)/python -m pytest -m soak

PEERS := $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile --no-deps
bench: $(INSTALLED) ## measure the engine beside its peers, 22 minutes; writes benchmarks/results/
	@$(PEERS) -r requirements-bench.lock || grep -v '^#' requirements-bench.lock | xargs -n 1 sh -c '$(PEERS) "$$0" || true'
	@$(BIN)/python -m benchmarks

lint: $(INSTALLED) ## style, types and the layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

up: $(INSTALLED) ## start the local stack
	@$(BIN)/retoma up

down: $(INSTALLED) ## stop the local stack
	@$(BIN)/retoma down

clean: ## stop the local stack; remove .venv and caches, but neither runs nor checkpoints (.retoma)
	-@if [ -x $(BIN)/retoma ]; then $(BIN)/retoma down; fi
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml requirements.lock .ci/setup
	@PYTHON=$(PYTHON) .ci/setup
