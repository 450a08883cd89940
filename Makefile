# Every target sets itself up: the first one creates $(VENV), with the torch of $(PYTHON) or, if it has none, its own.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

PY := $(VENV)/bin/python
SETUP := $(PYTHON) scripts/setup_venv.py $(VENV)
TESTS := $(PY) scripts/run_tests.py
FORMATTED := $(shell find benchmarks csrc tests/native -name '*.cu' -o -name '*.h' -o -name '*.cpp' 2>/dev/null)

.PHONY: help venv runtime clang build wheel demo train test test-all test-rest test-fast test-long durations lint format races asan mutants stubs litmus models bench gpu-lab compile-report docs docs-pictures clean

# Their first step after the set-up compiles the extension.
build demo train test test-fast bench: SETUP += --build

help: ## this list
	@echo "make TARGET [PYTHON=python3] [VENV=.venv] [ARGS='more arguments']"
	@grep -E '^[a-z-]+:.* ## ' Makefile | sed -E 's/:.* ## /\t/' | expand -t 18 | sed 's/^/  /'

clang: ## the virtual environment, with a clang++ that has ThreadSanitizer if the system has none
	@$(SETUP) --clang

venv: ## create the virtual environment if it is missing or pyproject.toml has changed
	@$(SETUP)

runtime: ## the virtual environment, without what only tests, linters and stubs need
	@$(SETUP) --runtime

build: venv ## compile the extension in place (DEEP_EP_BUILDS=fast,exact,asan,tsan or all; default fast)
	@$(PY) setup.py --quiet build_ext --inplace

wheel: runtime ## a wheel in dist/, for this Python; tagged manylinux if auditwheel is installed
	@$(PY) scripts/make_wheel.py $(ARGS)

demo: runtime ## a MoE layer on 8 ranks: dispatch, experts, combine; checked, timed, plotted
	@$(PY) setup.py --quiet build_ext --inplace
	$(PY) -m deep_ep_py.examples.moe_demo $(ARGS)

train: runtime ## train a MoE language model with experts on 4 ranks; losses checked against one process
	@$(PY) setup.py --quiet build_ext --inplace
	$(PY) -m deep_ep_py.examples.train_moe $(ARGS)

test: clang ## what makes a checkout trusted: lint and tests in three builds; says how long it should take
	@$(TESTS) $(ARGS)

test-rest: clang ## what test-all adds to test
	@$(TESTS) timed-rest fast-rest asan-rest races-rest mutants $(ARGS)

test-all: ## every test in every build, packaging, a planted bug per folder
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-rest

durations: ## test-all, recording how long each file takes in tests/durations.json
	@$(MAKE) --no-print-directory test ARGS=--record
	@$(MAKE) --no-print-directory test-rest ARGS=--record

test-fast: venv ## the short tests, with few schedules, in the fast and the exact build
	@$(TESTS) quick quick-exact $(ARGS)

test-long: clang ## hundreds of kills and stalls, 10 minutes of soak, five times the schedules; findings in out/long
	@$(TESTS) long many many-exact values steps silent $(ARGS)

races: clang ## the tests under ThreadSanitizer, after it has found the planted races (needs clang)
	@$(TESTS) races $(ARGS)

mutants: clang ## plant bugs one at a time and check that the tests catch each (needs clang)
	@$(PY) scripts/mutants.py $(ARGS)

stubs: venv ## write the type stubs of the extension from its bindings
	@DEEP_EP_BUILDS=exact $(PY) setup.py --quiet build_ext --inplace
	@$(PY) scripts/stubs.py

litmus: venv ## check each synchronization idiom against the PTX memory model
	@$(PY) scripts/litmus.py

models: venv ## check the protocol's rules in every order of events, and print the failure that each rule prevents
	@$(PY) scripts/models.py

asan: venv ## the tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(TESTS) asan $(ARGS)

lint: venv ## ruff, clang-format, mypy
	@$(TESTS) lint $(ARGS)

format: venv ## format the sources as lint expects
	$(PY) -m ruff check --quiet --fix-only .
	$(PY) -m ruff format --quiet .
	$(PY) -c "import clang_format; clang_format.clang_format()" -i $(FORMATTED)

bench: venv ## dispatch and combine against memcpy and gloo: a table, a plot, JSON
	@$(PY) setup.py --quiet build_ext --inplace
	$(PY) -m deep_ep_py bench $(ARGS)

gpu-lab: ## on a machine with a GPU, with the packages of its python3: experiments by worth, 5 minutes, a report
	@$(PYTHON) -m benchmarks.gpu_lab $(ARGS)

compile-report: venv ## registers, shared memory and spills of every kernel, from NVRTC
	$(PY) -m deep_ep_py compile --all --fabric ibgda --fabric proxy --masks-ranks --fresh --arch sm_90a $(ARGS)

docs: venv ## the documentation as a site in out/docs, with an API reference; a broken link fails
	@$(PY) -c 'import furo, myst_nb, numpydoc' 2>/dev/null || \
		DEEP_EP_BUILDS=none $(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable '.[docs]'
	@$(PY) setup.py --quiet build_ext --inplace
	@$(PY) -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs/site --doctree-dir build/doctrees . out/docs $(ARGS)
	@echo out/docs/index.html

docs-pictures: venv ## run what the pictures of docs/concepts.md show, and draw them again
	@$(PY) setup.py --quiet build_ext --inplace
	@PYTHONPATH=. $(PY) docs/pictures.py $(ARGS)

clean: ## remove build outputs; the virtual environment stays
	rm -rf build dist *.egg-info deep_ep_py/_C_*.so .pytest_cache .mypy_cache .ruff_cache
