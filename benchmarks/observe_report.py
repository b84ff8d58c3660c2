"""What the report of a large run weighs, and how long a browser takes to open it.

    python benchmarks/observe_report.py

writes a run of 5,000 trajectories with 2,000 tokens each, as `rollout run --out` leaves it, and its
report; ``report_open_s`` is there where there is a Chromium. `report_figures` is what
benchmarks/observe.py asks for them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "pages"))

from browser import Browser, find_chromium

from rollout.batch.records import trajectory_line
from rollout.chat.trajectory import Segment, Trajectory
from rollout.chat.transcript import Transcript
from rollout.clocks import monotonic
from rollout.observe.event_file import EVENTS
from rollout.observe.events import (
    BatchEnded,
    BatchStarted,
    Event,
    RequestEnded,
    RunEnded,
    RunStarted,
    ToolEnded,
    TrajectoryEnded,
    TrajectoryStarted,
    TurnEnded,
)
from rollout.observe.report.report import RunReport
from rollout.types import Message, Outcome, Prompt, ToolCall

TRAJECTORIES, MEMBERS, TURNS = 5_000, 8, 4
#: Of one trajectory: of its prompt, of a turn, of a tool's answer.
PROMPT, TURN, ANSWER = 200, 360, 120
#: Ids that a text of a large vocabulary uses, the frequent ones more often.
VOCABULARY, ZIPF = 100_000, 1.15
OPENINGS = 3


def report_figures(trajectories: int = TRAJECTORIES) -> dict[str, float]:
    """``report_mb``, ``report_write_s`` and, where there is a Chromium, ``report_open_s``.

    Opening takes the median of `OPENINGS` times, each in a browser that has just started, until
    findings, plots and the table are drawn and the whole file is read.
    """
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        write_run(run, trajectories)
        began = monotonic()
        page = RunReport(run, decode).write()
        figures = {
            "report_write_s": round(monotonic() - began, 2),
            "report_mb": round(page.stat().st_size / 1e6, 2),
        }
        if find_chromium() is not None:
            opened = [_opened(page, Path(directory) / f"browser-{at}") for at in range(OPENINGS)]
            figures["report_open_s"] = round(sorted(opened)[OPENINGS // 2], 2)
        return figures


def _opened(page: Path, profile: Path) -> float:
    with Browser(profile) as browser:
        began = monotonic()
        browser.open(page)
        browser.wait_for("document.readyState === 'complete'")  # not only what is seen of it
        seconds = monotonic() - began
        assert not browser.complaints, browser.complaints
        return seconds


def decode(ids: Any) -> str:
    """Texts as long as those of a large vocabulary."""
    return "".join(f" w{token:x}" for token in ids)


def write_run(directory: Path, trajectories: int) -> None:
    """The run, with a fixed seed."""
    directory.mkdir()
    random = np.random.default_rng(0)
    with (directory / "trajectories.jsonl").open("wb") as lines:
        for number in range(trajectories):
            lines.write(trajectory_line(_trajectory(number, random), decode) + b"\n")
    encode = msgspec.json.Encoder().encode
    with (directory / EVENTS).open("wb") as file:
        for event in _events(trajectories):
            file.write(encode(event) + b"\n")
    (directory / "meta.json").write_text("{}", encoding="utf-8")


def _ids(random: np.random.Generator, count: int) -> list[int]:
    ids: list[int] = (random.zipf(ZIPF, count) % VOCABULARY).tolist()
    return ids


def _trajectory(number: int, random: np.random.Generator) -> Trajectory:
    group, member = divmod(number, MEMBERS)
    transcript = Transcript()
    transcript.append_prompt(_ids(random, PROMPT))
    question = decode(_ids(random, 60))
    messages = [Message(role="user", content=question)]
    for turn in range(TURNS):
        ids = _ids(random, TURN)
        log_probs = (-random.exponential(0.7, TURN)).astype(np.float32).tolist()
        versions, finish = [(turn // 2, TURN)], "stop"
        transcript.append_generated(ids, log_probs, versions=versions, finish_reason=finish)
        if turn == TURNS - 1:
            messages.append(Message(role="assistant", content=decode(ids)))
            break
        answer = _ids(random, ANSWER)
        transcript.append_observation(answer)
        call = ToolCall(name="search", arguments={"query": decode(ids[:10])})
        messages.append(Message(role="assistant", content=decode(ids), tool_calls=[call]))
        messages.append(Message(role="tool", name="search", content=decode(answer)))
    return Trajectory(
        uid=f"prompt-{group}",
        group=group,
        member=member,
        transcript=transcript,
        segments=[Segment(transcript=transcript, messages=messages)],
        outcome=Outcome.COMPLETED,
        reason="",
        limit_source=None,
        cause=None,
        reward=float(random.random() < 0.4),
        num_turns=2 * TURNS,
        metrics={"tool_calls": TURNS - 1, "total_s": 20 + float(random.random())},
        prompt=Prompt(messages=[Message(role="user", content=question)], uid=f"prompt-{group}"),
        messages=messages,
    )


def _events(trajectories: int) -> list[Event]:
    events: list[Event] = [
        RunStarted(at=0, wall_s=1.8e9),
        BatchStarted(at=5, batch=0, call="generate", step=0, trajectories=trajectories),
    ]
    for number in range(trajectories):
        start = 5 + 0.02 * number
        group, member = divmod(number, MEMBERS)
        own = {"trajectory": number + 1}
        names: dict[str, Any] = {
            "batch": 0,
            "step": 0,
            "uid": f"prompt-{group}",
            "group": group,
            "member": member,
        }
        events.append(TrajectoryStarted(at=start, **own, **names))
        at = start
        for turn in range(TURNS):
            parts = {"queue_s": 0.05, "prefill_s": 0.2, "decode_s": 4.0 + turn}
            began, at = at, at + sum(parts.values())
            request = f"{number:08d}{turn}"
            events.append(
                RequestEnded(
                    at=at,
                    began=began,
                    session=f"0/prompt-{group}/{member}",
                    request=request,
                    replica=f"replica-{number % 8}",
                    tokens=TURN,
                    finish_reason="stop",
                    **parts,
                    **own,
                )
            )
            events.append(TurnEnded(at=at, began=began, turn=turn, requests=(request,), **own))
            if turn < TURNS - 1:
                events.append(ToolEnded(at=at + 0.4, began=at, tool="search", turn=turn, **own))
                at += 0.4
        events.append(
            TrajectoryEnded(at=at, began=start, outcome="completed", reward=0.0, **own, **names)
        )
    last = max(event.at for event in events)
    return [*events, BatchEnded(at=last, batch=0, began=5), RunEnded(at=last)]


if __name__ == "__main__":
    print(json.dumps(report_figures(), indent=2))
