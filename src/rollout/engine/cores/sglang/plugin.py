"""Entry points that let an unmodified SGLang run on a CPU, through its own plugin interface.

Every SGLang in the environment sees these entry points, those on GPUs too: they are silent unless
`CPU_VARIABLE` is "1" in the environment. `SGLangCore` sets it for engines with ``device="cpu"``;
SGLang's processes inherit it.
"""

from __future__ import annotations

import os

#: Set to "1" to ask for SGLang on the CPU.
CPU_VARIABLE = "ROLLOUT_SGLANG_CPU"
PLATFORM = "rollout.engine.cores.sglang.cpu_platform.CpuPlatform"
#: Operators that torchvision declares fake kernels for. Its wheel's own library wants CUDA.
TORCHVISION_OPERATORS = ("nms", "qnms")
TORCHVISION_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
#: Where SGLang pins host memory for the routed experts, which needs CUDA.
HOST_REGISTER = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"


def is_cpu_wanted() -> bool:
    """Whether this process was asked to run SGLang on the CPU."""
    return os.environ.get(CPU_VARIABLE) == "1"


def platform() -> str | None:
    """Entry point ``sglang.srt.platforms``: the platform's class; None where it is not wanted."""
    if not is_cpu_wanted():
        return None
    _declare_torchvision_operators()
    return PLATFORM


def hooks() -> None:
    """Entry point ``sglang.srt.plugins``: leave out what SGLang can on CUDA only."""
    if not is_cpu_wanted():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(HOST_REGISTER, _register_nothing, HookType.REPLACE)


def _register_nothing(*_args: object, **_options: object) -> None:
    """Memory of the host needs no registration where there is no GPU."""


def _declare_torchvision_operators() -> None:
    import torch

    for name in TORCHVISION_OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", TORCHVISION_SCHEMA)
