# `make` lists the commands. Every one of them sets itself up first.

PYTHON ?= python3
VENV := .venv
RUN := PATH="$(CURDIR)/$(VENV)/bin:$$PATH" DVC_NO_ANALYTICS=1

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test reproduce replay benchmark ui lint readme lock

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed  ## create .venv and install the pinned requirements

$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info[:2] in ((3, 11), (3, 12)) else "error: Python 3.11 or 3.12 is needed, not %d.%d: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

quickstart: setup  ## every stage on 5,000 embedded digits, in quickstart/: a few minutes, no download
	$(RUN) python -m pipeline.quickstart

test: setup  ## the test suite
	$(RUN) OMP_NUM_THREADS=1 python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

reproduce: setup  ## the paper on MNIST: fetch, train, evaluate, every study, the report, and the README's result
	$(RUN) dvc repro
	$(RUN) python -m pipeline.report --readme

replay: setup  ## ask whether today's code still makes the committed runs, by the beginning of each
	$(RUN) python -m pipeline.replay

benchmark: setup  ## time attention and the training step on this machine, against what else one would run
	$(RUN) python -m benchmarks.attention
	$(RUN) python -m benchmarks.step
	$(RUN) python -m benchmarks.profile
	$(RUN) dvc repro --single-item report

ui: setup  ## import the runs into MLflow and browse them on 127.0.0.1
	$(RUN) python -m pipeline.tracking ui

lint: setup  ## ruff
	$(RUN) ruff check .
	$(RUN) ruff format --check .

readme: setup  ## render the README's result from the files
	$(RUN) python -m pipeline.report --readme

lock: setup  ## resolve requirements.in into requirements.txt (needs uv)
	uv pip compile --universal --python-version 3.11 --no-annotate --no-header requirements.in -o requirements.txt
