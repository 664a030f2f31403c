# Everything starts here: `make serve`, `make test`. Needs git, make and Python 3.11+, nothing else.
#
#   make serve                     the embedded default model on http://127.0.0.1:30000
#   make serve MODEL=path-or-id    a GGUF file, a Hugging Face folder or a hub id
#   make serve ARGS="--port 8000"  any flag of `bough serve`
#   make test JOBS=4               tests in that many processes, which share out the cores
#   make check | test-all | bench | clean

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
MODEL ?=
ARGS ?=
JOBS ?= 2

# What an installation depends on; Python files do not count, the installation is editable.
INPUTS := pyproject.toml constraints.txt setup.py bough/device/ops/build.py \
          $(shell find bough -name '*.cpp' -o -name '*.h' -o -name '*.hpp')
RUNTIME := $(VENV)/.bough-runtime
DEV := $(VENV)/.bough-dev

.PHONY: help serve test test-all check bench clean

help:
	@sed -n '3,7s/^# *//p' Makefile

serve: $(RUNTIME)
	@exec $(VENV)/bin/bough serve $(MODEL) $(ARGS)

PYTEST = exec $(VENV)/bin/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test: $(DEV)
	@$(PYTEST) -m "not slow"

test-all: $(DEV)
	@$(PYTEST)

check: $(DEV)
	@VENV=$(VENV) exec scripts/check

bench: $(DEV)
	@exec $(VENV)/bin/bough bench scheduler $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find bough -name '*.so' -delete
	find bough tests -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "bough needs Python 3.11 or newer; say which with PYTHON=python3.12"; exit 1; }
	@echo "bough: making the virtual environment $(VENV)"
	@$(PYTHON) scripts/make_venv.py $(VENV) \
	  || { rm -rf $(VENV); echo "bough: no virtual environment could be made"; exit 1; }

# $(call install,extras): pip's output goes to a log; the terminal sees what is fetched, and the end of the log if
# something fails.
define install
	@echo "bough: installing into $(VENV) (once, a few minutes; log: $(VENV)/install.log)"
	@$(VENV)/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off \
	  -c constraints.txt -e '.$(1)' 2>&1 | tee $(VENV)/install.log \
	  | sed -un 's/^ *Downloading \([^ ]*\) (\([0-9.]* MB\)).*/  fetched \1 (\2)/p; s/^Installing collected.*/  unpacking .../p' \
	  || { tail -n 30 $(VENV)/install.log; echo "bough: the installation failed"; exit 1; }
endef

$(RUNTIME): $(INPUTS) | $(VENV)/bin/python
	$(call install)
	@touch $@

$(DEV): $(INPUTS) | $(VENV)/bin/python
	$(call install,[dev])
	@touch $(RUNTIME) $@
