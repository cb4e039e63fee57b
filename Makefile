# Everything runs from a virtual environment of its own, .venv, made here: no root, nothing to activate.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
export UV_PROJECT_ENVIRONMENT := $(CURDIR)/$(VENV)

# Most of a test run is waiting for servers, so that twice the cores of a small machine keep it busy.
WORKERS ?= 4

GPU_PYTHON ?= python3
OUT ?= .cache/gpu
PYZ ?= dist/kvdiag.pyz
HOURS ?= 24
SECONDS ?= 60
COUNT ?= 150

.PHONY: help demo test bench bench-diagnosis pyz gpu-check screenshots docs check format lock clean

help:  ## Show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

demo: $(VENV)/.runtime  ## Set up, then diagnose the embedded simulated server
	@$(BIN)/kvdiag run --simulate healthy

test: $(VENV)/.dev check  ## Set up, then run the whole suite, the real vLLM among it
	@$(BIN)/pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

bench: $(VENV)/.dev  ## Print the benchmarks and one table of them: kvdiag beside others, its verdicts, its cost (half an hour)
	@$(BIN)/python -m tests.quality.bench.table $(BENCH)

bench-diagnosis: $(VENV)/.dev  ## Print the score of the diagnosis on reported incidents, healthy servers and leaks (minutes)
	@$(BIN)/python -m tests.quality.bench.diagnosis_score
	@$(BIN)/python -m tests.quality.bench.diagnosis_history || [ $$? = 3 ]
	@$(BIN)/python -m tests.quality.bench.fleet_power
	@$(BIN)/python -m tests.quality.bench.soak_power
	@$(BIN)/python -m tests.quality.bench.day_speed || [ $$? = 1 ]
	@$(BIN)/python -m tests.quality.bench.fleet_speed || [ $$? = 3 ]

soak: $(VENV)/.dev  ## Break every source of the daemon in random order for a day of accelerated time, kills among it (HOURS=24)
	@$(BIN)/python -m tests.quality.faults.soak --hours $(HOURS)

fuzz: $(VENV)/.dev  ## Look for input that a reader neither reads nor refuses (SECONDS=60 for each reader)
	@$(UV) sync --quiet --frozen --inexact --group fuzz
	@$(BIN)/python -m tests.quality.fuzz --seconds $(SECONDS)

mutation: $(VENV)/.dev  ## Print which share of small wrong versions of the judging code the tests notice (COUNT=150)
	@$(BIN)/python -m tests.quality.mutation.mutation --count $(COUNT)

gpu-check: $(VENV)/.dev  ## Play what only a GPU can show, with a Python that has torch: GPU_PYTHON=...
	@$(BIN)/python -m tests.integration.gpu.check --python $(GPU_PYTHON) --out $(OUT)

pyz: $(VENV)/.dev  ## Make dist/kvdiag.pyz: one file that runs on this platform's Python from 3.11 on, with nothing installed
	@rm -rf $(PYZ).d && mkdir -p $(PYZ).d
	@$(UV) export --quiet --frozen --no-dev --no-emit-project --no-hashes --output-file $(PYZ).d/requirements.txt
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --target $(PYZ).d/site -r $(PYZ).d/requirements.txt
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --target $(PYZ).d/site .
	@$(BIN)/shiv --compressed --site-packages $(PYZ).d/site -p '/usr/bin/env python3' -c kvdiag -o $(PYZ)
	@$(BIN)/python deploy/pyz/insert.py $(PYZ)
	@rm -rf $(PYZ).d

screenshots: OUT = .cache/screenshots
screenshots: $(VENV)/.dev  ## Take pictures of reports of every kind, on small and wide screens, light and dark: OUT=folder
	@$(BIN)/python -m tests.integration.browser.screenshots $(OUT)

docs: $(VENV)/.dev  ## Build the documentation into .cache/site, offline
	@$(UV) sync --quiet --frozen --inexact --group docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

check: $(VENV)/.dev  ## Formatting, lint, types and the import contracts
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache > $(VENV)/imports.log || { cat $(VENV)/imports.log; exit 1; }

format: $(VENV)/.dev  ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix-only .

lock: $(VENV)/.dev  ## Lock the newest versions that fit
	@$(UV) lock --upgrade

clean:  ## Remove what was made here
	rm -rf $(VENV) .cache dist

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvdiag needs Python 3.11 or newer; $(PYTHON) is older: make PYTHON=python3.12 ..." >&2; exit 3; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "this Python cannot make a virtual environment: install python3-venv" >&2; exit 3; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'

$(VENV)/.runtime: pyproject.toml uv.lock | $(UV)
	@$(UV) sync --quiet --frozen --no-dev --inexact --compile-bytecode
	@touch $@

$(VENV)/.dev: pyproject.toml uv.lock | $(UV)
	@$(UV) sync --quiet --frozen --inexact --compile-bytecode
	@touch $@ $(VENV)/.runtime
