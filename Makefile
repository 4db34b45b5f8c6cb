# Every command of this project. `make help` lists the commands. They need GNU make 3.81 or newer, and Python 3.11 to 3.14.

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=

BIN := .venv/bin/python
TRITONS := 3.6.0 3.7.1 3.9.0
ENGINES := lmcache sglang transformers vllm
NOTEBOOKS := $(wildcard notebooks/*.ipynb)

# Tests run in two processes. All tests of a file run in one process, so that each fixture of the file is made only once.
# tests/conftest.py orders the files.
PYTEST := $(BIN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help environment report course test test-fast test-tritons test-engines engines lab workshop lint clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  PYTHON=python3.12  make .venv with this interpreter (Python 3.11 to 3.14)"
	@echo "  TORCH_INDEX=URL    let pip use one more index, for example the index of PyTorch's CPU build"
	@echo "  ARGS='...'         add arguments to the command (pytest, kvviz report, kvviz engine, JupyterLab)"
	@echo
	@echo "  The language model (98 MB) is stored in the folder KVVIZ_CACHE. Without this variable it is stored in"
	@echo "  the user's cache folder (~/.cache/kvviz on Linux). kvviz doctor prints the folder. make clean keeps it."

# If .venv is complete, this target does nothing. If this folder was moved or copied, it corrects the paths in .venv.
environment: ## set up .venv: install the pinned packages and kvviz
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || { \
	  echo "kvviz needs Python 3.11 to 3.14, but '$(PYTHON) --version' says: $$($(PYTHON) --version 2>&1)." \
	    "Choose another Python, for example: make report PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -m kvviz.environment $(if $(TORCH_INDEX),"$(TORCH_INDEX)")

report: environment ## run every notebook and write reports/ (ARGS='00 03' for some of them)
	$(BIN) -m kvviz fetch
	$(BIN) -m kvviz report $(ARGS)

course: environment ## write the report, and pack it into reports/kvviz-course.zip for participants
	$(BIN) -m kvviz fetch
	$(BIN) -m kvviz report --archive reports/kvviz-course.zip

test: environment ## run all tests, in two processes
	$(BIN) -m kvviz fetch
	KVVIZ_REQUIRE_MODEL=1 $(PYTEST) $(ARGS)

test-fast: environment ## run the tests without notebooks, browser tests and slow tests
	$(PYTEST) -m "not notebook and not browser and not slow" $(ARGS)

test-tritons: environment $(TRITONS:%=.cache/triton-%/.installed) ## run the tests of the kernels under each supported Triton
	@failed=; for version in $(TRITONS); do \
	  export PYTHONPATH="$(CURDIR)/.cache/triton-$$version"; \
	  echo "== Triton $$version"; \
	  $(BIN) -c "import sys, triton; sys.exit(triton.__version__ != '$$version')" && \
	  $(PYTEST) -m "not notebook and not browser" $(ARGS) \
	    $$(grep -rlE --include='test_*.py' 'kvviz\.(kernels|engine)' tests) || failed="$$failed $$version"; \
	done; test -z "$$failed" || { echo "failed under Triton$$failed" >&2; exit 1; }

engines: environment ## run released vLLM engines, and add what they did to notebooks/recorded_engines.json
	$(BIN) -m kvviz fetch
	$(BIN) -m kvviz engine matrix $(ARGS)

test-engines: environment .cache/engine-wheels/.installed ## run the recipes of the audit against the real classes of the engines
	@failed=; for engine in $(ENGINES); do \
	  echo "== $$engine"; \
	  PYTHONPATH="$(CURDIR)/.cache/engine-wheels" CUDA_VISIBLE_DEVICES= KVVIZ_REQUIRE_ENGINES=1 \
	  $(BIN) -m pytest $(ARGS) tests/engines/test_$$engine.py || failed="$$failed $$engine"; \
	done; test -z "$$failed" || { echo "failed with$$failed" >&2; exit 1; }

lab: environment | workshop/participants ## open JupyterLab with the front page and the notebooks, with holes in the exercises
	$(BIN) -m jupyterlab workspaces import deploy/lab_workspace.json
	$(BIN) -m jupyterlab --LabApp.default_url=/lab/workspaces/kvviz $(ARGS) workshop/participants

workshop: environment ## write workshop/participants (exercises with holes) and workshop/instructor (with solutions)
	$(BIN) -m kvviz workshop $(ARGS)

# This folder is written only once. After that, it may contain somebody's work, and is never changed.
workshop/participants: | environment
	$(BIN) -m kvviz workshop

lint: environment ## check code and notebooks with ruff, and that notebooks contain no outputs
	$(BIN) -m ruff check .
	$(BIN) -m ruff format --check .
	$(if $(NOTEBOOKS),$(BIN) -m nbstripout --verify --keep-id $(NOTEBOOKS))

clean: ## remove all files that make wrote, except the model and workshop/, which contains people's work
	rm -rf .venv .venv.lock reports .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find kvviz tests notebooks -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

# Each version of Triton has its own folder. Python searches this folder before .venv.
.cache/triton-%/.installed: requirements.txt | environment
	rm -rf $(@D)
	$(BIN) -m pip install --quiet --no-deps --target $(@D) triton==$*
	@touch $@

# The engines and what their caches import (1.3 GB). Their other dependencies take several gigabytes.
.cache/engine-wheels/.installed: tests/engines/requirements.txt | environment
	rm -rf $(@D)
	$(BIN) -m pip install --quiet --no-deps --target $(@D) -r tests/engines/requirements.txt
	@touch $@
