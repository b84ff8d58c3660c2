"""Reports of runs that were killed, and of several steps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import observed
from report_runs import MadeUpRun, data_of, findings, unpacked
from rollout import Message, Prompt, RolloutBatch, open_rollout
from rollout.chat.trajectory import Trajectory
from rollout.config import JournalConfig, ObserveConfig, SchedulingConfig, SimulatedEngine
from rollout.observe import read_events
from rollout.observe.event_file import EVENTS
from rollout.observe.events import (
    BatchEnded,
    BatchStarted,
    Event,
    EventsDropped,
    LoopBlocked,
    RequestPlaced,
    RuntimeSampled,
    ToolStarted,
    TrajectoryStarted,
    TurnEnded,
    TurnStarted,
)
from rollout.observe.report import RunReport
from rollout.testing import Scenario, run_virtual


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RolloutBatch]]:
    """A run of three steps, and its batches; after each of them the trainer trains for 20 s."""
    directory = tmp_path_factory.mktemp("trained")
    config = (
        Scenario(seed=3)
        .reply("sum", "ok", filler={"median": 200, "sigma": 0.3, "max": 400})
        .config(
            engine=SimulatedEngine(replicas=2),
            scheduling=SchedulingConfig(samples_per_prompt=4),
            observe=ObserveConfig(path=str(directory)),
            journal=JournalConfig(path=str(directory / "trajectories.journal")),
        )
    )

    async def reward(trajectory: Trajectory) -> float:
        return float(trajectory.member % 2)

    async def body() -> list[RolloutBatch]:
        batches = []
        async with open_rollout(config, [], reward) as runtime:
            for step in range(3):
                asked = [Prompt(messages=[Message(role="user", content="sum")])] * 8
                batches.append(await runtime.generate(asked, step=step))
                await anyio.sleep(20)
        return batches

    return directory, run_virtual(body)


@pytest.fixture
def training(trained: tuple[Path, list[RolloutBatch]], tmp_path: Path) -> list[RolloutBatch]:
    """The batches of that run, which is also in `tmp_path`."""
    directory, batches = trained
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    return batches


def test_findings_of_steps_with_a_trainers_work_between_them_are_none(
    tmp_path: Path, training: list[RolloutBatch]
) -> None:
    training[-1].save(tmp_path)

    report = RunReport(tmp_path)
    data = data_of(report.write().read_text())

    assert [finding.title for finding in report.findings] == []
    assert min(each["busy"] for each in data["replicas"]) > 0.5
    assert data["series"]["step"] * 160 > 40


def test_report_of_a_journal_of_several_steps_shows_all_of_their_trajectories(
    tmp_path: Path, training: list[RolloutBatch]
) -> None:
    page = RunReport(tmp_path).write().read_text()
    data = data_of(page)

    rows = data["rows"]
    assert rows["step"] == [0] * 32 + [1] * 32 + [2] * 32
    assert len(set(rows["name"])) == 96
    assert rows["name"][40] == f"step 1: {rows['uid'][40]}/{rows['member'][40]}"
    told = {name: (value, note) for name, value, note in data["summary"]}
    assert told["trajectories"] == ("96", "of 24 prompts")
    seconds = sum(batch.metrics["batch_s"] for batch in training)
    assert told["took"][0] == f"{seconds:.1f} s"
    assert told["took"][1].startswith("in 3 calls, ")
    decoded = [decoding(page, at) for at in range(96)]
    ends = [batch.metrics["batch_s"] for batch in training]
    assert max(end for _, end in decoded[:32]) <= ends[0] + 0.01
    assert min(start for start, _ in decoded[64:]) >= ends[0] + ends[1] + 40


def decoding(page: str, row: int) -> tuple[float, float]:
    ((start, end),) = [part[1:3] for part in unpacked(page, f"w{row}")[0] if part[0] == "decode"]
    return start, end


@pytest.mark.parametrize("step", [0, 2])
def test_report_of_one_step_of_several_is_of_that_steps_time(
    tmp_path: Path, training: list[RolloutBatch], step: int
) -> None:
    batch = training[step]
    batch.save(tmp_path)

    page = RunReport(tmp_path).write().read_text()
    data = data_of(page)

    (took,) = [entry for entry in data["summary"] if entry[0] == "took"]
    seconds, tokens = batch.metrics["batch_s"], batch.metrics["tokens/generated"]
    assert took[1:] == [f"{seconds:.1f} s", f"{tokens / seconds:,.0f} tokens a second"]
    assert any("are of 1 of 3 calls" in note for note in data["notes"])
    starts = [decoding(page, at)[0] for at in range(32)]
    assert (max(starts) < 20) if step == 0 else (min(starts) > 40)


def test_report_of_a_validation_and_a_step_with_the_same_uids_keeps_them_apart(
    tmp_path: Path,
) -> None:
    scenario = Scenario(seed=3).reply("", "ok", filler={"median": 60, "sigma": 0.5, "max": 400})
    config = scenario.config(
        observe=ObserveConfig(path=str(tmp_path)),
        journal=JournalConfig(path=str(tmp_path / "trajectories.journal")),
    )

    async def body() -> list[RolloutBatch]:
        async with open_rollout(config) as runtime:
            return [
                await runtime.generate(observed.prompts("a", "b"), samples=2, validate=validate)
                for validate in (True, False)
            ]

    batches = run_virtual(body)
    page = RunReport(tmp_path).write().read_text()
    data = data_of(page)

    assert data["rows"]["validate"] == [True] * 4 + [False] * 4
    assert len(set(data["rows"]["name"])) == 8
    assert {name: note for name, _, note in data["summary"]}["trajectories"] == "of 4 prompts"
    decoded = [decoding(page, at) for at in range(8)]
    first = batches[0].metrics["batch_s"]
    assert max(end for _, end in decoded[:4]) <= first + 0.01 <= min(decoded[4:])[0] + 0.02
    batches[0].save(tmp_path)
    saved = RunReport(tmp_path).write().read_text()
    assert sorted(decoding(saved, at) for at in range(4)) == sorted(decoded[:4])


def test_findings_of_a_loop_that_the_trainer_blocks_between_steps_are_none(tmp_path: Path) -> None:
    directory = MadeUpRun().write(tmp_path, has_ended=False)
    end = max(event.at for event in read_events(directory))
    blocked = LoopBlocked(at=end + 5.02, seconds=3.0, cause="the caller's own code at a.py:3 in f")
    following: list[Event] = [
        BatchEnded(at=end, batch=0, began=3.0),
        BatchStarted(at=end + 5, batch=1, call="generate", step=8),
        blocked,
        BatchEnded(at=end + 8, batch=1, began=end + 5),
    ]
    go_on(directory, following)
    assert findings(directory) == []
    meanwhile = msgspec.structs.replace(blocked, at=end + 7.5)
    go_on(directory, [meanwhile])
    assert findings(directory)[0] == ("blocked_loop", "The event loop was blocked for 2.5 s")


def go_on(directory: Path, events: list[Event]) -> None:
    with (directory / EVENTS).open("ab") as file:
        file.writelines(msgspec.json.encode(event) + b"\n" for event in events)


def begun(number: int, at: float) -> Event:
    names: dict[str, Any] = {"batch": 0, "step": 7, "uid": f"late-{number}", "group": number}
    return TrajectoryStarted(at=at, trajectory=number, member=0, **names)


def test_tool_that_has_not_answered_is_what_a_killed_run_waited_for(tmp_path: Path) -> None:
    directory = MadeUpRun(groups=2).write(tmp_path, has_ended=False)
    events: list[Event] = [begun(90, 6.0), begun(91, 6.0)]
    events += [ToolStarted(at=8.0, trajectory=at, tool="slow", turn=0) for at in (90, 91)]
    go_on(directory, [*events, RuntimeSampled(at=20.0, admitted=10, running=2, finished=8)])

    report = RunReport(directory)
    data = data_of(report.write().read_text())

    assert report.findings[0].kind == "slow_tool"
    assert report.findings[0].title == "2 calls of 'slow' have not ended, the longest for 12 s"
    assert "No call of it has ended. Calls of it take 50 %" in report.findings[0].text
    assert report.findings[0].filter == ""
    (slow,) = [each for each in data["tools"] if each["name"] == "slow"]
    assert (slow["calls"], slow["under_way"], slow["longest"]) == (2, 2, 12.0)
    assert dict(data["spent"])["tool"] == pytest.approx(8 * 0.05 + 2 * 12)
    assert data["series"]["with_tools"][-1] == 2


def test_request_that_has_not_been_answered_is_what_a_killed_run_waited_for(
    tmp_path: Path,
) -> None:
    directory = MadeUpRun(groups=2).write(tmp_path, has_ended=False)
    before = RunReport(directory)
    spent = dict(data_of(before.write().read_text())["spent"])
    events: list[Event] = [begun(90, 8.0), begun(91, 8.0), begun(92, 8.0)]
    events += [TurnStarted(at=8.0, trajectory=at, turn=0) for at in (90, 91, 92)]
    placed: dict[str, Any] = {"session": "7/late-90/0", "replica": "replica-1", "queue_s": 1.0}
    events.append(RequestPlaced(at=9.0, trajectory=90, request="a", **placed))
    events.append(TurnEnded(at=9.0, trajectory=92, turn=0, began=8.0))
    go_on(directory, [*events, RuntimeSampled(at=20.0, admitted=11, running=3, finished=8)])

    data = data_of(RunReport(directory).write().read_text())
    now = dict(data["spent"])

    assert now["decode"] - spent["decode"] == pytest.approx(11)
    assert now["queue"] - spent["queue"] == pytest.approx(1 + 12)
    assert data["series"]["on_engines"][-1] == 1
    assert data["replicas"][1]["requests"] == 9


def test_calls_whose_end_may_have_been_lost_are_not_said_to_be_under_way(tmp_path: Path) -> None:
    directory = MadeUpRun(groups=2).write(tmp_path, has_ended=False)
    go_on(directory, [begun(90, 6.0), ToolStarted(at=8.0, trajectory=90, tool="slow", turn=0)])
    go_on(directory, [EventsDropped(at=20.0, count=1)])

    assert [kind for kind, _ in findings(directory)] == ["idle_engines"]
