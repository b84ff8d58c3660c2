"""Events on disk, and the one stream that takes them there."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout.errors import RolloutError
from rollout.observe import read_events
from rollout.observe.event_file import EVENTS, EventFile
from rollout.observe.event_stream import EventStream
from rollout.observe.events import (
    AnyEvent,
    LoopBlocked,
    RunEnded,
    RunStarted,
    TurnEnded,
)

DOCS = Path(__file__).parents[2] / "docs" / "observe.md"


def write(directory: Path, *events: AnyEvent) -> None:
    file = EventFile(directory)
    for event in events:
        file(event, None)
    file.close()


def test_event_file_events_are_read_back_as_they_were(tmp_path: Path) -> None:
    events: tuple[AnyEvent, ...] = (
        RunStarted(at=0.0, wall_s=1.5e9, config={"seed": 1}),
        TurnEnded(at=2.0, trajectory=1, turn=0, began=1.0, requests=("a", "b"), path="0"),
        LoopBlocked(at=3.0, seconds=0.5, cause="a ? surrogate"),
        RunEnded(at=4.0),
    )
    lone = LoopBlocked(at=3.0, seconds=0.5, cause="a \udc80 surrogate")
    write(tmp_path, *events[:2], lone, events[3])
    assert list(read_events(tmp_path)) == list(events)
    assert list(read_events(tmp_path / EVENTS)) == list(events)


def test_event_file_torn_last_line_is_left_out_and_not_continued(tmp_path: Path) -> None:
    write(tmp_path, RunEnded(at=1.0))
    with open(tmp_path / EVENTS, "ab") as file:
        file.write(b'{"kind":"run_end')
    assert list(read_events(tmp_path)) == [RunEnded(at=1.0)]
    write(tmp_path, RunEnded(at=2.0))
    assert list(read_events(tmp_path)) == [RunEnded(at=1.0), RunEnded(at=2.0)]


def test_read_events_kind_of_a_later_version_is_left_out(tmp_path: Path) -> None:
    (tmp_path / EVENTS).write_bytes(b'{"kind":"of_later","at":1}\n{"kind":"run_ended","at":2}\n')
    assert list(read_events(tmp_path)) == [RunEnded(at=2.0)]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"kind":"turn_ended"}', ".*missing"),
        (b'{"kind":"\xff"}', "'utf-8' codec can't decode byte 0xff"),
        (b'{"kind":"loop_blocked","at":3,"seconds":1,"cause":"\xff"}', "'utf-8' codec can't"),
    ],
)
def test_read_events_line_that_is_no_event_is_named(
    tmp_path: Path, line: bytes, fault: str
) -> None:
    (tmp_path / EVENTS).write_bytes(b'{"kind":"run_ended","at":2}\n' + line + b"\n")
    with pytest.raises(RolloutError, match=rf"events.jsonl:2: expected an event: {fault}"):
        list(read_events(tmp_path))
    with pytest.raises(RolloutError, match="cannot be read: No such file"):
        list(read_events(tmp_path / "nothing"))


def test_event_stream_reader_that_raises_is_not_called_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events, read = EventStream(), list[AnyEvent]()

    def raises(event: object, subject: object) -> None:
        raise ValueError("no")

    events.attach(raises)
    events.attach(lambda event, subject: read.append(event))  # type: ignore[arg-type]
    for at in (1.0, 2.0):
        events.emit(RunEnded(at=at))
    assert [event.at for event in read] == [1.0, 2.0]
    assert caplog.text.count("it is not called again") == 1


def test_docs_events_each_kind_with_its_fields_is_listed() -> None:
    rows = {
        line.split("|")[1].strip(): line for line in DOCS.read_text().splitlines() if "| `" in line
    }
    for kind in AnyEvent.__args__:
        row = rows[f"`{kind.__struct_config__.tag}`"]
        missing = [f for f in kind.__struct_fields__ if f != "at" and f"`{f}`" not in row]
        assert not missing, (kind, missing)
