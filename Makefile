# make demo: a drafter trained from nothing. make test: the tests. Both create the environment first, once.
PYTHON ?= python3.11
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

# Everything but the installation works without network. One thread a process: the models here are tiny.
OFFLINE = HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
TESTING = $(OFFLINE) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

# Test files that run side by side; the fixtures of a file are made once.
WORKERS ?= 2
SIDE_BY_SIDE = -n $(WORKERS) --dist loadfile

# The oldest transformers that is supported, with what it asks for; everything else as pinned.
OLDEST = 5.17.0
OLDEST_VENV = $(VENV)-transformers-$(OLDEST)
LOOSENED = transformers|huggingface_hub|hf-xet|tokenizers|httpx2|httpcore2|typer

.PHONY: demo test test-all test-cuda test-oldest lint types format docs
.DEFAULT_GOAL = demo

demo: $(STAMP)
	@$(OFFLINE) $(BIN)/dspark fit --config configs/quickstart.yaml

test: $(STAMP)
	@$(TESTING) $(BIN)/python -m pytest -q $(SIDE_BY_SIDE)

test-all: $(STAMP)
	@$(TESTING) $(BIN)/python -m pytest -q $(SIDE_BY_SIDE) -m "not cuda"

# On a machine with CUDA devices, all of which the tests use.
test-cuda: $(STAMP)
	@$(TESTING) $(BIN)/python -m pytest -q -m cuda

test-oldest: $(OLDEST_VENV)/.installed
	@$(TESTING) $(OLDEST_VENV)/bin/python -m pytest -q $(SIDE_BY_SIDE)

lint: $(STAMP)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: $(STAMP)
	@$(BIN)/python scripts/typecheck.py

format: $(STAMP)
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

# Pages and API into site/; a dead link or a docstring that names what is not there ends it.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "Open site/index.html"

# A changed dependency list installs again; the stamp is written only when all went well.
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV), a few minutes the first time ..."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) \
		|| { echo "This needs Python 3.11 or newer with venv. Name yours: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,docs,gguf,regenerate]'
	@touch $(STAMP)

$(OLDEST_VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing into $(OLDEST_VENV) ..."
	@$(PYTHON) -m venv $(OLDEST_VENV)
	@grep -v -E '^($(LOOSENED))==' constraints.txt > $(OLDEST_VENV)/constraints.txt
	@$(OLDEST_VENV)/bin/python -m pip install -qq --disable-pip-version-check -c $(OLDEST_VENV)/constraints.txt \
		transformers==$(OLDEST) -e '.[dev,docs,gguf,regenerate]'
	@touch $@
