"""Lets torchvision be imported where its own library is for another build of torch.

Its wheels from PyPI want CUDA's torch. What processors use of it is written in Python; only two
operators that it describes at import are missing then. They are declared here without code.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_ADDED = f'''
# Added by rollout.media.torchvision_operators: where the library of this wheel does not load, what
# is described at import exists all the same.
if not _has_ops():
    for _name in {_OPERATORS}:
        if not hasattr(torch.ops.torchvision, _name):
            torch.library.define("torchvision::" + _name, "{_SCHEMA}")
'''


def declare_missing_operators() -> None:
    """Call it before torchvision is imported; nothing happens where its library loads."""
    package = _package()
    if package is None:
        return
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return
    for library in package.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        except OSError:
            break
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", _SCHEMA)


def mend_installed() -> None:
    """Have the torchvision of this environment declare them itself, in every process.

    For environments of tests, whose processes import transformers before anything of ours:
    ``python -m rollout.media.torchvision_operators``. Again it changes nothing.
    """
    package = _package()
    if package is None:
        return
    path = package / "extension.py"
    text = path.read_text(encoding="utf-8")
    if _ADDED not in text and "_has_ops" in text:
        path.write_text(text + _ADDED, encoding="utf-8")


def _package() -> Path | None:
    spec = find_spec("torchvision")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


if __name__ == "__main__":
    mend_installed()
