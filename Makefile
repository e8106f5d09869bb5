# The two commands that matter are `make demo` and `make test`. Both make their
# own environment in .venv on the first call and reuse it afterwards.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One test process a core; each keeps to one thread (tests/conftest.py).
WORKERS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint format notebooks docs clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed ## Train on a synthetic federation; results in runs/demo.
	$(BIN)/python -m launch.train --config=configs/default.py --workdir=runs/demo

test: lint ## Lint, check types, then run all tests and notebooks on all cores (WORKERS=N).
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: $(VENV)/.installed-dev ## Check style, format, types and the direction of imports.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

format: $(VENV)/.installed-dev ## Rewrite the sources in the project's format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(VENV)/.installed-dev ## Run the notebooks and write what they put out.
	$(BIN)/python -m tests.notebooks

docs: $(VENV)/.installed-dev ## Build the pages into docs/_build/html; warnings are errors.
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

clean: ## Remove the environment, caches and build products; keep runs/.
	rm -rf $(VENV) build dist docs/_build docs/tutorials *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "fedbnr_jax needs Python 3.11 or newer, but '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>&1 || true)." \
	    "Name another one: make PYTHON=python3.12 ..." >&2; \
	  exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The stamps are younger than what they depend on once an install succeeded, so
# a second call installs nothing.
$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing fedbnr_jax into $(VENV) (a few minutes the first time)"
	@$(PIP_INSTALL) -e .
	@touch $@

# The development environment holds all that the demo needs as well.
$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml constraints.txt
	@echo "Installing fedbnr_jax and its development tools into $(VENV) (a few minutes the first time)"
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed $@
