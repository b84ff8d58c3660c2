"""What makes an answer of a server unusable, found before its tokens are taken. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Of a sampled token: finite as float32, and not above 0 by more than rounding.
LogProb = Annotated[float, msgspec.Meta(ge=-1e30, le=1e-3)]
_Shape = TypeVar("_Shape")


def read_fields(answer: Any, shape: type[_Shape]) -> _Shape:
    """An answer, decoded from JSON, as the Struct `shape`."""
    try:
        return msgspec.convert(answer, type=shape)
    except msgspec.ValidationError as error:
        raise EngineError(f"a field of the answer is not as expected: {error}") from error


def check_log_probs(field: str, count: int, ids_field: str, expected: int) -> None:
    """Check that there is one log-prob for each id."""
    if count != expected:
        raise EngineError(f"{field} has {count} entries; expected {expected}, as {ids_field} has")


def check_scored_ids(
    field: str, scored: Sequence[int | None], ids_field: str, ids: Sequence[int], start: int = 0
) -> None:
    """Check that log-probs belong to the ids that they stand beside.

    Args:
        scored: Of each log-prob the id that it is of; None where the server does not say so.
        start: Where the first of them stands in its list.
    """
    for position, (own, expected) in enumerate(zip(scored, ids, strict=True), start):
        if own is not None and own != expected:
            raise EngineError(
                f"{field}[{position}] is of token {own}; expected {expected}, as in {ids_field}"
            )
