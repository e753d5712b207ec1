# Every target sets up what it needs on a fresh Debian machine: see scripts/setup.sh.
#   make demo        a web shop with its dashboard, until Ctrl-C   DEMO_SECONDS=30 make demo: for so long, and every number checked
#   make test        linters, types and tests, in their short forms
#   make test-fast   only the quick tests that need no Spark and no server
#   make test-all    the same with every test at full length, and all examples of properties
#   make bench       the benchmarks, one JSON line a result        make bench ONLY=log
#   make lint        linters and types only
#   make docs        the guide as a site, in build/site
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
PYTHON_IN_VENV := $(VENV)/bin/python
STAMP := $(VENV)/.headrace-ready
DEMO_STAMP := $(VENV)/.headrace-demo-ready
# Three at a time, since most tests wait for half of their time, file by file: each process starts the Spark session and the servers that its files need, once.
PYTEST_ARGS ?= -n 3 --dist loadfile --no-loadscope-reorder
# SEED=7 make test: the order of tests and the examples of properties that seed 7 chooses; without it, others in each run.
SEED ?=
SEED_ARGS := $(if $(SEED),--randomly-seed=$(SEED) --hypothesis-seed=$(SEED))

.PHONY: demo test test-fast test-all bench lint docs setup clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml scripts/setup.sh
	@scripts/setup.sh $(VENV) $@

# Who has all that the tests need has what the demo needs.
$(DEMO_STAMP): pyproject.toml scripts/setup.sh
	@if [ $(STAMP) -nt pyproject.toml ] && [ $(STAMP) -nt scripts/setup.sh ]; then touch $@; else scripts/setup.sh $(VENV) $@ demo; fi

setup: $(STAMP)

demo: $(DEMO_STAMP)
	@$(PYTHON_IN_VENV) -m headrace.cli demo

lint: $(STAMP)
	@$(PYTHON_IN_VENV) -m ruff check src tests benchmarks examples scripts
	@$(PYTHON_IN_VENV) -m ruff format --check --quiet src tests benchmarks examples scripts
	@$(PYTHON_IN_VENV) -m mypy --strict

test: lint
	@$(PYTHON_IN_VENV) -m pytest -m "not slow" --durations=15 $(PYTEST_ARGS) $(SEED_ARGS)

test-fast: $(STAMP)
	@HEADRACE_TESTS=fast $(PYTHON_IN_VENV) -m pytest -m "not slow and not spark and not kafka and not server and not browser and not process and not simulation" -n 4 --dist worksteal

test-all: lint
	@HEADRACE_TESTS=full $(PYTHON_IN_VENV) -m pytest --durations=15 $(PYTEST_ARGS) $(SEED_ARGS)

bench: $(STAMP)
	@$(PYTHON_IN_VENV) -m benchmarks $(ONLY)

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(PYTHON_IN_VENV) -m mkdocs build --strict --quiet
	@echo 'The guide is in build/site: open build/site/index.html, or for its search too run: $(PYTHON_IN_VENV) -m http.server -d build/site'

clean:
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
