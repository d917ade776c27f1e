# The kit's front door. `make help` lists what a person does with it.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

MODEL   ?= $(if $(BASE_URL),attached,tiny-mtp)
PROFILE ?= quick
MEASURE ?= auto
WEIGHTS ?=
BASE_URL ?=
PDF     ?= auto
PYTHON  ?= python3
VENV    ?= .venv
KIT     := $(VENV)/bin/kit
PIP     := $(VENV)/bin/python -m pip --disable-pip-version-check

# The tests run ExLlamaV3's own scheduler on the CPU: the package as it is, without what only a GPU needs.
EXL3_FOR_TESTS := exllamav3==1.6.5 triton

OPTIONS = --profile '$(PROFILE)' --measure '$(MEASURE)' --weights '$(WEIGHTS)' --base-url '$(BASE_URL)'

.PHONY: report measure render pdf lab test lint help clean

report: $(VENV)/.installed ## Measure MODEL and write reports/MODEL/index.html (and the PDF, if Chromium is here)
	$(KIT) report '$(MODEL)' $(OPTIONS) --pdf '$(PDF)'

measure: $(VENV)/.installed ## Measure only: records go to data/local/MODEL/
	$(KIT) measure '$(MODEL)' $(OPTIONS)

render: $(VENV)/.installed ## Render the report again from what is recorded, measuring nothing
	$(KIT) report '$(MODEL)' --profile '$(PROFILE)' --measure never --pdf no

pdf: $(VENV)/.installed ## Render the report and its PDF from what is recorded
	$(KIT) report '$(MODEL)' --profile '$(PROFILE)' --measure never --pdf yes

lab: $(VENV)/.installed-lab ## Open the notebooks in JupyterLab
	$(VENV)/bin/jupyter lab --ServerApp.ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) notebooks

test: $(VENV)/.installed-dev ## Check style and run the tests (no GPU needed)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/nbstripout --verify --keep-id --extra-keys "metadata.papermill cell.metadata.papermill metadata.language_info.version" notebooks/*.ipynb
	$(VENV)/bin/python -m pytest -q

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'
	@echo
	@echo "  MODEL=$(MODEL)  PROFILE=smoke|quick|full  MEASURE=auto|always|never  WEIGHTS=path|standin  BASE_URL=http://…"
	@echo "  Models: $(basename $(notdir $(wildcard data/models/*.yaml)))"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "The kit needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try make PYTHON=python3.12 …" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# The lock is used as constraints: one file pins whatever an extra brings in.
$(VENV)/.installed: pyproject.toml requirements.lock | $(VENV)/bin/python
	$(PIP) install -q -c requirements.lock -e .
	touch $@

$(VENV)/.installed-lab: $(VENV)/.installed
	$(PIP) install -q -c requirements.lock -e '.[lab]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install -q -c requirements.lock -e '.[lab,dev]'
	$(PIP) install -q --no-deps -c requirements.lock $(EXL3_FOR_TESTS)
	touch $@
