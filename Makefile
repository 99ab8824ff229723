# What people use, by ten names. What is run seldom has a name too: `python -m tests.reporting --list` shows them all.
# Every target makes its own virtual environment in .venv when there is none.
#
#   make demo        train, evaluate, save, reload and score a small Longhorn on text that Python carries
#   make install     only the environment
#   make test        the test suite
#   make quick       its ten minutes: ops, layers, models, golden values, invariants, and the rules of the source tree
#   make lint        style, formatting, types
#   make docs        run what README.md and docs/ show, and check their links
#   make site        the documentation as a site in build/site, with the API reference
#   make gpu         checks and benchmarks on a GPU (bash tools/card.sh), without a network or an environment
#   make vllm        the families in vLLM's engine, in an environment of its own (3.5 GB), with a report
#   make wheels      a wheel with the C kernels inside, in dist/, installed and run without a compiler

VENV ?= .venv
JOBS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
UPSTREAM = HF_HYBRID_SSM_UPSTREAM_TESTS="$$($(BIN)/python tests/upstream/fetch.py)"
RUN_TESTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)
# the folders that mirror ops, layers and models, with what says that their numbers are right
QUICK = tests/ops tests/layers tests/models tests/golden tests/invariants tests/test_packaging.py

.PHONY: demo install test quick lint docs site gpu vllm wheels
.DEFAULT_GOAL := test

demo: $(STAMP)
	$(BIN)/python recipes/demo.py $(DEMO_ARGS)

install: $(STAMP)

test: $(STAMP)
	$(UPSTREAM); export HF_HYBRID_SSM_UPSTREAM_TESTS; $(RUN_TESTS) -n $(JOBS) --dist worksteal

quick: $(STAMP)
	$(RUN_TESTS) -n $(JOBS) --dist worksteal $(QUICK)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	$(RUN_TESTS) tests/test_documentation.py

site: $(STAMP)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs . build/site

# On a bare CUDA image: with PYTHON, which has torch and Triton, and nothing installed.
gpu:
	bash tools/card.sh

# vLLM asks for packages that this project's own environment must not have.
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
vllm: $(VLLM_STAMP)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m tests.reporting vllm $(PYTEST_ARGS)

$(VLLM_STAMP): tests/serving/engine/requirements.txt | $(STAMP)
	[ -x $(VLLM_VENV)/bin/python ] || $(BIN)/python -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-compile -c constraints.txt torch
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-compile --no-deps -r tests/serving/engine/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps -e .
	@touch $@

# and an installation of them, in a folder of its own and without a compiler
wheels: $(STAMP)
	$(BIN)/python -m tools.wheels --check

# Any other name is that of a job: it is run, and its own command is told. (`build` and `reports` are folders, too.)
.PHONY: build reports
.DEFAULT build reports:
	@$(MAKE) --no-print-directory install
	@echo "make $@: python -m tests.reporting $@" >&2
	@$(BIN)/python -m tests.reporting $@ $(PYTEST_ARGS)

# torch comes first: with the pin, a local CPU build of that version is preferred where an index offers one.
$(STAMP): pyproject.toml constraints.txt
	@python=""; \
	for name in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	  if $$name -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    python=$$name; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "No Python >= 3.11 with the venv module was found (tried python3, python3.13, python3.12, python3.11)." >&2; \
	  echo "Install one, or name it: make PYTHON=/path/to/python ..." >&2; exit 1; \
	fi; \
	[ -x $(BIN)/python ] || $$python -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[train,eval,sft,docs,notebook,dev]"
	@touch $@
