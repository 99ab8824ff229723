# Every target makes its own virtual environment in .venv when there is none.
#
#   make demo        train, evaluate, save, reload and score a small Longhorn on text that Python carries
#   make test        the test suite
#   make portable    what depends on the processor, with torch's code for any processor: no AVX
#   make sanitize    random calls and misuse of the C kernels under the compiler's sanitizers, for ten minutes
#   make lint        style, formatting, types
#   make upstream    transformers' own model tests, run on the families of this package
#   make invariants  thousands of random cases of every batching invariance, with a report
#   make programs    thousands of random programs on models and their caches, with a report
#   make streaming   a million tokens in constant memory, with the curve
#   make bench       the benchmarks; results in benchmarks/results
#   make gpu         checks and benchmarks on a GPU, without a network or an environment; GPU_PYTHON names the Python
#   make reports     every page of docs/quality.md anew, from one commit (hours); Triton's is made by `make triton`
#   make reports-status   which pages in reports/ are older than the sources they are about
#   make reliability the pages that are made from tests; or one of roundtrips, determinism, numerics, misuse, fuzz,
#                    crash, scale by its name
#   make plans       memory and operations of a training step of the papers' presets
#   make mutation    change the package and the recipes at random and see whether a test notices
#   make faults      make a list of faults by hand, one at a time, and see whether their tests notice
#   make lowest      the tests with the lowest versions of the dependencies; make newest: with the newest
#   make smoke       two minutes with the lowest transformers, and with what pip resolves today
#   make triton      the kernels with every version of Triton that is admitted: interpreted, compiled, counted (an hour)
#   make matrix      what PEFT, quantization, compiling, export and offloading do with every family
#   make cards       the model cards of the papers' language models
#   make vllm        the families in vLLM's engine, in an environment of its own (3.5 GB), with a report
#   make clean-room  exported folders in a new environment that lacks the package, lm-eval's own command included
#   make docs        run what README.md and docs/ show, check their links, and fail if a page in reports/ is stale
#   make site        the documentation as a site in build/site, with the API reference
#   make build       the wheel and the source distribution in dist/
#   make wheels      a wheel with the C kernels inside, in dist/, installed and run without a compiler

VENV ?= .venv
JOBS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
UPSTREAM = HF_HYBRID_SSM_UPSTREAM_TESTS="$$($(BIN)/python tests/upstream/fetch.py)"
REPORT = OMP_NUM_THREADS=1 $(BIN)/python -m tests.reporting
RUN_TESTS = OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: demo test portable sanitize lint upstream invariants programs streaming bench gpu docs install clean \
    cards clean-room matrix reliability roundtrips determinism numerics misuse fuzz crash scale mutation faults plans \
    reports-status \
    lowest newest smoke triton vllm
.DEFAULT_GOAL := test

demo: $(STAMP)
	$(BIN)/python recipes/demo.py $(DEMO_ARGS)

test: $(STAMP)
	$(UPSTREAM); export HF_HYBRID_SSM_UPSTREAM_TESTS; $(RUN_TESTS) -n $(JOBS) --dist worksteal

# torch's own sums round otherwise where it does without AVX, and no tolerance may depend on that
portable: $(STAMP)
	ATEN_CPU_CAPABILITY=default $(RUN_TESTS) -n $(JOBS) --dist worksteal \
	  tests/ops tests/layers tests/models tests/golden tests/invariants

SECONDS_OF_SANITIZING ?= 600
sanitize: $(STAMP)
	$(BIN)/python -m tests.ops.sanitize --seconds $(SECONDS_OF_SANITIZING)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

upstream: $(STAMP)
	$(UPSTREAM) && export HF_HYBRID_SSM_UPSTREAM_TESTS && OMP_NUM_THREADS=1 $(BIN)/python -m tests.upstream.report

invariants: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.invariants.run --cases 10000

programs: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.programs.run --cases 10000 --report reports/programs
	$(REPORT) --stamp reports/programs.md

streaming: $(STAMP)
	$(BIN)/python benchmarks/streaming.py --tokens 1000000

REPORTS = roundtrips determinism numerics misuse fuzz crash scale
reliability: $(REPORTS)

roundtrips determinism numerics misuse fuzz crash scale: $(STAMP)
	$(REPORT) $@

.PHONY: reports operation-counts
reports: upstream invariants programs matrix operation-counts plans reliability

operation-counts: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.models.operation_counts

reports-status: $(STAMP)
	@$(REPORT)

plans: $(STAMP)
	rm -f reports/planning.md
	$(BIN)/python -m hf_hybrid_ssm plan --markdown reports/planning.md
	$(REPORT) --stamp reports/planning.md

mutation: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.mutation --sample 400

faults: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.faults

# The suite in an environment of its own with the lowest versions that pyproject.toml names, or the newest there are.
# (What needs several processes, and transformers' own tests, belong to the pinned versions.)
VERSIONS = nice $(BIN)/python -m tools.versions
lowest newest: $(STAMP)
	$(VERSIONS) $@

# Two minutes with the lowest transformers, which must pass, and with what pip resolves today, which is only told.
smoke: $(STAMP)
	$(BIN)/python -m tools.smoke resolved
	$(BIN)/python -m tools.smoke lowest

triton: $(STAMP)
	nice $(BIN)/python -m tools.triton_versions

matrix: $(STAMP)
	$(BIN)/python -m pip install --quiet -r tests/matrix/requirements.txt
	$(REPORT) matrix

cards: $(STAMP)
	$(BIN)/python tools/model_cards.py

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

clean-room: $(STAMP)
	HF_HYBRID_SSM_CLEAN_ROOM=1 $(RUN_TESTS) tests/hub/test_clean_environment.py

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

# On a bare CUDA image: its own Python with torch and Triton, nothing installed. Results and page go to one archive in
# the folder GPU_OUT; GPU_FROM is an archive of an earlier run that goes on.
GPU_PYTHON ?= python3
GPU_ARGS ?=
GPU_OUT ?= $(OUT)
GPU_FROM ?=
gpu:
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m benchmarks.gpu \
	  $(if $(GPU_OUT),--out "$(GPU_OUT)") $(if $(GPU_FROM),--resume "$(GPU_FROM)") $(GPU_ARGS)

docs: $(STAMP)
	$(RUN_TESTS) tests/test_documentation.py
	@$(REPORT) --check

.PHONY: site build wheels
site: $(STAMP)
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -c docs . build/site

build: $(STAMP)
	$(BIN)/python -m hatchling build

# and an installation of them, in a folder of its own and without a compiler
wheels: $(STAMP)
	$(BIN)/python -m tools.wheels --check

install: $(STAMP)

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

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist src/*.egg-info
