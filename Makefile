PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST_PYTHON ?= python3.11
OLDEST := .venv-oldest
SOURCES := hf_deelbo tests examples
# nothing here needs the Hub
export HF_HUB_OFFLINE = 1

.PHONY: demo report test test-slow test-oldest quality style

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[demo,test]"
	touch $@

$(OLDEST)/installed: pyproject.toml tests/lower_bounds.py
	$(OLDEST_PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python tests/lower_bounds.py > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint $(OLDEST)/constraints.txt --editable ".[demo,test]"
	touch $@

demo: $(VENV)/installed  ## Learn a posterior on an embedded dataset and print what was learned
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no examples/run_deelbo.py

report: $(VENV)/installed  ## Tables and figures of examples/results, from its lines
	$(BIN)/python examples/report.py

test: $(VENV)/installed quality  ## The tests that CI runs
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2

test-slow: $(VENV)/installed  ## The slow checks
	$(BIN)/python -m pytest -m slow

test-oldest: $(OLDEST)/installed  ## The tests with the lower bound of every dependency
	$(OLDEST)/bin/python -m pytest -m "not slow" --numprocesses 2

quality: $(VENV)/installed  ## Lint and format, checked
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

style: $(VENV)/installed  ## Lint and format, repaired
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
