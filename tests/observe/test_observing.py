"""What a run tells of itself: events with times that add up, and metrics of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import observed
import rollout
from observed import TOOL_S, of_kind, prompts
from rollout import RolloutError
from rollout.config import ObserveConfig
from rollout.observe import read_events
from rollout.observe.events import (
    BatchEnded,
    BatchStarted,
    GroupEnded,
    ReplicaChanged,
    ReplicaSampled,
    RequestEnded,
    RequestPlaced,
    RewardEnded,
    RunEnded,
    RunStarted,
    RuntimeSampled,
    SpanEnded,
    ToolEnded,
    ToolStarted,
    TrajectoryEnded,
    TrajectoryStarted,
    TurnEnded,
    TurnStarted,
)


def test_run_events_each_part_is_told_with_its_ids_and_times() -> None:
    batch, events = observed.run(prompts("add please sum"), samples=2)
    started, ended = of_kind(events, TrajectoryStarted), of_kind(events, TrajectoryEnded)
    assert [(each.uid, each.member, each.step, each.batch) for each in started] == [
        ("add", 0, 7, 0),
        ("add", 1, 7, 0),
    ]
    assert sorted(each.trajectory for each in ended) == [1, 2]
    first = next(each for each in ended if each.trajectory == 1)
    assert (first.outcome, first.reward, first.turns, first.tool_calls) == ("completed", 1.0, 2, 1)
    assert first.generated_tokens == batch.trajectories[0].generated_length
    assert first.at - first.began == pytest.approx(batch.trajectories[0].metrics["total_s"])
    mine = [e for e in events if getattr(e, "trajectory", None) == 1]
    kinds = [type(e) for e in mine if not isinstance(e, TrajectoryStarted | TrajectoryEnded)]
    turn = [TurnStarted, RequestPlaced, RequestEnded, TurnEnded]
    tool = [ToolStarted, SpanEnded, SpanEnded, ToolEnded]
    assert kinds == [*turn, *tool, *turn, RewardEnded]
    turns, requests = of_kind(mine, TurnEnded), of_kind(mine, RequestEnded)
    assert [each.turn for each in turns] == [0, 1]
    assert [each.requests for each in turns] == [(each.request,) for each in requests]
    for each in requests:
        assert each.at - each.began == pytest.approx(each.queue_s + each.prefill_s + each.decode_s)
        assert each.prefill_s > 0
        assert (each.replica, each.session) == ("engine-0", "7/add/0")
    (call,) = of_kind(mine, ToolEnded)
    assert (call.tool, call.turn, call.is_error) == ("add", 0, False)
    assert call.at - call.began == pytest.approx(TOOL_S)
    (group,) = of_kind(events, GroupEnded)
    assert (group.uid, group.rewards, group.outcomes) == ("add", (1.0, 1.0), ("completed",) * 2)
    (call_began,), (call_ended,) = of_kind(events, BatchStarted), of_kind(events, BatchEnded)
    assert (call_began.call, call_began.prompts, call_began.trajectories) == ("generate", 1, 2)
    assert call_ended.metrics == batch.metrics
    assert call_ended.began == call_began.at


def test_run_events_traced_functions_stand_within_each_other() -> None:
    _, events = observed.run(prompts("add please sum"))
    inner, outer = of_kind(events, SpanEnded)
    assert (outer.name, outer.parent, outer.error) == ("slowly", 0, "")
    assert (inner.name, inner.parent) == ("added", outer.span)
    assert outer.at - outer.began == pytest.approx(TOOL_S)


def test_trace_outside_a_trajectory_calls_the_function_alone() -> None:
    assert observed.added(1, 2) == 3
    with pytest.raises(TypeError, match=r"rollout.trace: 3; expected a function"):
        observed.rollout.trace(3)  # type: ignore[call-overload]


def test_run_events_errors_are_told_where_they_were() -> None:
    _, events = observed.run(prompts("break please break", "bad please sum"))
    failed = [each for each in of_kind(events, ToolEnded) if each.is_error]
    assert [(each.tool, each.error) for each in failed] == [
        ("broken", "ValueError: no such number")
    ]
    (reward,) = [each for each in of_kind(events, RewardEnded) if each.error]
    assert reward.error == "RuntimeError: no reward for that"
    ended = {each.uid: each for each in of_kind(events, TrajectoryEnded)}
    assert ended["bad"].outcome == "failed"
    assert ended["bad"].cause == "RuntimeError: no reward for that"


def test_run_path_events_of_the_run_are_on_disk(tmp_path: Path) -> None:
    observed.run(prompts("add please sum"), ObserveConfig(path=str(tmp_path / "run")))
    events = list(read_events(tmp_path / "run"))
    first, last = events[0], events[-1]
    assert isinstance(first, RunStarted)
    assert first.config["engine"]["kind"] == "simulated"
    assert isinstance(last, RunEnded)
    states = [each.state for each in of_kind(events, ReplicaChanged)]
    assert states == ["starting", "serving", "lost", "closed"]
    assert of_kind(events, ReplicaSampled)
    assert of_kind(events, RuntimeSampled)
    assert [each.at for each in events] == sorted(each.at for each in events)


def test_batch_metrics_say_where_time_and_tokens_went() -> None:
    slow = observed.SCENARIO.timing(base_s=0.1)  # engines report every two seconds
    batch, _ = observed.run(
        prompts("add please sum", "break please break"), None, samples=4, scenario=slow
    )
    metrics = batch.metrics
    assert metrics["tool/add/calls"] == 4
    assert metrics["tool/add/seconds"] == pytest.approx(4 * TOOL_S)
    assert metrics["tool/add/seconds_max"] == pytest.approx(TOOL_S)
    assert (metrics["tool/broken/errors"], metrics["tool_errors"]) == (4, 4)
    assert metrics["throughput/tokens_per_s"] == pytest.approx(
        metrics["tokens/generated"] / metrics["batch_s"]
    )
    assert metrics["staleness/max"] == 0
    for name in ("utilisation/mean", "kv_used/max", "running/mean", "prefix_hits"):
        assert 0 <= metrics[f"replica/engine-0/{name}"] <= 4352
    assert metrics["queue/requests/max"] == 0
    assert metrics["zombies/max"] == 0
    assert metrics["tokens/cached"] > 0


def test_trace_wraps_methods_of_all_kinds_and_refuses_generators() -> None:
    class Judge:
        @rollout.trace
        @staticmethod
        def double(number: int) -> int:
            return 2 * number

        @rollout.trace
        @classmethod
        def name(cls) -> str:
            return cls.__name__

    assert (Judge.double(2), Judge().double(3)) == (4, 6)
    assert (Judge.name(), Judge().name()) == ("Judge", "Judge")

    def numbers() -> Any:
        yield 1

    with pytest.raises(TypeError, match=r"numbers makes a generator; trace its user"):
        rollout.trace(numbers)


def test_observe_config_traces_without_backend_are_refused() -> None:
    with pytest.raises(RolloutError, match=r"observe\.trace_share|trace_share"):
        ObserveConfig(trace_share=0.5)
    with pytest.raises(RolloutError, match="prometheus_port"):
        ObserveConfig(prometheus_port=70000)
