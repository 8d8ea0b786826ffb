# Two commands that set all up, for a machine with Python, a C++20 compiler and make.
# VENV: the virtual environment. PYTHON: what makes it. TORCH: a requirement, such as torch<2.14, where the
# newest torch is not wanted.
PYTHON ?= python3
VENV ?= .venv
TORCH ?=
BIN := $(VENV)/bin
export PATH := $(abspath $(BIN)):$(PATH)
SOURCES := pyproject.toml CMakeLists.txt $(shell find infinity csrc -name '*.py' -o -name '*.[chi]pp' -o -name '*.inl' -o -name CMakeLists.txt)

.PHONY: train test lint

train: $(VENV)/installed
	infinity train --budget-host 256MiB --budget-nvme .:1GiB

# Where lint has run, the package is there with the extra for tests, too, and is not built once more.
test: $(firstword $(wildcard $(VENV)/with-test,dev) $(VENV)/with-test)
	pytest

lint: $(VENV)/with-test,dev
	ruff check .
	ruff format --check .
	mypy
	git ls-files '*.cpp' '*.hpp' '*.inl' | xargs clang-format --dry-run -Werror

# The package as its sources are now, alone or with an extra of pyproject.toml.
$(VENV)/installed: $(SOURCES) | $(BIN)/pip
	$(BIN)/pip install --quiet .
	touch $@

$(VENV)/with-%: $(SOURCES) | $(BIN)/pip
	$(BIN)/pip install --quiet ".[$*]"
	touch $@

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(BIN)/pip install --quiet "$(TORCH)")
