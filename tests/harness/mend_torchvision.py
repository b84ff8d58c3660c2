"""Has the torchvision of this environment declare its missing operators itself, in every process.

For environments of tests, whose processes import transformers before anything of ours:
``python tests/harness/mend_torchvision.py``. Again it changes nothing.
"""

from importlib.util import find_spec
from pathlib import Path

#: What torchvision describes at import and its own library has, which wants CUDA's torch.
OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

ADDED = f'''
# Added by tests/harness/mend_torchvision.py: where the library of this wheel does not load, what
# is described at import exists all the same.
if not _has_ops():
    for _name in {OPERATORS}:
        if not hasattr(torch.ops.torchvision, _name):
            torch.library.define("torchvision::" + _name, "{SCHEMA}")
'''

if __name__ == "__main__":
    spec = find_spec("torchvision")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "extension.py"
        text = path.read_text(encoding="utf-8")
        if ADDED not in text and "_has_ops" in text:
            path.write_text(text + ADDED, encoding="utf-8")
