# Commands for a newcomer: `make chat`, `make demo` and `make test`. All set up what they need.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# pip would compile all files on one processor. Few of three large packages are imported, and some files are of other
# Pythons.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

# Tests that measure how fast servers are. These run one after another, then all others beside each other.
SERIAL := tests/launcher/bench tests/runs/test_background_load.py tests/runs/test_spawned_server.py \
	tests/end_to_end/test_bench.py

.DEFAULT_GOAL := help
.PHONY: help chat demo test serial-tests coverage check lint types speed format setup clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*  ## \(.*\)/\1: \2/p' $(firstword $(MAKEFILE_LIST))

chat: $(READY)  ## talk to a small real model on this machine's processors
	@$(BIN)/loong chat --serve smollm2-135m --temperature 0

demo: $(READY)  ## compare two policies on a mixed workload, two minutes; writes demo-report/report.html
	$(BIN)/loong bench --workload mixed --length-scale 1/64 --duration 15 --repeat 3 --seed 1 \
		--num-instances 4 --extra-server-args='--kv-cache-tokens 6144' --policy esp,static-sp \
		--output-dir demo-report
	@echo "This measured a tiny random model. \`make chat\` talks to a small real one."

# Types are checked beside the tests that leave processors idle. Tests start many processes, which are to find their
# code compiled. Files are taken by name, not by their number of tests: those that start servers have few, and would
# come last, one after another. Tests often wait for processes that they started, so there are twice as many workers as
# processors.
test: export PYTHONDONTWRITEBYTECODE =
test: lint speed  ## check the code and its speed, and run all tests that need no GPU
	$(MAKE) --no-print-directory --jobs 2 --keep-going types serial-tests; first=$$?; \
		$(BIN)/pytest $(SERIAL:%=--ignore=%) --numprocesses $$(($$(nproc) * 2)) --maxprocesses 8 --dist loadfile --no-loadscope-reorder \
		&& exit $$first

serial-tests: $(READY)
	$(BIN)/pytest $(SERIAL)

# Pure functions, so that nothing excuses a line or a branch that no test reaches.
coverage: $(READY)  ## fail unless tests reach every branch of the core and the scheduler
	$(BIN)/pytest tests/core tests/state tests/scheduler --hypothesis-profile thorough \
		--cov=loong.core --cov=loong.state --cov=loong.scheduler \
		--cov-report=term-missing:skip-covered --cov-fail-under=100

check: lint types  ## check format, style, types and imports

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(READY)
	$(BIN)/mypy

speed: $(READY)  ## fail if planning takes too long for this machine
	$(BIN)/python benchmarks/scheduling/planning_check.py

format: $(READY)  ## format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(READY)  ## make the virtual environment in .venv

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "loong needs Python 3.11 or 3.12; set PYTHON=/path/to/python"; exit 1; }
	@echo "Setting up $(VENV), which takes some minutes and 2.5 GB of disk; nothing is said meanwhile"
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) --editable '.[bench,dev,gguf,structured]'
	$(BIN)/python -m compileall -qq --workers 0 -x "/(plotly|sympy|transformers)/" $(VENV)/lib || true
	@touch $@

clean:  ## delete the virtual environment and all that was built or measured
	rm -rf $(VENV) build dist *.egg-info demo-report .mypy_cache .ruff_cache .pytest_cache .hypothesis
