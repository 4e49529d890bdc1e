# `make` lists the commands. Every one of them sets itself up first.

PYTHON ?= python3
VENV := .venv
TORCH ?= $(shell cat $(VENV)/.torch 2>/dev/null)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
UV := $(shell command -v uv)
PIP = $(VENV)/bin/python -m pip install --disable-pip-version-check
INSTALL = $(if $(UV),uv pip install --python $(VENV)/bin/python,$(PIP))
RUN := PATH="$(CURDIR)/$(VENV)/bin:$$PATH" DVC_NO_ANALYTICS=1

comma := ,
FAILED = the packages cannot be installed (see $(VENV)/install.log): try again.
# Runs an installer whose messages go to .venv/install.log, behind one line that moves.
define quietly
@$(1) >>$(VENV)/install.log 2>&1 & pid=$$!; trap "kill $$pid; exit 130" INT TERM; seconds=0; \
while kill -0 $$pid 2>/dev/null; do \
	if [ -t 2 ]; then printf "\r\033[K%d s  %.60s" $$seconds "$$(tail -n 1 $(VENV)/install.log | tr -d '\r')" >&2; fi; \
	sleep 1; seconds=$$((seconds + 1)); \
done; \
if [ -t 2 ]; then printf "\r\033[K" >&2; fi; \
wait $$pid || { echo "error: $(2)" >&2; exit 1; }
endef

.DEFAULT_GOAL := help
.PHONY: help setup quickstart check test plan reproduce restore benchmark gpu ui lint readme lock

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed  ## create .venv with the pinned requirements, by uv where it is there; TORCH=cpu for PyTorch without CUDA

$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info[:2] in ((3, 11), (3, 12)) else "error: Python 3.11 or 3.12 is needed, not %d.%d: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@test -z "$(TORCH)" -o "$(TORCH)" = cpu || { echo "error: TORCH=$(TORCH) is not known: write TORCH=cpu, or leave it out." >&2; exit 1; }
	@echo "Installing into $(VENV): $(if $(filter cpu,$(TORCH)),about 2 GB,5.6 GB, most of it CUDA; without a GPU, \`make setup TORCH=cpu\` leaves that out)."
	@$(PYTHON) -m venv $(VENV) && : >$(VENV)/install.log
ifeq ($(TORCH),cpu)
	@grep -E '^torch(vision)?==' requirements.txt >$(VENV)/torch.txt; grep -vE '^(cuda|nvidia|triton)' requirements.txt >$(VENV)/others.txt
	$(call quietly,$(INSTALL) --no-deps $(if $(UV),--default-index,--retries 1 --index-url) $(TORCH_INDEX) -r $(VENV)/torch.txt,$(TORCH_INDEX) does not deliver PyTorch (see $(VENV)/install.log): try again$(comma) or leave TORCH=cpu out$(comma) which takes it with CUDA from PyPI.)
	@echo cpu > $(VENV)/.torch
	$(call quietly,$(INSTALL) -r $(VENV)/others.txt,$(FAILED))
else
	$(call quietly,$(INSTALL) -r requirements.txt,$(FAILED))
endif
	@touch $@

# The tests, ruff and the notebook need more.
$(VENV)/.dev: requirements-dev.txt $(VENV)/.installed
	@echo "Installing what tests need"
	$(call quietly,$(INSTALL) -r requirements-dev.txt,$(FAILED))
	@touch $@

$(VENV)/.extras: requirements-cluster.txt requirements-integrations.txt $(VENV)/.dev
	$(call quietly,$(INSTALL) -r requirements-cluster.txt -r requirements-integrations.txt,$(FAILED))
	@touch $@

quickstart: setup  ## the paper's comparison in small, in quickstart/, without a download, in minutes
	@$(RUN) python -m pipeline quickstart

check: $(VENV)/.dev  ## the quick tests and ruff: an answer in a minute
	$(RUN) OMP_NUM_THREADS=1 python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -q -m "not slow and not faults"
	$(RUN) ruff check .

test: $(VENV)/.extras  ## the test suite
	$(RUN) OMP_NUM_THREADS=1 python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

plan: setup  ## what `make reproduce` would run, why, and for how long
	@$(RUN) python -m pipeline plan

reproduce: setup  ## the paper on MNIST, JOBS=4 trainings at a time (default: one a core or GPU), up to the README's result
	@$(RUN) python -m pipeline reproduce $(if $(JOBS),--jobs $(JOBS))

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
	@$(RUN) exec python -m pipeline tracking ui

.PHONY: tour
tour: $(VENV)/.dev  ## run the notebook in place, and write it as notebooks/tour.html
	$(RUN) jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/tour.ipynb
	$(RUN) jupyter nbconvert --to html notebooks/tour.ipynb

# Links from the pages into the repository lead to SOURCES: from site/ the files beside it, where it is published their address.
SOURCES ?= ..
MODULES = osa $(subst /,.,$(basename $(filter-out %/__init__.py,$(wildcard osa/*.py osa/deep/*.py osa/constrained/*.py))))
.PHONY: site
site: $(VENV)/.dev  ## both pages and the reference of the package, as they are published, in site/
	$(RUN) pdoc --docformat google --output-directory site/reference $(MODULES)
	cp .github/pages/index.html site
	for page in report research; do \
		sed -E 's#href="(report|research)\.md#href="\1.html#g; s#href="\.\./#href="$(SOURCES)/#g; s#href="([a-z_]+)/#href="$(SOURCES)/paper_outputs/\1/#g' \
			paper_outputs/$$page.html >site/$$page.html; \
	done

.PHONY: doctor
doctor:  ## what is there and what is missing, each with its remedy; before `make setup` too
	@$(RUN) $(PYTHON) -m pipeline doctor

lint: $(VENV)/.dev  ## ruff, and mypy on the package
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

readme: setup  ## render the README's result from the files
	$(RUN) python -m pipeline report readme

COMPILE = $(RUN) uv pip compile --quiet --universal --python-version 3.11 --no-annotate --no-header
lock: setup  ## resolve requirements.in and requirements-dev.in
	$(if $(UV),,$(PIP) --quiet uv)
	$(COMPILE) requirements.in -o requirements.txt
	$(COMPILE) requirements-dev.in -o requirements-dev.txt
