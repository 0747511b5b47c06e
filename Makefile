# make demo   train on scikit-learn's digits, then with every policy and backend
# make test   run the tests, with a part of the cases of large grids, without those marked slow
# make test-slow  those marked slow: examples, benchmarks, pages in a browser, machines as processes
# make test-long  every case of the tests, and many more schedules: SEED=0 COUNT=200000
#             CLUSTERS=10000 says which, SCALE=5 how many in the tests; LAUNCHES=20000 of NCCL on
#             modelled GPUs; and FAULTS=100 of machines in real processes
# make test-gpu   run those that need a GPU, within 9 minutes; all output goes to test-gpu.log
# make first-contact  for a machine with GPUs that is new: what works on it, within 8 minutes, as a
#             record in first-contact/; CONTACT="--parts facts plain" chooses parts and limits
# make free-threaded  the tests on CPython without the GIL; FREE_THREADED_PYTHON=path, or the source
#             tree CPYTHON_SOURCE=path, and TESTS="tests/deadlock" choose
# make lint   ruff and mypy
# make compat  models and recipes of others through each way in, into docs/compatibility.md
# make docs   build docs/ with the API reference into site/
# make mutation  changes that no test sees, 100 of them drawn; much too slow for every commit
# make coverage  branch coverage of the tests, into htmlcov/
# make release   build sdist and wheel into dist/, check them, and run the README's example with each
# make clean  remove the virtual environment and all caches

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python

# The constraints hold the tested versions.
INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow test-long free-threaded test-gpu first-contact compat browser lint format docs mutation coverage release clean

demo: $(VENV)/.stamp-examples
	$(PY) examples/digits.py
	$(PY) examples/digits.py --all

# Some tests wait more than they compute.
JOBS    ?= $(shell nproc)
WORKERS ?= $(shell expr $(JOBS) + 2)

test: $(VENV)/.stamp-test browser
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

test-slow: $(VENV)/.stamp-test browser
	$(PY) -m pytest -n $(WORKERS) --dist worksteal -m slow

SEED  ?= 0
COUNT ?= 200000
CLUSTERS ?= 10000
LAUNCHES ?= 20000
FAULTS ?= 100
SCALE ?= 5
# What grows with SCALE; of the other tests every case runs once.
SCALED := tests/simulation tests/unit/cluster/test_cluster_processes.py tests/typing

test-long: $(VENV)/.stamp-test
	$(PY) -m tests.simulation.replay --seed $(SEED) --count $(COUNT) --jobs $(JOBS)
	$(PY) -m tests.simulation.replay --seed $(SEED) --count $(COUNT) --jobs $(JOBS) --late
	$(PY) -m tests.simulation.replay --seed $(SEED) --count $(CLUSTERS) --jobs $(JOBS) --cluster
	$(PY) -m tests.simulation.replay --seed $(SEED) --count $(LAUNCHES) --jobs $(JOBS) --nccl
	$(PY) -m tests.storm --seed $(SEED) --count $(FAULTS)
	TEST_SCALE=$(SCALE) $(PY) -m pytest -n $(WORKERS) --dist worksteal $(SCALED)
	TEST_SCALE=2 $(PY) -m pytest -n $(WORKERS) --dist worksteal $(SCALED:%=--ignore=%)

test-gpu: $(VENV)/.stamp-test
	$(PY) -m tests.gpu.run

TESTS ?= tests

free-threaded:
	WORKERS=$(WORKERS) .ci/free-threaded $(TESTS)

CONTACT ?=

first-contact: $(VENV)/.stamp-test
	$(PY) -m tests.gpu.first_contact $(CONTACT)

compat: $(VENV)/.stamp-compat
	$(PY) -W ignore -m tests.compat --write

# For the tests of pages, which are skipped where there is none.
browser:
	-@.ci/browser

lint: $(VENV)/.stamp-test
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

# MUTATION="coordinator/ledger.py --sample 0" tries every change of a module.
MUTATION ?= --sample 100 --seed 0

mutation: $(VENV)/.stamp-test
	$(PY) -m tests.mutation $(MUTATION)

coverage: $(VENV)/.stamp-test
	$(PY) -m pip install --quiet --disable-pip-version-check 'coverage>=7.10'
	$(PY) -m coverage erase
	$(PY) -m coverage run -m pytest -n $(WORKERS) --dist worksteal
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage html --quiet
	$(PY) -m coverage report | tail -1

release:
	PYTHON=$(PYTHON) .ci/release

format: $(VENV)/.stamp-test
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

docs: $(VENV)/.stamp-docs
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet -b html docs site
	@echo "open site/index.html"

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp is touched last, so that an interrupted step is done again.
$(VENV)/.stamp-venv:
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.stamp-examples: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@echo "Installing the package and its examples into $(VENV)"
	$(INSTALL) -e '.[examples]'
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@echo "Installing the package, its tests and its examples into $(VENV)"
	$(INSTALL) -e '.[test,examples]'
	@touch $(VENV)/.stamp-examples $@

$(VENV)/.stamp-compat: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@echo "Installing the package and those of others that it is tried with into $(VENV)"
	$(INSTALL) -e '.[compat]'
	@touch $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@echo "Installing the package and the documentation generator into $(VENV)"
	$(INSTALL) -e '.[docs]'
	@touch $@
