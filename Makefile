# Every target sets itself up. `make` alone lists them.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python

.PHONY: help build clean
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

build: ## compile the extension in place (DEEP_EP_BUILDS=fast,exact,asan,tsan)
	$(PY) setup.py -q build_ext --inplace
