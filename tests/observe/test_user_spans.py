"""`rollout.trace`: what a span shows of the arguments and the value of a function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rollout
from observed import prompts
from rollout.config import ObserveConfig
from rollout.observe.events import SpanEnded
from rollout.observe.written_values import MOST_CHARACTERS
from rollout.testing import Scenario, run_virtual, tool_call


class Note:
    """Counts how often it is written down, which may fail."""

    def __init__(self) -> None:
        self.written = 0

    def __repr__(self) -> str:
        self.written += 1
        raise ValueError("nobody may read this")


@rollout.trace
def take_last(texts: list[str], *, note: Note | None = None) -> dict[str, Any]:
    return {"last": texts.pop()}


@rollout.trace
async def fail(texts: list[str]) -> None:
    texts.clear()
    raise ValueError("no text")


note = Note()


@rollout.function_tool
async def tidy(topic: str) -> str:
    """Change what functions were given.

    Args:
        topic: Of what.
    """
    texts = [topic, "b", "c"]
    taken = take_last(texts)
    taken["last"] = "changed"
    take_last(texts)
    take_last([topic], note=note)
    take_last(["long " * MOST_CHARACTERS])
    take_last(["\ud800"])  # half of a character
    with pytest.raises(IndexError):
        take_last([])
    with pytest.raises(ValueError, match="no text"):
        await fail(texts)
    return "tidy"


def shown(*, has_reader: bool, observe: ObserveConfig | None = None) -> dict[str, list[Any]]:
    """What the spans of a trajectory show, by the function."""
    scenario = Scenario(seed=1).reply("please", tool_call("tidy", topic="a")).then("Oh.")
    config = scenario.config(**({} if observe is None else {"observe": observe}))
    found: dict[str, list[Any]] = {}

    def read(event: Any, subject: Any) -> None:
        if isinstance(event, SpanEnded):
            found.setdefault(event.name, []).append(subject)

    async def body() -> rollout.RolloutBatch:
        async with rollout.open_rollout(config, [tidy]) as runtime:
            if has_reader:
                runtime.services.events.attach(read)
            return await runtime.generate(prompts("a please"))

    (trajectory,) = run_virtual(body).trajectories
    assert (str(trajectory.outcome), trajectory.cause) == ("completed", None)
    assert trajectory.metrics["tool_errors"] == 0
    return found


def test_span_shows_arguments_and_value_as_they_were_at_the_call() -> None:
    found = shown(has_reader=True)
    first, second, third, fourth, half, failed = found["take_last"]
    assert first == ({"texts": ["a", "b", "c"]}, {"last": "c"})
    assert second == ({"texts": ["a", "b"]}, {"last": "b"})
    assert third == ({"texts": ["a"], "note": object.__repr__(note)}, {"last": "a"})
    assert all(len(each) == MOST_CHARACTERS + 1 for each in fourth)  # and no more is kept
    assert half == ("{'texts': ['\\ud800']}", "{'last': '\\ud800'}")
    assert failed == ({"texts": []}, None)
    assert found["fail"] == [({"texts": ["a"]}, None)]


def test_span_that_only_files_have_writes_no_arguments_down(tmp_path: Path) -> None:
    before = note.written
    assert shown(has_reader=False, observe=ObserveConfig(path=str(tmp_path))) == {}
    assert note.written == before
    shown(has_reader=True)
    assert note.written > before
