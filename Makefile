# make train and make test work on a fresh machine: they create .venv and install into it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One thread per test worker: two torch processes with two threads each crawl on two cores.
TEST_ENV := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE WANDB_MODE=offline
# Arguments of the entry points and of pytest, e.g. make train ARGS="experiment=smoke"
ARGS ?=

.PHONY: help setup train evaluate test whole drill lint format table evidence bench clean

help:            ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: $(VENV)/.dev  ## virtual environment with everything for development

train: $(VENV)/.run  ## the whole job on the embedded default target
	$(BIN)/python train.py $(ARGS)

evaluate: $(VENV)/.run  ## make evaluate ARGS="ckpt=outputs/..."
	$(BIN)/python evaluate.py $(ARGS)

test: $(VENV)/.dev  ## all tests
	$(TEST_ENV) $(BIN)/python -m pytest -n auto $(ARGS)

whole: $(VENV)/.dev  ## tests on trained targets and, where installed, real weights; takes minutes
	$(TEST_ENV) $(BIN)/python -m pytest -m whole $(ARGS)

drill: $(VENV)/.run  ## kill export, training and evaluation, on one rank and two, 210 times, and compare their ends; most of an hour
	$(BIN)/python -m benchmarks.drill $(ARGS)

lint: $(VENV)/.dev  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.dev  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

table: $(VENV)/.run  ## every method, trained with an equal budget and measured, in one table
	$(BIN)/python benchmarks/methods.py $(ARGS)

evidence: $(VENV)/.run  ## all tables and figures of both papers on one page; make evidence ARGS="--list" says what and how long
	$(BIN)/python benchmarks/evidence.py $(ARGS)

bench: $(VENV)/.run  ## every other benchmark, one after the other
	@for file in $(filter-out benchmarks/methods.py benchmarks/evidence.py,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean:           ## what runs and tests leave behind; not the cache of targets and artifacts
	rm -rf outputs multirun wandb build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@ $(VENV)/.run
