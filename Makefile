# `make` lists the commands. Every one of them sets itself up first.

PYTHON ?= python3
VENV := .venv
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
UV := $(shell command -v uv)
INSTALL = @$(PYTHON) pipeline/tools/install.py $(VENV) --torch "$(TORCH)" --index "$(TORCH_INDEX)" --uv "$(UV)"
RUN := PATH="$(CURDIR)/$(VENV)/bin:$$PATH" DVC_NO_ANALYTICS=1

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev setup-all quickstart check coverage test plan reproduce restore benchmark gpu ui lint hooks readme lock

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## create .venv with the pinned requirements; TORCH=cpu or TORCH=cuda decides what else the machine does
	$(INSTALL) requirements.txt

setup-dev:  # and what the tests, ruff and the notebook need
	$(INSTALL) requirements.txt requirements-dev.txt

setup-all:  # and Ray and the libraries that the tests try osa in
	$(INSTALL) requirements.txt requirements-dev.txt requirements-cluster.txt requirements-integrations.txt

quickstart: setup  ## train four small models on digits that come with the packages, in minutes
	@$(RUN) python -m pipeline quickstart

check: setup-dev  ## run the quick tests and ruff, in a minute
	$(RUN) OMP_NUM_THREADS=1 python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -q -m "not slow and not faults"
	$(RUN) ruff check .

coverage: setup-dev  ## run the quick tests, and show which lines of osa and pipeline they reach
	$(RUN) OMP_NUM_THREADS=1 python -m pytest --numprocesses 2 --dist loadfile -q -m "not slow and not faults" --cov osa --cov pipeline

test: setup-all  ## run all tests
	$(RUN) OMP_NUM_THREADS=1 python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

plan: setup  ## list what `make reproduce` would run, why, and for how long
	@$(RUN) python -m pipeline plan

reproduce: setup  ## reproduce the paper on MNIST, JOBS=4 runs at a time (default: one per core or GPU)
	@$(RUN) python -m pipeline reproduce $(if $(JOBS),--jobs $(JOBS))

restore: setup  ## go back to the committed results; your edits and runs move to .restored/
	@$(RUN) python -m pipeline restore

benchmark: setup  ## time attention and the training step on this machine, against the alternatives
	$(RUN) python -m pipeline benchmarks.attention
	$(RUN) python -m pipeline benchmarks.step
	$(RUN) python -m pipeline benchmarks.depth
	$(RUN) python -m pipeline benchmarks.orthogonal
	$(RUN) dvc repro paper research

gpu:  ## measure on a GPU for ten minutes, with only torch and Triton, into gpu.tar.gz; STEP=attention runs one part
	$(RUN) $(PYTHON) pipeline/benchmarks/gpu.py $(STEP)

ui: setup  ## import the runs into MLflow and browse them on 127.0.0.1
	@$(RUN) exec python -m pipeline tracking ui

.PHONY: tour
tour: setup-dev  ## run the notebook in place, and export it as notebooks/tour.html
	$(RUN) jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/tour.ipynb
	$(RUN) jupyter nbconvert --to html notebooks/tour.ipynb

# Links from the pages into the repository lead to SOURCES: from site/ the files beside it, where it is published their address.
SOURCES ?= ..
MODULES = osa $(subst /,.,$(basename $(filter-out %/__init__.py,$(wildcard osa/*.py osa/shaped/*.py osa/constrained/*.py))))
.PHONY: site
site: setup-dev  ## build both pages and the API reference as they are published, in site/
	$(RUN) pdoc --docformat google --output-directory site/reference $(MODULES)
	cp .github/pages/index.html site
	for page in report research; do \
		sed -E 's#href="(report|research)\.md#href="\1.html#g; s#href="\.\./#href="$(SOURCES)/#g; s#href="([a-z_]+)/#href="$(SOURCES)/paper_outputs/\1/#g' \
			paper_outputs/$$page.html >site/$$page.html; \
	done

.PHONY: doctor
doctor:  ## list what is installed and what is missing, each with its remedy; works before `make setup` too
	@$(RUN) $(PYTHON) -m pipeline doctor

lint: setup-dev  ## run ruff, and mypy on osa and pipeline
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

hooks: setup-dev  ## run pre-commit's checks before each commit of git
	$(RUN) pre-commit install

readme: setup  ## render README's results from the files
	$(RUN) python -m pipeline report readme

COMPILE = $(RUN) uv pip compile --quiet --universal --python-version 3.11 --no-annotate
lock: setup  ## resolve requirements.in and requirements-dev.in
	$(if $(UV),,$(RUN) python -m pip install --quiet uv)
	$(COMPILE) requirements.in -o requirements.txt
	$(COMPILE) requirements-dev.in -o requirements-dev.txt
