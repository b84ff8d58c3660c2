"""Lets torchvision be imported where its own library is for another build of torch.

Its wheels from PyPI want CUDA's torch. What processors use of it is written in Python; only two
operators that it describes at import are missing then. They are declared here without code.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_missing_operators() -> None:
    """Call it before torchvision is imported; nothing happens where its library loads."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        except OSError:
            break
    for name in OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", SCHEMA)
