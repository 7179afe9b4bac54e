# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` need nothing but a fresh clone, a C++17 compiler and a Python >= 3.12
# somewhere tools/find_python looks. Everything lands in .venv/ and build/; `make clean` removes it.

VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check -qq

# JAX_ULYSSES_CUDA=ON|OFF|AUTO reaches CMake through pyproject.toml. AUTO builds the CUDA kernels
# where nvcc and CUTLASS are, and fetches CUTLASS where nvcc and a GPU are (compiling them takes
# minutes); ON fetches it always, and fails without nvcc.
export JAX_ULYSSES_CUDA ?= AUTO
# Users' compilers may warn of more than those that this was written with.
export JAX_ULYSSES_WERROR ?= ON
CUTLASS := $(shell sed -n 's/.*"\(nvidia-cutlass==[^"]*\)".*/\1/p' pyproject.toml)
# Two compilers at a time on a small machine: an nvcc run of a CUTLASS kernel takes gigabytes.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)
ifneq ($(shell command -v ccache),)
export CMAKE_CXX_COMPILER_LAUNCHER ?= ccache
export CMAKE_CUDA_COMPILER_LAUNCHER ?= ccache
endif

NATIVE := CMakeLists.txt $(shell find cmake cuda ffi -type f \
  \( -name '*.cc' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cmake' \
     -o -name '*.def' -o -name CMakeLists.txt \) 2>/dev/null)
CXX_FILES = $(filter %.cc %.cu %.cuh %.h,$(NATIVE))
# The editable install notes which packages exist; their modules it finds by itself.
PACKAGES := $(shell find jax_ulysses ffi pallas models -name __init__.py 2>/dev/null)
PY_DIRS := README.md $(wildcard jax_ulysses ffi pallas models tests benchmarks examples docs tools)

PYTEST_ARGS ?=
RIG ?= ranks
GRID ?= full
P ?= 4
DEMO_ARGS ?=
CMAKE = $(BIN)/cmake
# The C++ tests need neither Python nor nvcc: what those build is covered by the install.
CTEST_FLAGS = -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
  -DJAX_ULYSSES_BUILD_TESTS=ON -DJAX_ULYSSES_PYTHON=OFF -DJAX_ULYSSES_CUDA=OFF \
  -DJAX_ULYSSES_WERROR=$(JAX_ULYSSES_WERROR)
CTEST = $(BIN)/ctest --output-on-failure --no-tests=error
# sphinx: warnings are errors; -n is left out because jaxtyping's annotations have no pages.
SPHINX_ARGS ?= -W --keep-going

.DEFAULT_GOAL := help
.PHONY: help demo test pytest gpu-test ctest tsan fuzz lint format docs wheel test-latest clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

# --- environment ------------------------------------------------------------------------------

# tools/find_python says in one line what is missing, and then nothing else runs.
$(PY):
	@python=$$(tools/find_python) && echo "$(VENV): from $$python" && \
	  $$python -m venv $(VENV)

$(VENV)/.build-tools: pyproject.toml tools/requirements.py | $(PY)
	$(PY) tools/requirements.py build > $(VENV)/build.txt
	$(PIP) install "ninja>=1.11" "cmake>=3.26" -r $(VENV)/build.txt
	@touch $@

# Editable, without build isolation: the build tree in build/ then outlives the install, and a
# changed C++ file costs its own compilation only.
$(VENV)/.installed: pyproject.toml $(NATIVE) $(PACKAGES) $(VENV)/.build-tools
ifeq ($(JAX_ULYSSES_CUDA),ON)
	$(PIP) install --no-deps $(CUTLASS)
else ifeq ($(JAX_ULYSSES_CUDA),AUTO)
	@if command -v nvcc >/dev/null && nvidia-smi -L >/dev/null 2>&1; then \
	  $(PIP) install --no-deps $(CUTLASS) || echo "no CUTLASS: no CUDA kernels"; fi
endif
	$(PIP) install --no-build-isolation -e .
	@touch $@

$(VENV)/.extra-%: pyproject.toml $(VENV)/.build-tools
	$(PY) tools/requirements.py $* > $(VENV)/$*.txt
	$(PIP) install -r $(VENV)/$*.txt
	@touch $@

# --- what people run --------------------------------------------------------------------------

demo: $(VENV)/.installed $(VENV)/.extra-flax  ## train a small transformer on 8 virtual devices
	$(PY) -m jax_ulysses.models.train $(DEMO_ARGS)

test: pytest ctest  ## everything: pytest, then the C++ tests

# The pytest script, never `python -m pytest`: that puts the source tree on sys.path.
pytest: $(VENV)/.installed $(VENV)/.extra-flax $(VENV)/.extra-test  ## the Python tests
	$(BIN)/pytest $(PYTEST_ARGS)

fuzz: $(VENV)/.installed $(VENV)/.extra-flax $(VENV)/.extra-test  ## a long random search
	HYPOTHESIS_PROFILE=long $(BIN)/pytest -m fuzz --timeout=3600 $(PYTEST_ARGS)

# RIG=grid: the kernels' own tests, all ranks in one launch (GRID=quick, full, bench or devices);
# ranks: P processes on one GPU; processes: P with a GPU each; devices: one process with P GPUs.
# P may be a list: 2,4,8.
gpu-test:  ## the tests on GPUs: RIG=grid|ranks|processes|devices P=4
ifeq ($(RIG),grid)
	$(MAKE) $(VENV)/.build-tools
	$(PIP) install --no-deps $(CUTLASS)
	PATH="$(abspath $(BIN)):$$PATH" tools/gpu_test.sh $(GRID) build/gpu
else
	$(MAKE) JAX_ULYSSES_CUDA=ON $(VENV)/.installed $(VENV)/.extra-cuda13 $(VENV)/.extra-test
	$(PY) -c 'from jax_ulysses.ffi import targets; assert "cuda" in targets.build_info()["platforms"], \
	  "built without CUDA: remove $(VENV)/.installed and call again"'
	JAX_ULYSSES_RIG=$(RIG) JAX_ULYSSES_RANKS=$(P) $(BIN)/pytest tests/gpu $(PYTEST_ARGS)
endif

ctest: $(VENV)/.build-tools  ## the C++ tests
	$(CMAKE) -S . -B build/ctest $(CTEST_FLAGS) -DCMAKE_BUILD_TYPE=Release
	$(CMAKE) --build build/ctest
	$(CTEST) --test-dir build/ctest

tsan: $(VENV)/.build-tools  ## the C++ tests under ThreadSanitizer
	$(CMAKE) -S . -B build/tsan $(CTEST_FLAGS) -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DJAX_ULYSSES_SANITIZE=thread
	$(CMAKE) --build build/tsan
	$(CTEST) --test-dir build/tsan

# --- what contributors and CI run -------------------------------------------------------------

lint: $(VENV)/.installed $(VENV)/.extra-dev  ## every static check
	$(PY) tools/check_files.py
	$(BIN)/ruff check $(PY_DIRS)
	$(BIN)/ruff format --check $(PY_DIRS)
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	tools/buildifier -mode=check -lint=warn BUILD
	$(BIN)/codespell
	tools/typing_tree $(PY)
	$(BIN)/pyrefly check --python-interpreter-path $(PY)

format: $(VENV)/.extra-dev  ## rewrite files the way `make lint` wants them
	$(BIN)/ruff check --fix $(PY_DIRS)
	$(BIN)/ruff format $(PY_DIRS)
	$(BIN)/clang-format -i $(CXX_FILES)
	tools/buildifier BUILD

docs: $(VENV)/.installed $(VENV)/.extra-flax $(VENV)/.extra-docs  ## HTML pages in build/docs
	JAX_PLATFORMS=cpu $(BIN)/sphinx-build $(SPHINX_ARGS) -b html docs build/docs

wheel: $(VENV)/.extra-dev  ## sdist and wheel in dist/
	rm -rf dist
	$(PY) -m build --outdir dist .

# The newest released JAX, in an environment of its own, built against its own headers. The
# sources are copied so that the two builds do not share a tree.
test-latest:  ## the tests against the newest JAX
	$(MAKE) VENV=build/venv-latest build/venv-latest/.latest
	build/venv-latest/bin/python -c 'import jax; print("jax", jax.__version__)'
	build/venv-latest/bin/pytest $(PYTEST_ARGS)

build/venv-latest/.latest: pyproject.toml $(NATIVE) $(PACKAGES) build/venv-latest/bin/python
	build/venv-latest/bin/python tools/requirements.py --without jax build > $(VENV)/build.txt
	build/venv-latest/bin/python tools/requirements.py flax test > $(VENV)/extras.txt
	$(PIP) install --upgrade jax jaxlib "ninja>=1.11" "cmake>=3.26" \
	  -r $(VENV)/build.txt -r $(VENV)/extras.txt
	$(PIP) install --no-build-isolation -C build-dir=build/latest -e .
	@touch $@

clean:  ## remove everything that the other targets made
	rm -rf $(VENV) build dist out .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -type d -prune -exec rm -rf {} +
