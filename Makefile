# make demo       a fresh machine: the environment, then the quickstart notebook on real engines
# make lab        the notebooks in JupyterLab
# make test       the environment, then all tests
# make check      style, types and layers
# make benchmarks measures against the peers and rewrites the README's table
# make parity     every model under every plan against one device, and rewrites the README's table
# make faults     runs the fault matrix, and the same mistakes under peers, and rewrites the README's tables
# make soak       200 random faults in one session
# make slow       the tests that make test leaves out, since others are much like them

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint tests/constraints.txt
NOTEBOOK ?= notebooks/00_quickstart.ipynb

.PHONY: demo lab test check benchmarks parity faults soak slow clean

demo: .venv/lab
	$(BIN)/python notebooks/show.py $(NOTEBOOK)

lab: .venv/lab
	$(BIN)/jupyter lab $(NOTEBOOK)

test: .venv/dev
	$(BIN)/python -m pytest -m "not slow"

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

benchmarks: .venv/dev
	$(BIN)/python tests/benchmarks/run.py

parity: .venv/dev
	$(BIN)/python -W ignore tests/parity_table.py

faults: .venv/dev
	$(BIN)/python tests/faults/run.py

soak: .venv/dev
	$(BIN)/python tests/faults/soak.py

slow: .venv/dev
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf .venv

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/lab: pyproject.toml tests/constraints.txt | .venv/bin/python
	$(PIP) --editable '.[lab]'
	touch $@

.venv/dev: pyproject.toml tests/constraints.txt | .venv/bin/python
	$(PIP) --editable '.[dev]'
	touch $@ .venv/lab
