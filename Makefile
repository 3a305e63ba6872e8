# Each target sets up what it needs: a virtual environment in the project, pinned by constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all test-spark docs bench clean
.DELETE_ON_ERROR:

# Four workers, one of them 2.5x slower, four ways to keep step: a table and a report; about a minute.
demo: $(VENV)/.installed
	$(BIN)/paceline compare examples/digits.py --protocols bsp,dssp,asp --balance --workers 4 --slow 3:2.5 \
	    --device-time 0.03 --jitter 0.1 --target 0.93 --report runs/demo.html -- --epochs 6

test: $(VENV)/.installed-dev
	scripts/check

# All cases of all tests, of which `make test` runs some: about an hour.
test-all: $(VENV)/.installed-dev
	scripts/check --every-case

# PySpark is 400 MB and needs Java 17, so its tests are apart; `make test` skips them without it.
test-spark: $(VENV)/.installed-spark
	$(BIN)/pytest tests/engines/test_spark.py tests/docs -k "spark or cluster"

# The documentation site; a warning is an error.
docs: $(VENV)/.installed-dev
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs docs/_build/html
	@echo "the site is docs/_build/html/index.html"

bench: $(VENV)/.installed-bench
	$(BIN)/paceline bench --record

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "installing Paceline and PyTorch into $(VENV) (once; takes a minute or two)"
	$(PIP) torch==2.13.0
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed-dev
	$(PIP) -e '.[bench]'
	@touch $@

$(VENV)/.installed-spark: $(VENV)/.installed-dev
	$(PIP) -e '.[spark]'
	@touch $@

clean:
	rm -rf $(VENV) runs docs/_build docs/made .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
