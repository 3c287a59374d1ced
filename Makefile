# Everything sets itself up in .venv: a machine needs only Python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS := all,dev
PRESET ?= cartpole
PIP := $(BIN)/pip --disable-pip-version-check
# Beam's local portable runner, of the Beam version that constraints.txt pins.
PRISM_VERSION = v$(shell sed -n 's/^apache-beam==//p' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help install train test check bench chaos cluster docs prism clean

help: ## Show the targets
	@grep -E '^[a-z]+:.*##' Makefile | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..."; exit 2; }
	@test -x $(BIN)/python || { echo "Creating $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@echo "Installing into $(VENV) (the first time takes 2-4 minutes: PyTorch is large) ..."
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@

install: $(READY) ## Install everything into .venv

train: $(READY) ## Train the preset (PRESET=cartpole) with a real broker and every role
	@$(BIN)/gorila train $(PRESET)

test: $(READY) ## All tests, the real broker included
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

check: $(READY) ## Format, lint, types, import rules, generated documents, deploy manifests
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports
	@$(BIN)/python -m gorila.generated_docs --check
	@$(BIN)/python -m deploy.build --check
	@$(BIN)/python -m pytest tests/unit/test_deploy_*.py

docs: $(READY) ## Regenerate the documents that come from code
	@$(BIN)/python -m gorila.generated_docs
	@$(BIN)/python -m deploy.build

bench: $(READY) ## Smoke run of every benchmark; figures: python -m benchmarks.NAME
	@$(PIP) install --quiet --constraint constraints.txt --editable '.[bench]'
	@for file in benchmarks/[a-z]*.py; do name=$$(basename $$file .py); echo "== $$name"; $(BIN)/python -m benchmarks.$$name --quick || exit 1; done

prism: ## Build Prism, Beam's portable runner, with Go into .prism: `make test` then runs the pipeline on it too
	@command -v go >/dev/null || { echo "Go is not here: Prism is built from source with Go 1.26 or newer. Everything else works without; its tests are skipped."; exit 2; }
	@echo "Building Prism $(PRISM_VERSION) (the first time fetches its modules and takes about 2 minutes) ..."
	@GOBIN="$(CURDIR)/.prism" go install github.com/apache/beam/sdks/v2/go/cmd/prism@$(PRISM_VERSION)
	@echo "$(CURDIR)/.prism/prism"

chaos: $(READY) ## A run under 100 faults, audited; cuts links and fills disks where root may (about 25 minutes; ARGS="--seed 1")
	@$(BIN)/python -m benchmarks.chaos $(ARGS)

cluster: $(READY) ## compose.yaml's topology as processes in network namespaces, one a "host" (root; ARGS="--preset catch-pixels --updates 2000")
	@$(BIN)/python -m deploy.cluster $(ARGS)

clean: ## Remove the virtual environment and caches (never runs/ or .gorila/)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
