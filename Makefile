# The two commands that matter are `make demo` and `make test`. Both make their
# own environment in .venv on the first call and reuse it afterwards.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
BIN := $(VENV)/bin
# Of the two environments that `make test-floor` and `make test-newest` make anew. Either
# takes another interpreter by PYTHON=/path/to/python3.13 too.
PYTHON_FLOOR ?= python3.13
PYTHON_NEWEST ?= python3.13
# One test process a core, of one thread (tests/conftest.py), and one more: some tests wait
# for programs that they have started.
CORES := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
WORKERS ?= $(shell echo $$(($(CORES) + 1)))
WITH := $(CONSTRAINTS:%=-c %)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(WITH)
UV := $(BIN)/python -m uv pip install --quiet --compile-bytecode --python $(BIN)/python $(WITH)

.DEFAULT_GOAL := help
.PHONY: help demo test pytest test-floor test-newest lint format notebooks docs clean

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.installed ## Train on a synthetic federation; results in runs/demo.
	$(BIN)/python -m launch.train --config=configs/default.py --workdir=runs/demo

test: $(VENV)/.installed-dev ## Check style and types, and run all tests and notebooks on all cores (WORKERS=N).
	@$(MAKE) --no-print-directory -j2 lint pytest

pytest: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-floor: ## Run all tests with the oldest versions that pyproject.toml allows.
	@$(call pytest_anew,.venv-floor,$(PYTHON_FLOOR),constraints-floor.txt)

test-newest: ## Run all tests with the newest versions that there are.
	@$(call pytest_anew,.venv-newest,$(PYTHON_NEWEST),)

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

clean: ## Remove environments, caches and build products; keep runs/.
	rm -rf $(VENV) .venv-floor .venv-newest build dist docs/_build docs/tutorials *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Runs the tests in environment $(1), made from nothing by interpreter $(2) with the
# constraints $(3). pyenv has a python3.13 on the path that runs only where it is switched
# on: then the interpreter itself is taken.
define pytest_anew
  python='$(if $(filter command,$(origin PYTHON)),$(PYTHON),$(2))'; \
  if ! "$$python" -c '' 2>/dev/null; then \
    for found in "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/*/bin/"$$python"; do \
      if [ -x "$$found" ]; then python="$$found"; fi; \
    done; \
  fi; \
  rm -rf $(1); \
  $(MAKE) --no-print-directory pytest VENV=$(1) PYTHON="$$python" CONSTRAINTS=$(3)
endef

$(VENV)/.created:
	@$(PYTHON) -c '' 2>/dev/null || { \
	  echo "'$(PYTHON)' is not to be found here, or does not run." \
	    "Name another one: make PYTHON=/path/to/python3 ..." >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "fedbnr_jax needs Python 3.11 or newer, but '$(PYTHON)' is" \
	    "$$($(PYTHON) --version)." \
	    "Name another one: make PYTHON=python3.12 ..." >&2; \
	  exit 1; }
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# uv installs in a third of pip's time. It does not read pip's settings, so where it finds
# no package index, or cannot be had, pip does the work.
define install
  { $(PIP) uv && $(UV) $(1); } >/dev/null 2>&1 || $(PIP) $(1)
endef

# The stamps are younger than what they depend on once an install succeeded, so
# a second call installs nothing.
$(VENV)/.installed: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	@echo "Installing fedbnr_jax into $(VENV) (a few minutes the first time)"
	@$(call install,-e .)
	@touch $@

# The development environment holds all that the demo needs as well.
$(VENV)/.installed-dev: $(VENV)/.created pyproject.toml $(CONSTRAINTS)
	@echo "Installing fedbnr_jax and its development tools into $(VENV) (a few minutes the first time)"
	@$(call install,-e '.[dev]')
	@touch $(VENV)/.installed $@
