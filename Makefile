# Everything this repository does, by name. Plain `make` prints the list. GNU make 3.81 (macOS) or newer.

# Tried in this order; the first that is 3.11 or newer makes .venv. Name another: make setup PYTHON=/path/to/python
PYTHON ?= python3.11 python3.12 python3.13 python3 python

PY    := .venv/bin/python
READY := .venv/.ready
COLAB := .venv-colab

# Colab's own version first. Name another: make colab COLAB_PYTHON=/path/to/python
COLAB_PYTHON ?= python3.13 python3.12 python3.11

# Workers start other processes by the plain name `python`: that must be ours.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# Where it is set, as in many containers, every rank compiles anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick gpu lint notebooks colab book pdf links bench soak traces address clean clean-all

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## Make .venv and install requirements.txt into it (the others do this by themselves)

# New enough, and able to make environments (Debian ships that part separately, as python3-venv).
FIT := import ensurepip, sys; sys.exit(sys.version_info < (3, 11))

$(READY): requirements.txt
	@if ! $(PY) -c '$(FIT)' 2>/dev/null; then \
	  rm -rf .venv; \
	  for python in $(PYTHON); do \
	    if "$$python" -c '$(FIT)' 2>/dev/null; then "$$python" -m venv .venv && break; fi; \
	  done; \
	fi
	@$(PY) -c '$(FIT)' 2>/dev/null || { \
	  echo "Setting up needs Python 3.11 or newer with its venv module (tried: $(PYTHON)); name one: make setup PYTHON=/path/to/python" >&2; \
	  exit 1; }
	$(PY) -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@

demo: $(READY) ## Train on 8 processes (DP 4 x TP 2), compare with one process, account for every byte
	@mkdir -p out
	$(PY) scripts/10_dp_tp.py --dp 4 --tp 2 --figure out/demo.png --json out/demo.json

# Side by side, one process more than cores, with one thread each (tests/conftest.py), but for those marked `alone`,
# which follow three at a time, because they mostly wait: where nothing else is asked for, from the files that say so,
# because to collect all the others as well takes 10 s. With 5 pytest says that it was asked for none of these.
ALONE = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests)

test: lint ## Check style and types, then run every test (PYTEST_ARGS="-k layout" for some)
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --no-loadscope-reorder -m "not alone" $(PYTEST_ARGS); most=$$?; \
	case $$most in 0|1|5) ;; *) exit $$most ;; esac; \
	$(PY) -m pytest -n 3 -m alone $(or $(PYTEST_ARGS),$(ALONE)); rest=$$?; \
	case $$rest in 5) exit $$most ;; esac; case $$most in 1) exit 1 ;; esac; exit $$rest

quick: lint ## Run the engine's tests that start no process, for while you edit (PYTEST_ARGS="tests/book" for the book's)
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n auto --no-loadscope-reorder --quick $(or $(PYTEST_ARGS),tests/engine)

# With a Python of your own, PY=python3, nothing is installed: GPU boxes bring theirs, and may reach no registry.
gpu: $(if $(filter .venv/%,$(PY)),$(READY)) ## Try the engine and every worker on the GPUs that are here, in 8 minutes, and store what came of it
	$(PY) tests/gpu/one_gpu.py out/gpu; ended=$$?; \
	if test -f out/gpu/gpu.json; then cp out/gpu/gpu.json book/results/gpu.json; fi; exit $$ended

lint: $(READY) ## Check style and types only
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

notebooks: $(READY) ## Run the chapters, store what they print and draw, draw the pages' pictures (NAMES="07 10": these alone)
	$(PY) scripts/tools run_notebooks $(NAMES)
	$(PY) scripts/tools draw_pages

colab: $(READY) $(COLAB)/.ready ## Run the chapters on what Colab ships, compare with what is stored (NAMES="07 10": these alone)
	$(PY) scripts/tools run_in_colab --python $(COLAB)/bin/python $(NAMES)

$(COLAB)/.ready: .ci/colab.txt
	@rm -rf $(COLAB); for python in $(COLAB_PYTHON); do \
	  if "$$python" -c '$(FIT)' 2>/dev/null; then "$$python" -m venv $(COLAB) && break; fi; \
	done; test -x $(COLAB)/bin/python || { \
	  echo "Colab's stack needs Python 3.13, 3.12 or 3.11 with its venv module (tried: $(COLAB_PYTHON)); name one: make colab COLAB_PYTHON=/path/to/python" >&2; \
	  exit 1; }
	$(COLAB)/bin/python -m pip install --disable-pip-version-check -r .ci/colab.txt
	@touch $@

book: $(READY) ## Build the book into _build/html; any warning is an error
	.venv/bin/jupyter-book build . --all -W -n --keep-going

pdf: $(READY) ## Print the whole book into _build/muon-at-scale.pdf, with Chromium or Chrome (4 minutes)
	$(PY) scripts/tools print_book

links: $(READY) ## Check the book's links to other sites (needs a network, so it is no part of the tests)
	.venv/bin/jupyter-book build . --all --builder linkcheck

bench: $(READY) ## Take all measurements that this machine permits (NAMES="bytes": these; QUICK=1: a first impression, in out/)
	$(PY) scripts/tools bench $(NAMES) $(if $(QUICK),--quick)

soak: $(READY) ## Train 2,000 steps on 8 ranks, killing one every 100, and store what came of it (20 minutes)
	$(PY) scripts/18_beyond_one_machine.py --soak --json book/results/soak.json

traces: $(READY) ## Fetch the report's public traces, check every byte, and read them anew into book/results
	$(PY) scripts/tools fetch_traces
	$(PY) scripts/tools read_trace out/report-traces/*.json --json book/results/report_traces.json

address: ## Point every link at the published repository: make address URL=https://github.com/me/muon-at-scale
	@for python in $(PY) $(PYTHON); do \
	  if "$$python" -c '$(FIT)' 2>/dev/null; then exec "$$python" scripts/tools set_address '$(URL)'; fi; \
	done; echo "Needs Python 3.11 or newer (tried: $(PYTHON)); name one: make address PYTHON=/path/to/python" >&2; exit 1

clean: ## Remove _build, out and caches (book/results and the environments stay)
	rm -rf _build build out scripts/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find scripts tests book -type d -name __pycache__ -prune -exec rm -rf {} +

clean-all: clean ## Remove .venv and .venv-colab as well
	rm -rf .venv $(COLAB)
