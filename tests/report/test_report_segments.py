"""What the report shows of trajectories with several segments: each turn's own calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from report_segments import write_segments
from rollout.observe.report.said_turns import calls_of, turns_of
from rollout.observe.report.saved_trajectories import (
    SavedCall,
    SavedMessage,
    SavedSegment,
    SavedSpan,
    SavedTrajectory,
    TrajectoryLines,
)


def rows_of(directory: Path, at: int) -> list[SavedSegment]:
    lines = TrajectoryLines(directory / "trajectories.jsonl")
    found: list[SavedTrajectory] = []
    lines.decode(lines.read(directory / "none")[at], found.append)
    return found[0].rows


def told(calls: list[dict[str, Any]]) -> list[str]:
    return [f"{call['name']}({json.dumps(call['arguments'])}) {call['result']}" for call in calls]


def test_turns_of_every_segment_have_their_own_calls(tmp_path: Path) -> None:
    rows = rows_of(write_segments(tmp_path), 0)

    called = [[told(calls) for calls in turns] for turns in calls_of(rows)]

    assert dict(zip([row.purpose for row in rows], called, strict=True)) == {
        "main": [['alpha({"x": 1}) alpha says 1'], ['alpha({"x": 2}) alpha says 2']],
        "compaction": [['alpha({"x": 3}) alpha says 3'], []],
        "branch": [['beta({"x": 20}) beta says 20', 'beta({"x": 21}) beta says 21'], []],
        "subagent": [['beta({"x": 10}) beta says 10'], []],
    }
    named = {row.purpose: each for row, each in zip(rows, turns_of(rows), strict=True)}
    assert named == {
        "main": ("", [1, 2]),
        "compaction": ("", [3, 4]),
        "branch": ("0", [1, 2]),
        "subagent": ("1", [1, 2]),
    }


def said(text: str, *calls: str) -> SavedMessage:
    made = [SavedCall(name=call, raw=f"<{call}>") for call in calls]
    return SavedMessage(role="assistant", content=text, tool_calls=made)


def heard(text: str, **fields: str) -> SavedMessage:
    return SavedMessage(role="tool", content=text, **fields)


def spans(*texts: str) -> list[SavedSpan]:
    """Those in capitals are what the model was told."""
    return [
        SavedSpan(kind="observation" if text.isupper() else "generated", ids=[1], text=text)
        for text in texts
    ]


ASKED = SavedMessage(role="user", content="please")


@pytest.mark.parametrize(
    ("given", "messages", "expected"),
    [
        # A turn that no message has, since it could not be read.
        (("ASK", "<a>", "TOLD", "broken"), [ASKED, said("", "a"), heard("1")], [["a 1"], []]),
        # A turn that was cut and went on: a message for two spans.
        (("ASK", "I am <", "a>", "TOLD"), [ASKED, said("I", "a"), heard("1")], [[], ["a 1"]]),
        # Two turns that nothing came between.
        (("ASK", "<a>", "<b>"), [said("", "z"), said("", "a"), said("", "b")], [["a -"], ["b -"]]),
        # A turn without words, which no span has, between two observations; then one more.
        (
            ("ASK", "<a>", "TOLD", "TOLD", "no", "TOLD", "<b>"),
            [said("", "a"), heard("1"), said(""), ASKED, said("no"), ASKED, said("", "b")],
            [["a 1"], [], ["b -"]],
        ),
        # Answers out of order, by what they answer; an answer to what is no call.
        (
            ("ASK", "<a><b>"),
            [said("", "a", "b"), heard("2", name="b"), heard("1", name="a"), heard("not JSON")],
            [["a 1", "b 2", " not JSON"]],
        ),
    ],
)
def test_calls_are_those_of_the_message_that_a_span_ends(
    given: tuple[str, ...], messages: list[SavedMessage], expected: list[list[str]]
) -> None:
    row = SavedSegment(spans=spans(*given), messages=messages)

    (turns,) = calls_of([row])

    called = [
        [f"{call['name']} {'-' if call['result'] is None else call['result']}" for call in calls]
        for calls in turns
    ]
    assert called == expected
