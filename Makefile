# Everything runs from a virtual environment in .venv, created here: no root, nothing to activate.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
export UV_PROJECT_ENVIRONMENT := $(CURDIR)/$(VENV)
# Without byte code every process that a test starts compiles kvdiag again, and every worker the tests.
unexport PYTHONDONTWRITEBYTECODE

# Tests mostly wait for servers: twice as many workers as a small machine has cores keep it busy.
WORKERS ?= 4
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder

UNIT_TESTS = $(1)/bin/python -m pytest -q -n 2 --dist loadgroup -m "not long" tests/unit tests/golden

# These import no dependency, as `make check` checks: no version of one can change what they do.
WITHOUT_DEPENDENCIES = agent diagnosis kv model stats

GPU_PYTHON ?= python3
OUT ?= .cache/gpu
DEMO ?= .cache/demo
PYZ ?= dist/kvdiag.pyz
PACKAGES ?= dist/packages
SBOM ?= dist/kvdiag.cdx.json
OLDEST ?= .cache/oldest
PYTHONS ?= 3.12 3.13 3.14
HOURS ?= 24
SECONDS ?= 60
COUNT ?= 150

.PHONY: help demo test everyday test-all oldest pythons bench bench-diagnosis soak fuzz mutation gpu-check packages pyz sbom pictures screenshots docs check format lock clean

help:  ## Show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

demo: $(VENV)/.runtime  ## Set up, then diagnose a healthy simulated server and one that leaks (a minute)
	@echo "A healthy server:"
	@$(BIN)/kvdiag run --simulate healthy | head -n 1
	@echo && echo "A server that keeps KV blocks of every request:"
	@mkdir -p $(DEMO) && { $(BIN)/kvdiag run --simulate kv-leak --report $(DEMO)/report.html || [ $$? = 2 ]; }
	@echo && echo "The same as a page: $(DEMO)/report.html"

test: $(VENV)/.dev  ## Set up, then run the checks and the everyday tests, a real vLLM and Prometheus included (minutes)
	@$(MAKE) --no-print-directory -j 2 check everyday

everyday: $(VENV)/.dev
	@$(PYTEST) -m "not long"

# Two real servers at a time: a prompt of 16K tokens takes one of four on two cores longer than a step waits.
test-all: test  ## Run the everyday tests, the long ones, and unit tests with the oldest dependencies and other Pythons
	@$(PYTEST) -n 2 -m long
	@$(MAKE) --no-print-directory oldest pythons

# uv resolves these here, and writes no lock: uv.lock has the newest.
oldest: $(VENV)/.dev  ## Run the unit tests with the oldest dependencies that pyproject.toml allows
	@mkdir -p $(OLDEST)
	@$(UV) pip compile --quiet --resolution lowest-direct --python $(BIN)/python --group dev --generate-hashes pyproject.toml -o $(OLDEST)/locked.txt
	@echo "--editable ." >> $(OLDEST)/locked.txt
	@$(UV) venv --quiet --allow-existing --python $(BIN)/python $(OLDEST)/env
	@$(UV) pip sync --quiet --python $(OLDEST)/env/bin/python $(OLDEST)/locked.txt
	@$(call UNIT_TESTS,$(OLDEST)/env) $(WITHOUT_DEPENDENCIES:%=--ignore=tests/unit/%)

pythons: $(VENV)/.dev  ## Run the unit tests with each newer Python that is here: PYTHONS="3.12 3.13 3.14"
	@set -e; for version in $(PYTHONS); do \
	  if $(UV) python find --quiet --no-python-downloads $$version > /dev/null 2>&1; then \
	    echo "Python $$version:"; \
	    UV_PROJECT_ENVIRONMENT=$(CURDIR)/.cache/python-$$version $(UV) sync --quiet --frozen --python $$version; \
	    $(call UNIT_TESTS,.cache/python-$$version); \
	  else echo "Python $$version is not here: left to CI"; fi; \
	done

bench: $(VENV)/.dev  ## Compare kvdiag with other tools: verdicts and cost, in one table (an hour)
	@$(BIN)/python -m tests.quality.bench.table $(BENCH)

bench-diagnosis: $(VENV)/.dev  ## Score the diagnosis on reported incidents, healthy servers and leaks (minutes)
	@$(BIN)/python -m tests.quality.bench.diagnosis_score
	@$(BIN)/python -m tests.quality.bench.diagnosis_history || [ $$? = 3 ]
	@$(BIN)/python -m tests.quality.bench.fleet_power
	@$(BIN)/python -m tests.quality.bench.soak_power
	@$(BIN)/python -m tests.quality.bench.growth_power
	@$(BIN)/python -m tests.quality.bench.worlds_score
	@$(BIN)/python -m tests.quality.bench.day_speed || [ $$? = 1 ]
	@$(BIN)/python -m tests.quality.bench.fleet_speed 1000 || [ $$? = 3 ]

soak: $(VENV)/.dev  ## Inject random faults into every source of the daemon for HOURS=24 of accelerated time
	@$(BIN)/python -m tests.quality.faults.soak --hours $(HOURS)

fuzz: $(VENV)/.dev  ## Fuzz every parser of untrusted input, SECONDS=60 each
	@$(UV) sync --quiet --frozen --inexact --group fuzz
	@$(BIN)/python -m tests.quality.fuzz --seconds $(SECONDS)

mutation: $(VENV)/.dev  ## Print the share of COUNT=150 mutants of the judging code that the tests kill
	@$(BIN)/python -m tests.quality.mutation.mutation --count $(COUNT)

gpu-check: $(VENV)/.dev  ## Run the checks that need a GPU, with a Python that has torch: GPU_PYTHON=...
	@$(BIN)/python -m tests.integration.gpu.check --python $(GPU_PYTHON) --out $(OUT)

pyz: $(VENV)/.dev  ## Build dist/kvdiag.pyz: one file for this platform's Python 3.11 or newer
	@rm -rf $(PYZ).d && mkdir -p $(PYZ).d
	@$(UV) export --quiet --frozen --no-dev --no-emit-project --output-file $(PYZ).d/requirements.txt
	@$(UV) build --quiet --wheel --require-hashes --build-constraints deploy/tools.txt --out-dir $(PYZ).d
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --require-hashes --target $(PYZ).d/site -r $(PYZ).d/requirements.txt
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --target $(PYZ).d/site $(PYZ).d/*.whl
	@$(BIN)/shiv --compressed --site-packages $(PYZ).d/site -p '/usr/bin/env python3' -c kvdiag -o $(PYZ)
	@$(BIN)/python deploy/pyz/insert.py $(PYZ)
	@rm -rf $(PYZ).d

packages: $(VENV)/.dev  ## Build wheel and sdist into dist/packages
	@rm -rf $(PACKAGES)
	@$(UV) build --quiet --require-hashes --build-constraints deploy/tools.txt --no-create-gitignore --out-dir $(PACKAGES)

sbom: $(VENV)/.dev  ## Write dist/kvdiag.cdx.json: what kvdiag depends on, as CycloneDX
	@mkdir -p $(dir $(SBOM))
	@$(UV) export --quiet --frozen --no-dev --extra web --format cyclonedx1.5 --output-file $(SBOM)

screenshots: OUT = .cache/screenshots
screenshots: $(VENV)/.dev  ## Take screenshots of reports at several widths, light and dark: OUT=folder
	@$(BIN)/python -m tests.integration.browser.screenshots $(OUT)

pictures: $(VENV)/.dev  ## Renew the pictures of README and the boards (20 minutes)
	@$(BIN)/python -m tests.integration.dashboards.pictures .assets

docs: $(VENV)/.dev  ## Build the documentation into .cache/site, offline; a link that leads nowhere fails
	@$(UV) sync --quiet --frozen --inexact --group docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: $(VENV)/.dev  ## Check formatting, lint, types, import contracts and language
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache > $(VENV)/imports.log || { cat $(VENV)/imports.log; exit 1; }
	@$(BIN)/python -m tests.quality.language
	@$(BIN)/python -m tests.quality.language.sentences

format: $(VENV)/.dev  ## Format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix-only .

lock: $(VENV)/.dev  ## Lock the newest compatible versions
	@$(UV) lock --upgrade
	@$(UV) export --quiet --frozen --only-group tools --no-emit-project --no-header --output-file deploy/tools.txt

clean:  ## Remove everything built here
	rm -rf $(VENV) .cache dist

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvdiag needs Python 3.11 or newer; $(PYTHON) is older: make PYTHON=python3.12 ..." >&2; exit 3; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "$(PYTHON) cannot create a virtual environment: install python3-venv" >&2; exit 3; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r deploy/tools.txt

$(VENV)/.runtime: pyproject.toml uv.lock | $(UV)
	@$(UV) sync --quiet --frozen --no-dev --inexact --compile-bytecode
	@touch $@

$(VENV)/.dev: pyproject.toml uv.lock | $(UV)
	@$(UV) sync --quiet --frozen --inexact --compile-bytecode
	@touch $@ $(VENV)/.runtime
