"""The timeline: lanes of replicas, trajectories and the loop, in the Chrome trace format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

import observed
from observed import TOOL_S, prompts
from rollout import AgentLoop, Group, GroupPolicy, RolloutBatch, open_rollout, register_agent
from rollout.cli import main
from rollout.config import AgentConfig, ObserveConfig, SchedulingConfig
from rollout.errors import RolloutError
from rollout.observe import read_events
from rollout.observe.events import (
    GroupEnded,
    LoopBlocked,
    RequestEnded,
    RewardEnded,
    RunStarted,
    ToolEnded,
    TrajectoryEnded,
    TrajectoryStarted,
)
from rollout.observe.timeline import write_timeline
from rollout.testing import Scenario, run_virtual


def read(path: Path) -> tuple[list[dict[str, Any]], dict[tuple[int, int], str]]:
    """What is in a file, and the name of each lane: process, then thread."""
    slices = json.loads(path.read_text())["traceEvents"]
    named = [each for each in slices if each["ph"] == "M"]
    groups = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    lanes = {
        (each["pid"], each["tid"]): f"{groups[each['pid']]} / {each['args']['name']}"
        for each in named
        if each["name"] == "thread_name"
    }
    return slices, lanes


def pieces(slices: list[dict[str, Any]], lanes: dict[tuple[int, int], str], lane: str) -> Any:
    """(name, begin, duration in seconds) of what lasts in a lane."""
    return [
        (each["name"], each["ts"] / 1e6, each["dur"] / 1e6)
        for each in slices
        if each["ph"] == "X" and lanes[each["pid"], each["tid"]] == lane
    ]


def test_batch_timeline_has_a_lane_for_each_replica_trajectory_and_the_loop(tmp_path: Path) -> None:
    observe = ObserveConfig(path=str(tmp_path))
    batch, events = observed.run(prompts("add please sum"), observe, samples=2)
    batch.timeline(tmp_path / "batch.json")
    slices, lanes = read(tmp_path / "batch.json")
    assert {
        "driver / event loop",
        "driver / calls",
        "trajectories / add/0",
        "trajectories / add/1",
        "replica engine-0 / engine-0",
    } <= set(lanes.values())
    lane = pieces(slices, lanes, "trajectories / add/0")
    times = {name: (began, seconds) for name, began, seconds in lane}
    assert times["add"][1] == pytest.approx(TOOL_S)
    whole = times["add/0 completed"]
    assert whole[1] == pytest.approx(batch.trajectories[0].metrics["total_s"])
    # To the last bit of what a reader adds: a part ends with its whole, not a rounding after it.
    shown = [e for e in slices if e["ph"] == "X" and lanes[e["pid"], e["tid"]].endswith("/ add/0")]
    around = next(each for each in shown if each["name"] == "add/0 completed")
    for part in shown:
        assert around["ts"] <= part["ts"]
        assert part["ts"] + part["dur"] <= around["ts"] + around["dur"]
    sent = [e for e in events if isinstance(e, RequestEnded)]
    requests = [
        piece
        for lane in set(lanes.values())
        if lane.startswith("replica engine-0")
        for piece in pieces(slices, lanes, lane)
    ]
    expected = [(e.session, e.began + e.queue_s, e.prefill_s + e.decode_s) for e in sent]
    for found, wanted in zip(sorted(requests), sorted(expected), strict=True):
        assert found[0] == wanted[0]
        assert found[1:] == pytest.approx(wanted[1:])
    begun = {each["id"]: each for each in slices if each["ph"] == "s"}
    ended = {each["id"]: each for each in slices if each["ph"] == "f"}
    assert begun.keys() == ended.keys() == {each.request for each in sent}
    for request, flow in begun.items():
        assert lanes[flow["pid"], flow["tid"]].startswith("trajectories / add/")
        other = ended[request]
        assert lanes[other["pid"], other["tid"]].startswith("replica engine-0 / engine-0")


def test_timeline_pieces_of_a_lane_are_within_each_other_or_apart(tmp_path: Path) -> None:
    who: dict[str, Any] = {"batch": 0, "step": 0, "uid": "p", "group": 0, "member": 0}
    calls = [(0.0, 3.0), (1.0, 2.0), (2.5, 4.0)]
    write_timeline(
        [
            RunStarted(at=0.0, wall_s=0.0),
            TrajectoryStarted(at=0.0, trajectory=1, **who),
            *(
                ToolEnded(at=end, trajectory=1, tool=f"t{number}", turn=0, began=begin)
                for number, (begin, end) in enumerate(calls)
            ),
            LoopBlocked(at=2.0, seconds=1.5, cause="train.py:3"),
            TrajectoryEnded(at=5.0, trajectory=1, began=0.0, outcome="completed", **who),
        ],
        tmp_path / "t.json",
    )
    slices, lanes = read(tmp_path / "t.json")
    first = pieces(slices, lanes, "trajectories / p/0")
    assert [name for name, _, _ in first] == ["p/0 completed", "t0"]
    assert [name for name, _, _ in pieces(slices, lanes, "trajectories / p/0 (2)")] == ["t1", "t2"]
    loop = pieces(slices, lanes, "driver / event loop")
    assert loop == [("running", 0.0, 5.0), ("blocked", 0.5, 1.5)]


def test_timeline_trajectory_of_a_killed_run_lasts_until_it_was_last_heard_of(
    tmp_path: Path,
) -> None:
    who: dict[str, Any] = {"batch": 0, "step": 0, "uid": "p", "group": 0, "member": 0}
    write_timeline(
        [
            RunStarted(at=0.0, wall_s=0.0),
            TrajectoryStarted(at=1.0, trajectory=1, **who),
            ToolEnded(at=3.0, trajectory=1, tool="t", turn=0, began=2.0),
        ],
        tmp_path / "t.json",
    )
    slices, lanes = read(tmp_path / "t.json")
    lane = pieces(slices, lanes, "trajectories / p/0")
    assert lane == [("p/0 not ended", 1.0, 2.0), ("t", 2.0, 1.0)]


def test_cli_timeline_of_a_run_is_written_and_a_missing_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    observed.run(prompts("add please sum"), ObserveConfig(path=str(tmp_path)))
    assert main(["timeline", str(tmp_path)]) == 0
    assert "timeline.json" in capsys.readouterr().out
    slices, lanes = read(tmp_path / "timeline.json")
    assert "trajectories / add/0" in lanes.values()
    assert len(slices) > len(list(read_events(tmp_path)))
    assert main(["timeline", str(tmp_path / "nothing")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_batch_timeline_is_of_its_own_call_though_other_runs_write_there_too(
    tmp_path: Path,
) -> None:
    observe = ObserveConfig(path=str(tmp_path))
    first, _ = observed.run(prompts("first please sum"), observe, samples=2)
    first.save(tmp_path)
    second, _ = observed.run(prompts("second please sum"), observe, samples=2)
    of_batches = {
        "first": (first, RolloutBatch.load(tmp_path)),
        "second": (second,),
    }
    for uid, batches in of_batches.items():
        for batch in batches:
            batch.timeline(tmp_path / "t.json")
            shown = {name for name in read(tmp_path / "t.json")[1].values() if "traj" in name}
            assert shown == {f"trajectories / {uid}/0", f"trajectories / {uid}/1"}


def test_timeline_says_for_how_long_a_turn_was_carried_and_how_many_are(tmp_path: Path) -> None:
    scenario = Scenario(seed=1).reply("slow", filler=500).reply("", filler=20).timing(base_s=0.01)
    config = scenario.config(observe=ObserveConfig(path=str(tmp_path)))
    carry = GroupPolicy(surplus="carry", oversample=2.0)

    async def body() -> RolloutBatch:
        async with open_rollout(config) as runtime:
            await runtime.collect(prompts("a slow", "b go"), 1, policy=carry)
            await anyio.sleep(100.0)
            return await runtime.collect([], 1)

    batch = run_virtual(body)
    assert [each.uid for each in batch.trajectories] == ["a"]
    batch.timeline(tmp_path / "batch.json")
    slices, _ = read(tmp_path / "batch.json")
    (turn,) = [each for each in slices if each["name"] == "turn 0"]
    assert turn["args"]["carried_s"] == pytest.approx(100.0, abs=0.5)
    write_timeline(read_events(tmp_path), tmp_path / "run.json")
    slices, _ = read(tmp_path / "run.json")
    counted = [each["args"] for each in slices if each["name"] == "trajectories" and "ts" in each]
    assert {"running": 0, "carried": 1} in counted


@register_agent("second_member_naps")
class SecondMemberNaps(AgentLoop):
    async def run(self, context: Any) -> None:
        await anyio.sleep(10.0 if context.prompt.uid == "a" and context.identity.member else 0.0)
        await context.generate()


def test_group_that_an_earlier_call_began_is_told_in_the_call_that_has_it(tmp_path: Path) -> None:
    config = Scenario(seed=1).config(
        agent=AgentConfig(name="second_member_naps"),
        observe=ObserveConfig(path=str(tmp_path)),
        scheduling=SchedulingConfig(samples_per_prompt=2),
    )
    carry = GroupPolicy(surplus="carry", oversample=2.0)

    async def rank(group: Group) -> list[float]:
        return [1.0] * len(group.trajectories)

    async def body() -> RolloutBatch:
        async with open_rollout(config, group_reward=rank) as runtime:
            await runtime.collect(prompts("a go", "b go"), 1, policy=carry)
            await anyio.sleep(100.0)
            return await runtime.collect([], 1)

    batch = run_virtual(body)
    assert [(each.uid, each.member) for each in batch.trajectories] == [("a", 0), ("a", 1)]
    told = [each for each in read_events(tmp_path) if isinstance(each, GroupEnded | RewardEnded)]
    assert [each.batch for each in told] == [0, 0, 1, 1]
    batch.timeline(tmp_path / "batch.json")
    slices, _ = read(tmp_path / "batch.json")
    names = {each["name"] for each in slices if each["ph"] == "X"}
    assert {"a/0 completed", "a/1 completed"} <= names
    assert not {"b/0 completed", "b/1 completed"} & names


def test_batch_timeline_of_a_run_that_nobody_observed_says_what_to_set() -> None:
    batch, _ = observed.run(prompts("add please sum"))
    with pytest.raises(RolloutError, match=r"set observe.path"):
        batch.timeline("nowhere.json")
