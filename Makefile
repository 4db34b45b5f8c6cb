# Everything that is made here; `make help` lists it. Needs GNU make 3.81 or newer and Python 3.11 to 3.14.

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin/python
READY := $(VENV)/.installed
TRITONS := 3.6.0 3.7.1 3.9.0
NOTEBOOKS := $(wildcard notebooks/*.ipynb)

.PHONY: help report course test test-fast test-tritons lab workshop lint clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  PYTHON=python3.12  the interpreter that .venv is made with (Python 3.11 to 3.14)"
	@echo "  TORCH_INDEX=URL    an extra index for pip, such as the one of PyTorch's CPU build"
	@echo "  ARGS='...'         more arguments for the command (pytest, report, JupyterLab)"
	@echo
	@echo "  The language model (98 MB) lies in the folder KVVIZ_CACHE, or else in the user's cache folder"
	@echo "  (~/.cache/kvviz on Linux); python -m kvviz doctor prints where. make clean leaves it there."

report: $(READY) ## set up, fetch the model, run every notebook and write reports/ (ARGS=names for some)
	$(BIN) -m kvviz fetch
	$(BIN) -m kvviz report $(ARGS)

course: $(READY) ## the report, and reports/kvviz-course.zip to send to participants
	$(BIN) -m kvviz fetch
	$(BIN) -m kvviz report --archive reports/kvviz-course.zip

test: $(READY) ## set up, fetch the model and run all tests
	$(BIN) -m kvviz fetch
	KVVIZ_REQUIRE_MODEL=1 $(BIN) -m pytest $(ARGS)

test-fast: $(READY) ## the tests without notebooks, browser and slow ones
	$(BIN) -m pytest -m "not notebook and not browser and not slow" $(ARGS)

test-tritons: $(READY) $(TRITONS:%=.cache/triton-%/.installed) ## the engine's tests under every Triton that is supported
	@failed=; for version in $(TRITONS); do \
	  export PYTHONPATH="$(CURDIR)/.cache/triton-$$version"; \
	  echo "== Triton $$version"; \
	  $(BIN) -c "import sys, triton; sys.exit(triton.__version__ != '$$version')" && \
	  $(BIN) -m pytest -m "not notebook and not browser" $(ARGS) \
	    $$(grep -rl --include='test_*.py' 'kvviz\.engine' tests) || failed="$$failed $$version"; \
	done; test -z "$$failed" || { echo "failed under Triton$$failed" >&2; exit 1; }

lab: $(READY) | workshop/participants ## open the notebooks in JupyterLab, exercises unsolved
	$(BIN) -m jupyterlab $(ARGS) workshop/participants

workshop: $(READY) ## write workshop/participants (exercises with holes) and workshop/instructor (solved)
	$(BIN) -m kvviz workshop $(ARGS)

# Once: what a reader writes there is never touched again.
workshop/participants: | $(READY)
	$(BIN) -m kvviz workshop

lint: $(READY) ## ruff over code and notebooks; notebooks without outputs
	$(BIN) -m ruff check .
	$(BIN) -m ruff format --check .
	$(if $(NOTEBOOKS),$(BIN) -m nbstripout --verify --keep-id $(NOTEBOOKS))

clean: ## remove what was made here (not the model, not workshop/, which holds people's work)
	rm -rf $(VENV) reports .cache build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find kvviz tests notebooks -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

# The stamp comes last, and the environment is made from nothing: an interrupted install is done again.
$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || { \
	  echo "kvviz needs Python 3.11 to 3.14, and '$(PYTHON)' is not one ($$($(PYTHON) --version 2>&1))." \
	    "Choose another, as in: make report PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN) -m pip install $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") -r requirements.txt
	@touch $@

# One Triton a folder, found before the Triton of .venv.
.cache/triton-%/.installed: $(READY)
	rm -rf $(@D)
	$(BIN) -m pip install --quiet --no-deps --target $(@D) triton==$*
	@touch $@
