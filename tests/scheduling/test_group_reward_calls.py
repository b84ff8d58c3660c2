"""A group reward that is under way holds up no end of `collect` or `stream_groups`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from test_groups import SCENARIO, Counted, prompts
from test_groups import config as config_of

import rollout
from harness import Recorder
from rollout import Group, GroupPolicy, Outcome, Trajectory
from rollout.config import LimitsConfig
from rollout.errors import LimitExceeded

pytestmark = pytest.mark.anyio

JUDGE_S = 250.0


class Judge:
    """Takes its time for some groups, and knows whom it was asked about."""

    def __init__(self, *slow: str, seconds: float = JUDGE_S) -> None:
        self.slow, self.seconds = slow, seconds
        self.asked: list[str] = []

    async def __call__(self, group: Group) -> list[float]:
        self.asked.append(group.uid)
        if not self.slow or group.uid in self.slow:
            await anyio.sleep(self.seconds)
        return [float(t.member) for t in group.trajectories]


def config(limits: LimitsConfig | None = None, **scheduling: Any) -> Any:
    base = config_of(**scheduling)
    return SCENARIO.config(
        agent=base.agent, scheduling=base.scheduling, limits=limits or LimitsConfig()
    )


async def timed(call: Callable[[], Awaitable[Any]]) -> tuple[Any, float]:
    began = anyio.current_time()
    return await call(), anyio.current_time() - began


async def test_collect_cancelled_while_a_group_is_judged_returns_at_once() -> None:
    source, judge = Counted(), Judge(seconds=1e6)
    async with rollout.open_rollout(config(), group_reward=judge) as runtime:
        began = anyio.current_time()
        with anyio.move_on_after(20.0) as scope:
            await runtime.collect(source, 2)
        assert scope.cancelled_caught
        assert anyio.current_time() - began == pytest.approx(20.0)
        assert sorted(judge.asked) == ["p0", "p1"]
        assert runtime.statistics().running == 0
        judge.seconds = 1.0
        batch = await runtime.collect(source, 2)  # nothing was lost by that, and nothing is old
    assert [t.uid for t in batch.trajectories][::2] == ["p0", "p1"]
    assert [t.reward for t in batch.trajectories] == [0.0, 1.0] * 2
    assert source.count == 2


async def late(trajectory: Trajectory) -> float:
    await anyio.sleep(JUDGE_S)
    return 1.0


@pytest.mark.parametrize("what", ["reward", "group_reward"])
async def test_collect_batch_deadline_ends_a_reward_as_in_generate(what: str) -> None:
    opened = config(LimitsConfig(batch_s=30.0, reward_s=JUDGE_S))
    recorder = Recorder()
    given: Any = {what: late if what == "reward" else Judge()}
    async with recorder.open_rollout(opened, **given) as runtime:
        collected, seconds = await timed(lambda: runtime.collect(prompts(2), 2))
        generated = await runtime.generate(prompts(2))
    assert seconds == pytest.approx(30.0)
    assert recorder.anomalies() == []
    for batch in (collected, generated):
        ends = {(t.outcome, t.reason, t.limit_source) for t in batch.trajectories}
        assert ends == {(Outcome.DEADLINE, what, "limits.batch_s")}
        assert not any(t.trainable for t in batch.trajectories)
        name = what.replace("_", " ")
        assert {t.cause and t.cause.message for t in batch.trajectories} == {
            f"limits.batch_s = 30 s is over: the {name} function had not returned"
        }


async def test_collect_closed_while_a_group_is_judged_closes_at_once() -> None:
    async with anyio.create_task_group() as tasks:
        async with rollout.open_rollout(config(), group_reward=Judge()) as runtime:

            async def collect() -> None:
                with pytest.raises(rollout.RolloutError, match="closed while this call"):
                    await runtime.collect(prompts(2), 2)

            tasks.start_soon(collect)
            await anyio.sleep(20.0)
            began = anyio.current_time()
        assert anyio.current_time() - began < 1.0


@pytest.mark.parametrize("surplus", ["cancel", "carry"])
async def test_collect_surplus_group_that_is_judged_is_not_waited_for(surplus: str) -> None:
    source, judge = Counted(), Judge("p1")
    policy = GroupPolicy(oversample=2.0, surplus=surplus)
    async with rollout.open_rollout(config(max_in_flight=4), group_reward=judge) as runtime:
        first, seconds = await timed(lambda: runtime.collect(source, 1, policy=policy))
        assert seconds < 10.0
        assert [t.uid for t in first.trajectories] == ["p0", "p0"]
        name = {"cancel": "cancelled", "carry": "carried"}[surplus]
        assert first.metrics[f"groups/{name}"] == 1
        tokens = runtime.statistics().generated_tokens
        second, seconds = await timed(lambda: runtime.collect(source, 1, step=1))
        assert (runtime.statistics().generated_tokens == tokens) == (surplus == "carry")
    assert sorted(judge.asked) == ["p0", "p1", "p1"]
    assert [(t.uid, t.reward) for t in second.trajectories] == [("p1", 0.0), ("p1", 1.0)]
    assert seconds >= JUDGE_S


async def test_collect_group_rewards_that_fail_count_as_failures() -> None:
    async def broken(group: Group) -> list[float]:
        raise OSError("no judge")

    async with rollout.open_rollout(config(max_failures=3), group_reward=broken) as runtime:
        with pytest.raises(LimitExceeded, match=r"4 of 4 trajectories failed"):
            await runtime.collect(prompts(2), 2)
        assert runtime.statistics().outcomes == {"failed": 4}


async def test_reward_that_is_cancelled_and_does_not_end_fails_its_trajectory_as_unresponsive() -> (
    None
):
    async def stays(trajectory: Trajectory) -> float:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(100.0)
        return 1.0

    async def cancel() -> None:
        await anyio.sleep(20.0)
        assert runtime.cancel() > 0

    opened = config(LimitsConfig(cleanup_s=5.0))
    async with rollout.open_rollout(opened, reward=stays) as runtime:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel)
            batch = await runtime.generate(prompts(1))
    ends = {(t.outcome, t.reason, t.reward) for t in batch.trajectories}
    assert ends == {(Outcome.FAILED, "unresponsive", None)}
