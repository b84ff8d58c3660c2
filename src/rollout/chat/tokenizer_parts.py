"""What a fast tokenizer is made of, read from its parts."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Bytes that byte-level vocabularies write as themselves; the others, in their order, are written
#: as U+0100 and up.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def state_of(part: Any) -> Mapping[str, Any]:
    """The settings of a normalizer, pre-tokenizer or decoder; empty where there is none."""
    return {} if part is None else json.loads(part.__getstate__())


def parts_of(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts in order, sequences taken apart."""
    if state.get("type") != "Sequence":
        return [state] if state else []
    names = ("normalizers", "pretokenizers", "decoders")
    inner = next((state[name] for name in names if name in state), ())
    return [part for nested in inner for part in parts_of(nested)]


def byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies (GPT-2's)."""
    others = itertools.count(0x100)
    return [chr(byte) if byte in _PRINTABLE else chr(next(others)) for byte in range(256)]
