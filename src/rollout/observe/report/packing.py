"""What the page holds of each trajectory, packed small: it inflates one when that is opened.

A pack is zlib around ``u32 length | JSON | planes``. The planes hold, over all tokens of all
segments in order, the ids (the lowest bytes of all, then the middle ones, then the highest) and,
of generated tokens, the negative log-probs in thousandths (low bytes, then high ones): bytes that
resemble each other stand together, which is what deflate likes. 65535 is an unknown log-prob.
"""

from __future__ import annotations

import base64
import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rollout.observe.report.said_turns import GENERATED, calls_of, turns_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from rollout.observe.report.saved_trajectories import (
        SavedSegment,
        SavedSpan,
        SavedTrajectory,
    )
    from rollout.observe.report.token_texts import TokenTexts

#: Thousandths, in 16 bits; the last value says that it is not known.
LOG_PROB_UNIT, UNKNOWN = 1000, 65535
#: zlib's levels beyond take several times as long, for a few per cent.
LEVEL = 6


def packed_trajectory(trajectory: SavedTrajectory, texts: TokenTexts) -> str:
    """The tokens, calls and facts of one trajectory, in base64."""
    rows = trajectory.rows
    spans = [span for row in rows for span in row.spans or ()]
    ids = _joined([np.asarray(span.ids, dtype=np.uint32) for span in spans], np.uint32)
    texts.see(ids)
    generated = [_thousandths(span) for span in spans if span.kind == GENERATED]
    facts = {
        "uid": trajectory.uid,
        "member": trajectory.member,
        "cause": trajectory.cause,
        "limit_source": trajectory.limit_source,
        "metrics": trajectory.metrics,
        "turn_scores": trajectory.turn_scores,
        "extra": trajectory.extra,
        "prompt": _prompt(trajectory),
        "segments": _segments(rows, texts),
    }
    planes = _planes(ids, 3) + _planes(_joined(generated, np.uint32), 2)
    return packed(facts, planes)


def packed(facts: object, planes: bytes = b"") -> str:
    """JSON and bytes, deflated, in base64."""
    text = msgspec.json.encode(facts)
    data = len(text).to_bytes(4, "little") + text + planes
    return base64.b64encode(zlib.compress(data, LEVEL)).decode("ascii")


def _joined(arrays: Sequence[npt.NDArray[Any]], kind: type[np.uint32]) -> npt.NDArray[np.uint32]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=kind)


def _planes(values: npt.NDArray[np.uint32], count: int) -> bytes:
    lanes = np.ascontiguousarray(values, dtype="<u4").view(np.uint8).reshape(-1, 4)
    return b"".join(np.ascontiguousarray(lanes[:, at]).tobytes() for at in range(count))


def _thousandths(span: SavedSpan) -> npt.NDArray[np.uint32]:
    """One for each of its ids; those that it lacks are not known."""
    values = np.full(len(span.ids), np.nan)
    given = np.asarray(span.log_probs, dtype=np.float64)[: len(values)]
    values[: len(given)] = given
    scaled = np.rint(np.clip(-values * LOG_PROB_UNIT, 0, UNKNOWN - 1))
    return np.where(np.isnan(values), UNKNOWN, np.nan_to_num(scaled)).astype(np.uint32)


def _segments(rows: Sequence[SavedSegment], texts: TokenTexts) -> list[dict[str, Any]]:
    """Segments with their spans; generated ones have their turn, and calls with results."""
    segments = []
    for row, calls, (path, turns) in zip(rows, calls_of(rows), turns_of(rows), strict=True):
        spans = [_span(span, texts) for span in row.spans or ()]
        generated = [span for span in spans if span["kind"] == GENERATED]
        for span, turn, made in zip(generated, turns, calls, strict=True):
            span["turn"] = turn
            if made:
                span["calls"] = made
        segments.append(
            {
                "purpose": row.purpose,
                "parent": row.parent,
                "reward": row.reward,
                "path": path,
                "spans": spans,
            }
        )
    return segments


def _span(span: SavedSpan, texts: TokenTexts) -> dict[str, Any]:
    told: dict[str, Any] = {"kind": span.kind, "count": len(span.ids)}
    if span.kind == GENERATED:
        told["versions"], told["finish"] = span.versions, span.finish_reason
    if span.text is not None and not texts.are_known:
        told["text"] = span.text
    if runs := texts.runs(span.ids):
        told["runs"] = runs
    return told


def _prompt(trajectory: SavedTrajectory) -> dict[str, Any]:
    """What came with the prompt; its messages stand in the tokens."""
    prompt = trajectory.prompt or {}
    wanted = ("agent_name", "data_source", "ground_truth", "sampling", "tools", "priority")
    return {name: prompt[name] for name in wanted if prompt.get(name)}
