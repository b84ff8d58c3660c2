# ruff: isort: skip_file
from rollout.engine.cores.sglang.sglang_core import SGLangCore as SGLangCore
