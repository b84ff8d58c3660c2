"""Which of a machine's GPUs a torch device is.

Loaded in engine processes: imports the standard library only.
"""

from __future__ import annotations

import os


def name_gpu(device: str) -> str:
    """The GPU of a torch device of this process, as ``CUDA_VISIBLE_DEVICES`` names it.

    Empty for a CPU, and for a device that the process cannot see.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = int(index or 0)
    if visible is None:
        return str(number)
    names = [name.strip() for name in visible.split(",")]
    return names[number] if number < len(names) else ""
