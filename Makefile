# Two commands set everything up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

SBOM ?= dist

.PHONY: demo test lint bench fuzz chaos sbom docs clean

demo: $(VENV)/installed
	$(BIN)/python -m probhard demo
	$(BIN)/python -m probhard forecast us-employment --horizon 12 --nonnegative --level 80,95 --output demo-output/forecast

test: $(VENV)/installed-test lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(PYTEST_ARGS)

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/installed-peers
	$(BIN)/python -m benchmarks

# Resumes where an earlier run stopped. Peers that are not installed count as crashed: run it after `make bench`.
CASES ?= 10000
fuzz: $(VENV)/installed-peers $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.reliability $(CASES)

# Kills, disturbed disks and load; lines go to results/reliability-load.jsonl. About an hour.
chaos: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.reliability.kills
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.reliability.disks
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.reliability.load

# Bill of materials and licences of all dependencies, of those that are installed.
sbom: $(VENV)/installed-all
	$(BIN)/python release/sbom.py --output $(SBOM)

docs: $(VENV)/installed-docs
	$(BIN)/mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) -e ".[forecast]"
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(PIP) -e ".[test]"
	touch $@

$(VENV)/installed-all: $(VENV)/installed
	$(PIP) -e ".[all]" packaging
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(PIP) -e ".[docs]"
	touch $@

# qpth asks for impossible versions of its dependencies, so it is built from source without them; where that fails, its
# suite says that it is missing.
$(VENV)/installed-peers: $(VENV)/installed
	$(PIP) -e ".[peers]"
	$(PIP) setuptools wheel
	-$(PIP) --no-deps --no-build-isolation "qpth==0.0.18"
	touch $@

clean:
	rm -rf $(VENV) demo-output site
