# Needs only make and python3 (3.11 to 3.13). Another interpreter: make PYTHON=python3.12 VENV=.venv312 test
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
JOBS ?= 2
# Extra words for demo, tests, bench and fuzz: make test ARGS="-k schedules"
ARGS ?=
# The demo in several processes: make demo PROCESSES=4 (1, 2, 4 or 8)
PROCESSES ?= 1

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -q

# Dozens of tests start processes, each of which would compile the package's sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all check format docs bench fuzz realworld clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create or update the virtual environment

# The stamp is written last: an installation that broke off is done again.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

demo: $(STAMP) ## train a small transformer as a pipeline on simulated devices
ifeq ($(PROCESSES),1)
	$(BIN)/python examples/train_transformer.py $(ARGS)
else
	$(BIN)/python -m manymesh launch -n $(PROCESSES) --devices-per-process $$((8 / $(PROCESSES))) examples/train_transformer.py $(ARGS)
endif

# A worker that crashes is not replaced: pytest-xdist would wait for ever for the tests that it still had.
TEST := $(PYTEST) -n $(JOBS) --dist loadgroup --max-worker-restart 0

test: $(STAMP) ## run the tests and the doctests, in about six minutes on two cores
	$(TEST) --quick $(ARGS)

test-all: $(STAMP) ## with further cases and whole programs (tests/long.txt), as CI does
	$(TEST) $(ARGS)

check: $(STAMP) ## what CI runs besides the tests: lint, format, types, structure
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) tests/test_structure.py

format: $(STAMP) ## fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Built from nothing each time, for Sphinx does not repeat the warnings of pages that it has built before.
docs: $(STAMP).docs ## build the documentation in build/docs, and check its links
	rm -rf build/docs
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	BUILT_DOCS=build/docs $(PYTEST) tests/docs
	@echo "open build/docs/index.html"

$(STAMP).docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check -e '.[docs]'
	@touch $@

bench: $(STAMP) ## run the benchmarks
	$(BIN)/python benchmarks/run.py $(ARGS)

fuzz: $(STAMP) ## check the laws on thousands of generated programs (docs/generated.md)
	$(BIN)/python tests/fuzz.py --jobs $(JOBS) $(ARGS)

# Its own environment: these libraries hold back what they need, and only Python 3.11 has all of them.
realworld: ## train unmodified models of other libraries (Python 3.11)
	$(MAKE) VENV=$(VENV)-realworld PYTHON=$(PYTHON) EXTRAS=dev,realworld setup
	$(VENV)-realworld/bin/python -m pytest -q tests/realworld $(ARGS)

clean: ## remove environments, caches and build outputs
	rm -rf .venv* build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
