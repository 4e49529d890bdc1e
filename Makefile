# `make` lists the commands. Every one of them sets itself up first.

PYTHON ?= python3
VENV := .venv
TORCH ?= $(shell cat $(VENV)/.torch 2>/dev/null)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP = $(VENV)/bin/python -m pip install --disable-pip-version-check
RUN := PATH="$(CURDIR)/$(VENV)/bin:$$PATH" DVC_NO_ANALYTICS=1

.DEFAULT_GOAL := help
.PHONY: help setup quickstart check test plan reproduce restore benchmark gpu ui lint readme lock

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed  ## create .venv and install the pinned requirements; TORCH=cpu for PyTorch without CUDA

$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info[:2] in ((3, 11), (3, 12)) else "error: Python 3.11 or 3.12 is needed, not %d.%d: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@test -z "$(TORCH)" -o "$(TORCH)" = cpu || { echo "error: TORCH=$(TORCH) is not known: write TORCH=cpu, or leave it out." >&2; exit 1; }
	@echo "Installing into $(VENV): $(if $(filter cpu,$(TORCH)),about 2 GB,5.6 GB, most of it CUDA; without a GPU, \`make setup TORCH=cpu\` leaves that out)."
	$(PYTHON) -m venv $(VENV)
ifeq ($(TORCH),cpu)
	@grep -E '^torch(vision)?==' requirements.txt | $(PIP) --no-deps --retries 1 --index-url $(TORCH_INDEX) -r /dev/stdin 2>$(VENV)/pip.log || \
		{ echo "error: $(TORCH_INDEX) does not deliver PyTorch (see $(VENV)/pip.log): try again, or leave TORCH=cpu out, which takes it with CUDA from PyPI." >&2; exit 1; }
	@echo cpu > $(VENV)/.torch
	grep -vE '^(cuda|nvidia|triton)' requirements.txt | $(PIP) -r /dev/stdin
else
	$(PIP) -r requirements.txt
endif
	@touch $@

$(VENV)/.extras: requirements-cluster.txt requirements-integrations.txt $(VENV)/.installed
	$(PIP) -r requirements-cluster.txt -r requirements-integrations.txt
	@touch $@

quickstart: setup  ## the paper's comparison in small, in quickstart/, without a download, in minutes
	@$(RUN) python -m pipeline quickstart

check: setup  ## the quick tests and ruff: an answer in a minute
	$(RUN) OMP_NUM_THREADS=1 python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -q -m "not slow and not faults"
	$(RUN) ruff check .

test: setup $(VENV)/.extras  ## the test suite
	$(RUN) OMP_NUM_THREADS=1 python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

plan: setup  ## what `make reproduce` would run, why, and for how long
	@$(RUN) python -m pipeline plan

reproduce: setup  ## the paper on MNIST, JOBS=4 trainings at a time (default: one a core or GPU), up to the README's result
	$(RUN) dvc repro --single-item fetch
	$(RUN) python -m pipeline fan_out $(if $(JOBS),--jobs $(JOBS))
	$(RUN) dvc repro
	$(RUN) python -m pipeline report readme

restore: setup  ## back to the committed results; what was edited and trained since moves to .restored/
	@$(RUN) python -m pipeline restore

benchmark: setup  ## time attention and the training step on this machine, against what else one would run
	$(RUN) python -m pipeline benchmarks.attention
	$(RUN) python -m pipeline benchmarks.step
	$(RUN) python -m pipeline benchmarks.depth
	$(RUN) python -m pipeline benchmarks.orthogonal
	$(RUN) dvc repro paper research

gpu:  ## ten minutes of a GPU, where torch and Triton alone will do, into gpu.tar.gz; STEP=attention takes that part alone
	$(RUN) $(PYTHON) pipeline/benchmarks/gpu.py $(STEP)

ui: setup  ## import the runs into MLflow and browse them on 127.0.0.1
	$(RUN) exec python -m pipeline tracking ui

.PHONY: tour
tour: setup  ## run the notebook in place, and write it as notebooks/tour.html
	$(RUN) jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/tour.ipynb
	$(RUN) jupyter nbconvert --to html notebooks/tour.ipynb

.PHONY: doctor
doctor:  ## what is there and what is missing, each with its remedy; before `make setup` too
	@$(RUN) $(PYTHON) -m pipeline doctor

lint: setup  ## ruff
	$(RUN) ruff check .
	$(RUN) ruff format --check .

readme: setup  ## render the README's result from the files
	$(RUN) python -m pipeline report readme

lock: setup  ## resolve requirements.in into requirements.txt (needs uv)
	uv pip compile --universal --python-version 3.11 --no-annotate --no-header requirements.in -o requirements.txt
