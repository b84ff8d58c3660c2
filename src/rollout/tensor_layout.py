"""How rows of different lengths are laid out in tensors."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Literal

#: "padded": rectangles; "packed": jagged nested tensors, each row as long as its tokens.
Layout = Literal["padded", "packed"]
LAYOUTS = ("padded", "packed")
#: How wide padded tensors are: False as `lengths` say, True as their longest row, a number as the
#: next multiple of it that has room for that.
Trim = bool | int
#: No context is longer, and a mistyped multiple takes all memory.
MOST_TRIM = 1 << 24


def layout_faults(layout: Any, trim: Any) -> list[str]:
    """What is wrong with a layout and a trim that a caller gave."""
    faults = []
    if not isinstance(layout, str) or layout not in LAYOUTS:
        faults.append(f"layout = {layout!r:.80}: expected 'padded' or 'packed'")
    is_multiple = isinstance(trim, Integral) and 1 <= int(trim) <= MOST_TRIM
    if not (is_multiple or isinstance(trim, bool)):
        faults.append(
            f"trim = {trim!r:.80}: expected True, False or an integer from 1 to {MOST_TRIM}"
        )
    return faults


def trim_width(longest: int, configured: int, trim: Trim) -> int:
    """The width of padded tensors whose longest row has `longest` tokens."""
    if trim is False:
        return configured
    return -(-longest // int(trim)) * int(trim)
