"""What people see of a batch: progress, summary, groups and transcripts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
from rich.console import Console

from rollout import LengthsConfig, Message, Outcome, Prompt, Trajectory, collate
from rollout.chat import Transcript
from rollout.cli.groups import group_table
from rollout.cli.live_details import live_details
from rollout.cli.progress import ProgressDisplay, ProgressMeter, show_progress
from rollout.cli.summary import summary_lines
from rollout.cli.time_left import TimeLeft, time_left_words
from rollout.cli.transcript_view import print_transcript
from rollout.engine.pool.replica import ReplicaStatistics
from rollout.observe.explanation import CallWaits, Explanation, TrajectoryWaits, Wait
from rollout.testing import decode_ids, encode_text
from rollout.types import Cause


@attrs.define
class Counts:
    admitted: int = 64
    running: int = 0
    finished: int = 0
    generated_tokens: int = 0
    tool_calls: int = 0


def plain() -> Console:
    return Console(file=io.StringIO(), width=80)


def terminal(**options: Any) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, color_system="standard", width=80, **options
    )


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_progress_reading_says_done_running_speed_and_calls() -> None:
    meter = ProgressMeter()
    meter.read(100.0, Counts())
    counts = Counts(running=20, finished=12, generated_tokens=624, tool_calls=1041)
    reading = meter.read(102.0, counts)
    assert str(reading) == "12/64 done · 20 running · 312 tok/s · 1,041 tool calls"


def test_time_left_is_not_said_before_there_is_ground() -> None:
    left = TimeLeft()
    assert [left.read(float(now), now, 100) for now in range(10)] == [None] * 10


def test_time_left_of_a_steady_pace_is_what_it_takes() -> None:
    left = TimeLeft()
    reads = [left.read(float(now), now // 2, 100) for now in range(180)]
    assert reads[100] == pytest.approx(100, rel=0.1)
    assert reads[160] == pytest.approx(40, rel=0.1)


def test_time_left_grows_where_the_pace_slows_and_is_withdrawn_where_nothing_ends() -> None:
    left = TimeLeft()
    fast = [left.read(float(now), now, 100) for now in range(81)]
    stuck = [left.read(float(now), 80, 100) for now in range(81, 1000)]
    assert fast[80] == pytest.approx(20, rel=0.05)
    assert stuck[20] is not None
    assert stuck[20] > 30
    assert stuck[-1] is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (44.0, "about 40 s left"),
        (8000.0, "about 2.2 h left"),
    ],
)
def test_time_left_in_words_is_no_more_exact_than_known(seconds: float, words: str) -> None:
    assert time_left_words(seconds) == words


def test_details_show_groups_engines_tools_and_the_slowest() -> None:
    def waits(uid: str, member: int, seconds: float, *each: Wait) -> TrajectoryWaits:
        return TrajectoryWaits(uid, 0, member, seconds, each)

    call = CallWaits(
        name="generate",
        step=1,
        seconds=50.0,
        groups=9,
        trajectories=(
            waits("a", 0, 12.0, Wait("tool", 3.0, "'search'")),
            waits("a", 1, 40.0, Wait("tool", 9.0, "'search'")),
            waits("b", 0, 20.0, Wait("generation", 1.0, "engine-0", note="5 tokens so far")),
            TrajectoryWaits("c", 2, 0, None, (Wait("place", 50.0),)),
        ),
    )
    replicas = [
        ReplicaStatistics("engine-0", "serving", 12, 0, 1),
        ReplicaStatistics("engine-1", "restarting", 0, 0, 2),
    ]
    assert live_details(Explanation((call,)), replicas) == [
        ("groups", "6 of 9 ended"),
        ("engines", "engine-0 12 · engine-1 restarting"),
        ("now", "2 with tools · 1 generating · 1 without a place"),
        ("tools", "search 2 under way, the longest for 9.0 s"),
        ("slowest", "a/1 40.0 s: tool 'search', for 9.0 s"),
        ("", "b/0 20.0 s: generation on engine-0, for 1.0 s, 5 tokens so far"),
        ("", "a/0 12.0 s: tool 'search', for 3.0 s"),
    ]


@pytest.mark.anyio
async def test_progress_on_terminal_shows_details_below_the_line() -> None:
    console, counts = terminal(), Counts(admitted=4, running=4)
    with ProgressDisplay(console) as display:
        with anyio.move_on_after(2):
            await show_progress(
                display, "starting", lambda: counts, lambda: [("slowest", "a [b] " + "x" * 200)]
            )
    text = shown(console)
    assert "slowest" in text
    assert "a [b] xxx" in text
    assert "x" * 81 not in text
    assert text.endswith("\x1b[2K")


@pytest.mark.anyio
async def test_progress_without_terminal_prints_lines_now_and_then() -> None:
    console, counts = plain(), Counts(admitted=2, running=2)
    began = anyio.current_time()

    def look() -> Counts | None:
        elapsed = anyio.current_time() - began
        counts.generated_tokens = int(elapsed * 10)
        return counts if elapsed >= 3 else None

    with ProgressDisplay(console) as display:
        with anyio.move_on_after(11.9):
            await show_progress(display, "starting 1 engine", look)
    assert shown(console).splitlines() == [
        "starting 1 engine",
        "0/2 done · 2 running · 0 tok/s · 0 tool calls",
        "0/2 done · 2 running · 10 tok/s · 0 tool calls",
    ]


@pytest.mark.anyio
async def test_progress_on_terminal_keeps_one_line_and_removes_it() -> None:
    console, counts = terminal(), Counts(admitted=4, running=4)
    began = anyio.current_time()
    with ProgressDisplay(console) as display:
        with anyio.move_on_after(2):
            await show_progress(
                display, "starting", lambda: counts if anyio.current_time() > began + 1 else None
            )
    text = shown(console)
    assert "starting … 1 s" in text
    assert "0/4 done · 4 running · 0 tok/s · 0 tool calls" in text
    assert "\x1b[?25l" in text  # the cursor is hidden meanwhile
    assert text.endswith("\x1b[2K")  # and the line is gone


def spoken() -> Transcript:
    transcript = Transcript()
    transcript.append_prompt(encode_text("What is 2+2?"))
    for text in ("add(2, 2)", "4."):
        ids = encode_text(text)
        transcript.append_generated(
            ids, [-0.5] * len(ids), versions=[(0, len(ids))], finish_reason="stop"
        )
        if text != "4.":
            transcript.append_observation(encode_text("[4]\n"))
    return transcript


def test_transcript_without_colour_is_marked() -> None:
    console = plain()
    print_transcript(console, spoken(), decode_ids)
    assert shown(console) == (
        "[prompt, not trained] 12 tokens\nWhat is 2+2?\n"
        "[trained] 9 tokens\nadd(2, 2)\n"
        "[observation, not trained] 4 tokens\n[4]\n\n"
        "[trained] 2 tokens\n4.\n"
    )


def test_transcript_on_terminal_is_coloured_with_a_legend() -> None:
    console = terminal()
    print_transcript(console, spoken(), decode_ids)
    dim, green, yellow, off = "\x1b[2m", "\x1b[1;32m", "\x1b[33m", "\x1b[0m"
    assert shown(console) == (
        f"{dim}prompt, not trained{off} · {green}trained{off} · "
        f"{yellow}observation, not trained{off}\n"
        f"{dim}What is 2+2?{off}{green}add(2, 2){off}{yellow}[4]{off}\n{green}4.{off}\n"
    )


def test_transcript_with_long_prompt_says_what_it_left_out() -> None:
    console, transcript = plain(), Transcript()
    transcript.append_prompt(encode_text("a" * 400 + "b" * 5 + "c" * 400))
    print_transcript(console, transcript, decode_ids)
    assert shown(console).splitlines()[1:] == ["a" * 400, "… 5 characters …", "c" * 400]


def row(group: int, member: int, **fields: Any) -> Trajectory:
    prompt = Prompt(
        messages=[Message(role="user", content="What\nis 2+2?")], ground_truth="4", uid=f"p{group}"
    )
    return Trajectory(
        uid=f"p{group}",
        group=group,
        member=member,
        prompt=prompt,
        num_turns=4,
        **{"transcript": spoken(), "outcome": Outcome.COMPLETED, **fields},
    )


def rows() -> list[Trajectory]:
    cause = Cause(type="ValueError", message="bad\nluck")
    return [
        row(0, 0, reward=1.0),
        row(0, 1, reward=0.0),
        row(1, 0, outcome=Outcome.FAILED, reason="agent", cause=cause, trainable=False),
        row(1, 1, reward=0.5, transcript=Transcript(), outcome=Outcome.LENGTH, reason="turn"),
    ]


def test_summary_says_what_became_of_a_batch() -> None:
    batch = collate(rows(), LengthsConfig(prompt=16, response=16), 0)
    assert summary_lines(batch, 3.0, Path("out")) == [
        "rows      4 trajectories of 2 prompts in 3.0 s; 3 trainable",
        "outcomes  2 completed, 1 failed (agent), 1 length (turn)",
        "tokens    36 prompt, 33 generated (11 a second), 12 observed",
        "tools     no calls",
        "reward    mean 0.500 over 3 rows, unknown for 1",
        "cause     1 failed (agent): ValueError: bad",
        "files     out: tensors.safetensors, samples.jsonl, trajectories.jsonl, metrics.json, "
        "meta.json",
        "report    `rollout report out` shows where the time went",
    ]


def test_summary_of_nothing_says_so() -> None:
    lines = summary_lines(collate([], LengthsConfig(), 0), 0.0, Path("out"))
    assert lines[:5] == [
        "rows      0 trajectories of 0 prompts in 0.0 s; 0 trainable",
        "outcomes  none",
        "tokens    0 prompt, 0 generated, 0 observed",
        "tools     no calls",
        "reward    unknown for every row",
    ]


def test_groups_are_a_table_with_a_line_each() -> None:
    console = Console(file=io.StringIO(), width=120)
    batch = collate(rows(), LengthsConfig(prompt=16, response=16), 0)
    console.print(group_table(batch, is_plain=True))
    assert [line.rstrip() for line in shown(console).splitlines()] == [
        "question      answer  rewards    outcomes                           turns  tokens",
        "What is 2+2?  4       1.00 0.00  2 completed                        4 4    11 11",
        "What is 2+2?  4       - 0.50     1 failed (agent), 1 length (turn)  4 4    11 0",
    ]
