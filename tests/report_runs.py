"""Runs on disk as `rollout run --out` leaves them, made up, and what their reports hold."""

from __future__ import annotations

import base64
import functools
import json
import re
import zlib
from pathlib import Path
from typing import Any

import attrs
import msgspec

from rollout.batch.records import trajectory_line
from rollout.chat.trajectory import Segment, Trajectory
from rollout.chat.transcript import Transcript
from rollout.observe.event_file import EVENTS
from rollout.observe.events import (
    BatchEnded,
    BatchStarted,
    Event,
    LoopBlocked,
    ReplicaChanged,
    RequestEnded,
    RewardEnded,
    RunEnded,
    RunStarted,
    ToolEnded,
    TrajectoryEnded,
    TrajectoryStarted,
    TurnEnded,
)
from rollout.observe.report import RunReport, write_report
from rollout.testing import simulated_tokenizer
from rollout.types import DRIFT, Message, Outcome, Prompt, ToolCall

#: Seconds of the parts of a turn, where nothing is wrong.
QUEUE_S, PREFILL_S, DECODE_S, TOOL_S = 0.02, 0.08, 0.9, 0.05
BATCH_AT = 3.0
_TOKENIZER = simulated_tokenizer()


@attrs.frozen(kw_only=True)
class MadeUpRun:
    """Prompts of four members each, two turns with a call between them, on some replicas.

    Attributes:
        tool_s: Seconds of a call.
        shares: Of the trajectories, for each replica; they take turns without.
        cut: How many of ten are cut by length.
        drifting: How many of ten drift.
        compared: How many of ten are compared with their rendering.
        equal: How many of ten groups have equal rewards.
        rewards: Of the members of other groups, one after the other; from the first again after
            the last.
        blocked_s: Of the event loop, so often as `blocks` says.
        blocked_by: What did that.
        losses: Of the last replica.
        refuses: Whether one more replica rejects each request, before it is made elsewhere.
        result: Of the tool.
        unparsed: How many of ten make a call before that could not be parsed.
    """

    groups: int = 10
    members: int = 4
    replicas: int = 2
    tool_s: float = TOOL_S
    shares: tuple[int, ...] = ()
    cut: int = 0
    drifting: int = 0
    compared: int = 10
    equal: int = 1
    rewards: tuple[float, ...] = (0.0, 1.0)
    blocked_s: float = 0.0
    blocks: int = 8
    blocked_by: str = "fetch at tools.py:12 called time.sleep"
    losses: int = 0
    refuses: bool = False
    result: str = "found"
    unparsed: int = 0

    def write(self, directory: Path, *, has_ended: bool = True) -> Path:
        """Write it; returns the directory."""
        directory.mkdir(parents=True, exist_ok=True)
        events: list[Event] = [
            RunStarted(at=0.0, wall_s=1.8e9, version="0.1.0", config=CONFIG),
            *(ReplicaChanged(at=1.0, replica=name, state="serving") for name in self._names()),
            BatchStarted(
                at=BATCH_AT,
                batch=0,
                call="generate",
                step=7,
                prompts=self.groups,
                trajectories=self.groups * self.members,
            ),
        ]
        lines = []
        for number in range(self.groups * self.members):
            own, trajectory = self._trajectory(number)
            events += own
            lines.append(trajectory_line(trajectory, _decode) + b"\n")
        end = max(event.at for event in events)
        events += self._faults(end)
        events.sort(key=lambda event: event.at)
        if has_ended:
            events += [BatchEnded(at=end, batch=0, began=BATCH_AT), RunEnded(at=end + 0.5)]
            (directory / "meta.json").write_text("{}", encoding="utf-8")
        (directory / "trajectories.jsonl").write_bytes(b"".join(lines))
        text = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
        (directory / EVENTS).write_bytes(text)
        return directory

    def _names(self) -> list[str]:
        return [f"replica-{at}" for at in range(self.replicas)]

    def _replica(self, number: int) -> str:
        if not self.shares:
            return f"replica-{number % self.replicas}"
        place = number % sum(self.shares)
        for at, share in enumerate(self.shares):
            place -= share
            if place < 0:
                return f"replica-{at}"
        raise AssertionError

    def _faults(self, end: float) -> list[Event]:
        span = end - BATCH_AT
        blocked = [
            LoopBlocked(
                at=BATCH_AT + span * (at + 1) / (self.blocks + 1),
                seconds=self.blocked_s,
                cause=self.blocked_by,
            )
            for at in range(self.blocks if self.blocked_s else 0)
        ]
        last = self._names()[-1]
        lost = [
            ReplicaChanged(
                at=BATCH_AT + span * (at + 1) / (self.losses + 2),
                replica=last,
                state=state,
                why=why,
            )
            for at in range(self.losses)
            for state, why in (("lost", "the engine process ended (exit code 1)"), ("serving", ""))
        ]
        return [*blocked, *lost]

    def _trajectory(self, number: int) -> tuple[list[Event], Trajectory]:
        group, member = divmod(number, self.members)
        uid, replica = f"task-{group}", self._replica(number)
        start = BATCH_AT + 0.05 * (number % 16) + 2.2 * (number // 16)
        decode_s = DECODE_S * (1 + 0.3 * (number % 3))
        own: dict[str, Any] = {"trajectory": number + 1}
        names: dict[str, Any] = {
            "batch": 0,
            "step": 7,
            "uid": uid,
            "group": group,
            "member": member,
        }
        session = f"7/{uid}/{member}"
        events: list[Event] = [TrajectoryStarted(at=start, **own, **names)]
        transcript, messages = _transcript(number, self.result, is_cut=number % 10 < self.cut)
        generated = [span for span in transcript.spans if span.kind == "generated"]
        at = start
        for turn, span in enumerate(generated):
            if turn:
                if number % 10 < self.unparsed:
                    failed = {"is_error": True, "error": "not JSON"}
                    events.append(ToolEnded(at=at, began=at, tool="", turn=0, **failed, **own))
                events.append(
                    ToolEnded(at=at + self.tool_s, began=at, tool="search", turn=0, **own)
                )
                at += self.tool_s
            if self.refuses:
                events.append(
                    RequestEnded(
                        at=at,
                        session=session,
                        request=f"{number:08d}{turn}r",
                        replica=f"replica-{self.replicas}",
                        began=at,
                        queue_s=0.0,
                        prefill_s=0.0,
                        decode_s=0.0,
                        finish_reason="rejected",
                        **own,
                    )
                )
            began, at = at, at + QUEUE_S + PREFILL_S + decode_s
            request = f"{number:08d}{turn}"
            events.append(
                RequestEnded(
                    at=at,
                    session=session,
                    request=request,
                    replica=replica,
                    began=began,
                    queue_s=QUEUE_S,
                    prefill_s=PREFILL_S,
                    decode_s=decode_s,
                    tokens=len(span),
                    finish_reason=span.finish_reason or "",
                    **own,
                )
            )
            ended = {"at": at, "began": began, "turn": turn, "requests": (request,)}
            events.append(TurnEnded(generated_tokens=len(span), **ended, **own))
        is_cut = number % 10 < self.cut
        varied = self.rewards[number % len(self.rewards)]
        reward = 0.0 if group % 10 < self.equal else varied
        events.append(
            RewardEnded(at=at + 0.01, began=at, batch=0, group=group, reward=reward, **own)
        )
        outcome = Outcome.LENGTH if is_cut else Outcome.COMPLETED
        events.append(
            TrajectoryEnded(
                at=at + 0.01, began=start, outcome=outcome.value, reward=reward, **own, **names
            )
        )
        drift = "content" if number % 10 < self.drifting else "identical"
        question = messages[0].content
        return events, Trajectory(
            uid=uid,
            group=group,
            member=member,
            transcript=transcript,
            segments=[Segment(transcript=transcript, messages=messages)],
            outcome=outcome,
            reason="response" if is_cut else "",
            limit_source="lengths.response" if is_cut else None,
            cause=None,
            reward=reward,
            num_turns=4,
            metrics={
                "generation_s": 2 * (QUEUE_S + PREFILL_S + decode_s),
                "tool_s": self.tool_s,
                "tool_calls": len(generated) - 1,
                "total_s": at - start,
                **({f"{DRIFT}{drift}": 1} if number % 10 < self.compared else {}),
            },
            prompt=Prompt(messages=[Message(role="user", content=question)], uid=uid),
            messages=messages,
        )


CONFIG = {
    "model": {"path": "simulated"},
    "engine": {"kind": "simulated", "replicas": 2},
    "agent": {"name": "tool_agent"},
}


def _decode(ids: Any) -> str:
    return str(_TOKENIZER.decode(list(ids)))


@functools.cache
def _transcript(number: int, result: str, *, is_cut: bool) -> tuple[Transcript, list[Message]]:
    encode = _TOKENIZER.encode
    arguments = {"query": f"boats {number}"}
    question = f"How many boats are in harbour {number}?"
    transcript = Transcript()
    transcript.append_prompt(encode(question))
    messages = [Message(role="user", content=question)]
    said = encode("Let me look it up. " * (1 + number % 5))
    _generate(transcript, said, version=3, finish="stop")
    messages += [
        Message(
            role="assistant",
            content="Let me look it up.",
            tool_calls=[ToolCall(name="search", arguments=arguments)],
        ),
        Message(role="tool", name="search", content=result),
    ]
    transcript.append_observation(encode(result))
    answer = f"There are {number * 7} of them."
    _generate(transcript, encode(answer), version=4, finish="length" if is_cut else "stop")
    return transcript, [*messages, Message(role="assistant", content=answer)]


def _generate(transcript: Transcript, ids: list[int], *, version: int, finish: str) -> None:
    log_probs = [-0.01 * (at * at % 300) for at in range(len(ids))]
    versions = [(version, len(ids))]
    transcript.append_generated(ids, log_probs, versions=versions, finish_reason=finish)


def findings(directory: Path) -> list[tuple[str, str]]:
    report = RunReport(directory)
    report.write()
    return [(finding.kind, finding.title) for finding in report.findings]


def page_of(directory: Path, **options: Any) -> str:
    return write_report(directory, **options).read_text(encoding="utf-8")


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', page, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def unpacked(page: str, name: str) -> tuple[Any, bytes]:
    found = re.search(rf'<script type="application/octet-stream" id="{name}">([^<]*)<', page)
    assert found is not None
    data = zlib.decompress(base64.b64decode(found[1]))
    length = int.from_bytes(data[:4], "little")
    return json.loads(data[4 : 4 + length]), data[4 + length :]
