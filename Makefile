# `make serve` and `make test` are all there is to set up; see README.md.
PYTHON ?= python3
VENV ?= .venv
HOST ?=
PORT ?=
MODEL ?=
ARGS ?=
URL ?=

BIN := $(VENV)/bin
FLAGS = $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT)) $(ARGS)
# Without a GPU, take the CPU build of torch.
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),,-c constraints-cpu.txt)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(CONSTRAINTS)

.DEFAULT_GOAL := help
.PHONY: help serve chat demo test test-changed levels quick quick-engine quick-server check rooms soak acceptance ray format clean

help:  ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("minisgl needs Python 3.11 or newer: make PYTHON=python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints-cpu.txt | $(BIN)/python
	@echo "installing minisgl into $(VENV) (once, two or three minutes; the CPU's step is compiled)"
	$(PIP) -e '.[chat]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the test tools (once)"
	$(PIP) -e '.[chat,dev]'
	@touch $@

serve: $(VENV)/.installed  ## serve the built-in model (MODEL=, HOST=, PORT=, ARGS= are honoured)
	$(BIN)/minisgl serve $(or $(MODEL),"") $(FLAGS)

chat: $(VENV)/.installed  ## talk to the built-in model in this terminal
	$(BIN)/minisgl chat $(MODEL) $(FLAGS)

demo: $(VENV)/.installed  ## start a server, ask it a few questions over HTTP, stop it
	$(BIN)/python examples/demo.py $(if $(MODEL),--model '$(MODEL)') $(FLAGS)

PYTEST := $(BIN)/python -m pytest -m 'not gpu and not slow'
STATIC := tests/test_architecture.py tests/test_size.py tests/test_docs.py
test: $(VENV)/.installed-dev  ## run the tests (no GPU)
	@$(if $(ARGS),$(PYTEST) $(ARGS),$(BIN)/python tools/run_tests.py)
test-changed: $(VENV)/.installed-dev  # what CI runs
	@$(BIN)/python tools/run_tests.py --changed
levels: $(VENV)/.installed-dev  ## run the C++ step on each instruction set and the kernels with each BLAS kernel of this machine
	@$(BIN)/python tools/run_tests.py --levels

quick: $(VENV)/.installed-dev  ## the parts without engines, grammars and random traces (a minute on two quiet cores)
	@$(MAKE) --no-print-directory -j2 -Otarget quick-engine quick-server

QUICK := $(PYTEST) -p no:cacheprovider
quick-engine:
	$(QUICK) --ignore tests/unit/scheduler/test_traces.py $(addprefix tests/unit/,scheduler kvcache attention layers models)
quick-server:
	$(QUICK) tests/test_architecture.py $(addprefix tests/unit/,api chat checkpoint distributed message ops process settings tokenizer)

check: $(VENV)/.installed-dev  ## lint, format, types, import order, size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(STATIC)
	@$(BIN)/python tools/code_lines.py | tail -n 1

rooms: $(VENV)/.installed-dev  ## rewrite what is made of other files: counts, the tree of files, tables of flags, texts of /docs
	$(BIN)/python tools/code_lines.py --write
	$(BIN)/python tools/code_map.py --write
	$(BIN)/python tools/flag_table.py --write
	$(BIN)/python tools/api_texts.py --write

soak: $(VENV)/.installed-dev  ## the long tests: 2,000 requests with disconnects, simulated histories, random input
	$(BIN)/python -m pytest -m slow $(ARGS)
	MINISGL_TRACES=20 $(BIN)/python -m pytest tests/unit/scheduler/test_traces.py
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/interpreter $(ARGS)
	MINISGL_FUZZ=2000 $(BIN)/python -m pytest tests/fuzz $(ARGS)

acceptance: $(VENV)/.installed-dev  ## real clients, each in its own environment, against a real server (URL=, ARGS=CLIENT)
	$(BIN)/python tests/acceptance/run.py $(if $(URL),--url $(URL)) $(ARGS)

ray:  ## the Ray application on a local cluster of two nodes, and traces (in an environment of their own)
	@test -x .acceptance/ray/bin/python || $(PYTHON) -m venv .acceptance/ray
	.acceptance/ray/bin/python -m pip install --disable-pip-version-check --quiet $(CONSTRAINTS) -e '.[ray,otel,dev]'
	.acceptance/ray/bin/python -m pytest -p no:cacheprovider tests/e2e/test_traces.py
	.acceptance/ray/bin/python -m pytest -p no:cacheprovider -W ignore tests/e2e/test_ray.py

format: $(VENV)/.installed-dev  ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and caches
	rm -rf $(VENV) .acceptance build dist python/minisgl/native/prebuilt .pytest_cache .mypy_cache .ruff_cache .hypothesis
