"""Retries, the failure budget, deadlines of a batch, admission, and counts as limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import pytest

import rollout
from rollout import AgentLoop, Outcome, Prompt, RolloutBatch, Trajectory, function_tool
from rollout.agents import AgentContext, register_agent
from rollout.config import (
    AgentConfig,
    LimitsConfig,
    RecoveryConfig,
    SchedulingConfig,
    SimulatedEngine,
)
from rollout.engine.core import EngineLoad
from rollout.errors import LimitExceeded
from rollout.scheduling.admission import WINDOW, AdmissionController, Progress
from rollout.testing import Scenario, tool_call

pytestmark = pytest.mark.anyio


def user(text: str, **fields: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}], **fields)


async def generate(
    scenario: Scenario,
    prompts: Sequence[Prompt],
    *,
    tools: Sequence[Any] = (),
    reward: Any = None,
    **sections: Any,
) -> RolloutBatch:
    async with rollout.open_rollout(scenario.config(**sections), tools, reward) as runtime:
        return await runtime.generate(prompts, step=1)


@register_agent("failing")
class Failing(AgentLoop):
    """Fails by the word of its prompt."""

    async def run(self, context: AgentContext) -> None:
        """Speak, then fail where the prompt says so."""
        await context.generate()
        word = context.prompt.messages[0]["content"]  # type: ignore[index]
        if word.startswith("fail"):
            raise ValueError(word)


OK = Scenario(seed=1).reply("", "ok")
SLOW = (
    Scenario(seed=1)
    .reply("quick", "ok")
    .reply("slow", filler=5000)
    .timing(base_s=0.01, slope_s=0.0, prefill_tokens_per_s=1e9)
)


@pytest.mark.parametrize("policy", ["resume", "restart", "fail"])
async def test_recovered_member_has_the_tokens_of_an_undisturbed_one(policy: Any) -> None:
    dying = Scenario(seed=1).fault(die_after_tokens=50, replicas=(0,))
    sections: dict[str, Any] = {
        "sampling": rollout.SamplingConfig(max_new_tokens=40),
        "scheduling": SchedulingConfig(samples_per_prompt=4, max_retries=50),
        "engine": SimulatedEngine(replicas=2),
        "recovery": RecoveryConfig(policy=policy),
    }
    disturbed = await generate(dying, [user("go", uid="p")], **sections)
    calm = await generate(Scenario(seed=1), [user("go", uid="p")], **sections)
    metric = {"resume": "resumes", "restart": "restarts", "fail": "attempts"}[policy]
    undisturbed = 4 if policy == "fail" else 0
    assert sum(t.metrics[metric] for t in disturbed.trajectories) > undisturbed
    assert {t.outcome for t in disturbed.trajectories} == {Outcome.LENGTH}
    if policy == "resume":
        assert disturbed.metrics["recovery/resumes"] > 0
        assert disturbed.metrics["tokens/discarded"] == 0
        assert max(t.metrics["attempts"] for t in disturbed.trajectories) == 1
    assert disturbed.tensors["input_ids"].equal(calm.tensors["input_ids"])


async def test_retries_do_not_outlive_the_trajectory_limit() -> None:
    scenario = Scenario(seed=1).reply("", filler=5000).fault(die_after_tokens=50)
    batch = await generate(
        scenario,
        [user("go")],
        scheduling=SchedulingConfig(max_retries=1000),
        recovery=RecoveryConfig(policy="fail"),
        limits=LimitsConfig(trajectory_s=20),
    )
    (trajectory,) = batch.trajectories
    assert trajectory.limit_source == "limits.trajectory_s"
    assert trajectory.metrics["total_s"] == pytest.approx(20.0)


async def test_agent_failures_within_the_budget_are_data_and_not_retried() -> None:
    prompts = [user("fail" if i < 4 else "fine", uid=str(i)) for i in range(8)]
    batch = await generate(
        OK,
        prompts,
        agent=AgentConfig(name="failing"),
        scheduling=SchedulingConfig(max_failures=0, max_failure_share=0.5),
    )
    assert [t.outcome for t in batch.trajectories].count(Outcome.FAILED) == 4
    assert {t.metrics["attempts"] for t in batch.trajectories} == {1}  # and none is retried


async def test_failures_past_the_budget_stop_the_batch_and_list_their_causes() -> None:
    words = ["fail left"] * 4 + ["fail right"] * 2 + ["slow"] * 6
    with pytest.raises(LimitExceeded) as caught:
        await generate(
            SLOW.reply("", "ok"),
            [user(word, uid=str(i)) for i, word in enumerate(words)],
            agent=AgentConfig(name="failing"),
            scheduling=SchedulingConfig(max_failures=3, max_failure_share=0.4),
        )
    assert str(caught.value) == (
        "6 of 12 trajectories failed (scheduling.max_failures = 3, "
        "scheduling.max_failure_share = 0.4); the batch stopped:\n"
        "  4 × ValueError: fail left\n"
        "  2 × ValueError: fail right"
    )
    partial = caught.value.partial
    assert partial is not None
    assert partial.tensors.batch_size == (12,)
    outcomes = [(s.outcome, s.reason) for s in partial.samples[6:]]
    assert set(outcomes) == {("cancelled", "failure_budget")}


async def cut_off(reward: Any = None, **scheduling: Any) -> RolloutBatch:
    """A quick trajectory, and one that the batch's deadline cuts off."""
    return await generate(
        SLOW,
        [user("quick"), user("slow")],
        reward=reward,
        limits=LimitsConfig(batch_s=5),
        scheduling=SchedulingConfig(**scheduling),
    )


async def test_batch_deadline_drop_marks_what_was_cut_and_removes_nothing() -> None:
    every = ("completed", "length", "limit", "deadline")
    batch = await cut_off(on_deadline="drop", trainable=every)
    assert [t.trainable for t in batch.trajectories] == [True, False]
    assert batch.trajectories[1].transcript.generated_length > 100


async def test_batch_deadline_raise_carries_the_batch() -> None:
    with pytest.raises(LimitExceeded, match=r"^limits.batch_s = 5 s is over$") as caught:
        await cut_off(on_deadline="raise")
    assert caught.value.partial is not None
    assert [s.outcome for s in caught.value.partial.samples] == ["completed", "deadline"]


@pytest.mark.parametrize("value", [None, 1.0])
async def test_batch_deadline_cut_trajectory_is_trained_on_where_no_reward_is_missing(
    value: float | None,
) -> None:
    async def reward(trajectory: Trajectory) -> float | None:
        return value

    batch = await cut_off(reward if value else None, trainable=("completed", "deadline"))
    assert [t.reward for t in batch.trajectories] == [value, None]
    assert [t.trainable for t in batch.trajectories] == [True, value is None]
    assert batch.trajectories[1].limit_source == "limits.batch_s"
    assert batch.trajectories[1].reason == "batch"


async def test_pause_holds_new_trajectories_back_until_resume() -> None:
    config = SLOW.config(scheduling=SchedulingConfig(samples_per_prompt=6, max_in_flight=2))
    async with rollout.open_rollout(config) as runtime, anyio.create_task_group() as tasks:
        weights_changed_at: list[float] = []

        async def update_weights() -> None:
            await anyio.sleep(0.01)
            runtime.admission.pause()
            while runtime.statistics().running:
                await anyio.sleep(0.01)
            finished = runtime.statistics().finished
            await anyio.sleep(100.0)
            assert runtime.statistics().running == 0
            assert runtime.statistics().finished == finished == 2
            weights_changed_at.append(anyio.current_time())
            runtime.admission.resume()

        tasks.start_soon(update_weights)
        batch = await runtime.generate([user("quick")])
    assert {t.outcome for t in batch.trajectories} == {Outcome.COMPLETED}
    assert weights_changed_at[0] > 100.0


async def test_stream_that_nobody_reads_admits_until_its_buffer_and_its_slots_are_full() -> None:
    config = OK.config(scheduling=SchedulingConfig(samples_per_prompt=20, max_in_flight=3))
    async with rollout.open_rollout(config) as runtime:
        async with runtime.stream([user("go")]) as trajectories:
            await anyio.sleep(100.0)
            assert runtime.statistics().running == 3  # they have ended, and wait
            assert runtime.statistics().finished == 3 + 3
            received = [each async for each in trajectories]
    assert len(received) == 20


async def test_resume_without_pause_is_refused() -> None:
    async with rollout.open_rollout(OK.config()) as runtime:
        runtime.admission.pause()
        runtime.admission.pause()
        runtime.admission.resume()
        assert runtime.statistics().max_running == 0
        runtime.admission.resume()
        assert runtime.statistics().max_running == 1024
        with pytest.raises(ValueError, match="resume: admission is not paused"):
            runtime.admission.resume()


def load(kv: float = 0.95, *, running: int = 40, queued: int = 0) -> EngineLoad:
    return EngineLoad(running=running, queued=queued, kv_used=kv)


class Looks:
    """A controller that is shown engines; at each look 100 tokens were sampled.

    Args:
        lost: Tokens of prefixes that were computed again meanwhile.
        reused: Tokens of prefixes that were not.
    """

    def __init__(self, most: int, *, lost: int = 1000, reused: int = 100) -> None:
        self.controller = AdmissionController(most)
        self.lost, self.reused = lost, reused
        self._known = self._reused = self._sampled = self._finished = 0

    def see(
        self, *loads: EngineLoad, in_flight: int, times: int = WINDOW, finished: int = 0
    ) -> int:
        """The number allowed after as many looks at these engines, named by position."""
        for _ in range(times):
            self._known += self.lost + self.reused
            self._reused += self.reused
            self._sampled += 100
            self._finished += finished
            named = {
                str(index): msgspec.structs.replace(each, generated_tokens=self._sampled)
                for index, each in enumerate(loads)
            }
            progress = Progress(self._finished, self._known, self._reused)
            self.controller.observe(named, in_flight, progress)
        return self.controller.allowed


@pytest.mark.parametrize(
    ("seen", "running", "queued", "kv"),
    [
        pytest.param({}, 40, 0, 0.99, id="full_without_a_queue"),
        pytest.param({}, 40, 50, 0.5, id="queue_for_other_reasons_than_memory"),
        pytest.param({"lost": 0, "reused": 0}, 40, 50, 0.95, id="single_turns"),
        pytest.param({"lost": 400, "reused": 1000}, 40, 50, 0.95, id="few_histories_lost"),
        pytest.param({"reused": 0}, 40, 50, 0.95, id="hits_that_are_not_told"),
        # Ten of a hundred run: with as few in flight as fit, batches would be of one.
        pytest.param({}, 10, 5, 0.95, id="trajectories_in_long_tools"),
    ],
)
def test_controller_engines_that_smaller_batches_would_not_help_are_left_alone(
    seen: dict[str, int], running: int, queued: int, kv: float
) -> None:
    told = load(kv, running=running, queued=queued)
    assert Looks(100, **seen).see(told, in_flight=100, times=50) == 100


def test_controller_histories_lost_shrinks_to_what_fits_and_waits_for_that() -> None:
    looks = Looks(128)
    assert looks.see(load(queued=70), in_flight=128, times=WINDOW - 1) == 128
    assert looks.see(load(queued=70), in_flight=128, times=1) == 42  # 40 requests hold 0.95
    # Looked at again before the cut has acted, while it acts and after: the same number.
    assert looks.see(load(queued=70), in_flight=128, times=60) == 42
    assert looks.see(load(queued=32), in_flight=90, times=60) == 42
    assert looks.see(load(queued=0), in_flight=42, times=60) == 42


def test_controller_never_below_what_runs() -> None:
    assert Looks(128).see(load(running=46, queued=82), in_flight=128, times=100) == 48
    assert Looks(128).see(load(running=46, queued=200), in_flight=46, times=100) == 48


def test_controller_histories_grow_follows_them_over_a_lifetime() -> None:
    looks = Looks(128)
    assert looks.see(load(queued=70), in_flight=128) == 42
    assert looks.see(load(running=20, queued=70), in_flight=100, times=50) == 42  # nobody ended
    looks.see(load(running=20, queued=30), in_flight=60, times=60, finished=4)  # four lifetimes
    assert looks.controller.allowed == 21


def test_controller_smaller_batches_that_cost_more_than_is_lost_end_it() -> None:
    looks = Looks(128, lost=600)
    assert looks.see(load(running=60, queued=30), in_flight=128) == 63
    assert looks.see(load(running=4, queued=30), in_flight=128, finished=60) == 128


def test_controller_room_again_grows_by_half_in_a_lifetime() -> None:
    looks = Looks(100)
    looks.see(load(queued=40), in_flight=100)
    looks.lost = 0
    assert looks.controller.allowed == 42
    looks.see(load(0.4, running=17), in_flight=42, times=20, finished=21)  # half of them
    grown = looks.controller.allowed
    assert 42 < grown <= 63
    assert looks.see(load(0.4, running=17), in_flight=42, times=20, finished=21) == grown
    assert looks.see(load(0.4, running=17), in_flight=100, times=60, finished=21) == 100


def test_controller_idle_begins_the_next_batch_at_the_most() -> None:
    looks = Looks(100)
    assert looks.see(load(queued=40), in_flight=100) == 42
    assert looks.see(load(0.0, running=0), in_flight=0, times=1) == 100


@function_tool
async def ping() -> str:
    """Answer."""
    return "pong"


@function_tool
async def broken() -> str:
    """Fail."""
    raise OSError("no network")


@pytest.mark.parametrize(
    ("limit", "most", "said", "reason", "calls", "errors"),
    [
        # The turn that would pass it runs none of its calls.
        ("max_tool_calls", 5, tool_call("ping") * 2, "tool_calls", 4, 0),
        ("max_consecutive_errors", 3, tool_call("broken"), "errors", 3, 3),
        ("max_consecutive_invalid_calls", 3, "<tool_call>{</tool_call>", "invalid_calls", 3, 3),
        ("max_consecutive_invalid_calls", 3, tool_call("nope"), "invalid_calls", 3, 3),
        ("max_consecutive_invalid_calls", 3, tool_call("ping", a=1), "invalid_calls", 3, 3),
    ],
)
async def test_calls_as_many_as_a_limit_says_end_the_trajectory(
    limit: str, most: int, said: str, reason: str, calls: int, errors: int
) -> None:
    agent = AgentConfig(**{limit: most})  # type: ignore[arg-type]
    scenario = Scenario(seed=1).reply("go", said, said)
    batch = await generate(scenario, [user("go")], tools=[ping, broken], agent=agent)
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.LIMIT, reason)
    assert trajectory.limit_source == f"agent.{limit}"
    assert trajectory.metrics["tool_calls"] == calls
    assert trajectory.metrics["tool_errors"] == errors
    assert not trajectory.transcript.trailing_observation_length


@pytest.mark.parametrize(
    ("limit", "bad"),
    [("max_consecutive_invalid_calls", "nope"), ("max_consecutive_errors", "broken")],
)
async def test_bad_calls_with_a_good_one_between_are_not_in_a_row(limit: str, bad: str) -> None:
    agent = AgentConfig(**{limit: 2})  # type: ignore[arg-type]
    scenario = Scenario(seed=1).reply("go", tool_call(bad))
    for text in (tool_call("ping"), tool_call(bad), "done"):
        scenario = scenario.then(text)
    batch = await generate(scenario, [user("go")], tools=[ping, broken], agent=agent)
    assert batch.trajectories[0].outcome is Outcome.COMPLETED


async def test_turn_cancelled_by_the_agents_own_scope_is_cut_and_the_agent_goes_on() -> None:
    @register_agent("quick_to_cut")
    class Impatient(AgentLoop):
        async def run(self, context: AgentContext) -> None:
            with anyio.move_on_after(1.0):
                await context.generate()
            context.observe([{"role": "user", "content": "Be quick."}])
            await context.generate()

    scenario = (
        Scenario(seed=1)
        .reply("Be quick", "ok")
        .reply("", filler=5000)
        .timing(base_s=0.01, slope_s=0.0)
    )
    batch = await generate(scenario, [user("go", agent_name="quick_to_cut")])
    (trajectory,) = batch.trajectories
    assert trajectory.outcome is Outcome.COMPLETED
    first, second = trajectory.transcript.generated_spans()
    assert (first.finish_reason, second.finish_reason) == ("abort", "stop")
    assert 50 < len(first) < 110
    mask = trajectory.transcript.mask()
    assert mask[first.start : first.stop].all()
    assert not mask[first.stop : second.start].any()


async def test_cancel_does_not_wait_for_places_that_another_call_holds() -> None:
    config = SLOW.config(scheduling=SchedulingConfig(max_in_flight=1))
    async with rollout.open_rollout(config) as runtime:
        ended: list[tuple[str, float]] = []

        async def call(word: str, uid: str) -> None:
            await runtime.generate([user(word, uid=uid)])
            ended.append((uid, anyio.current_time()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, "slow", "first")
            await anyio.sleep(1.0)
            tasks.start_soon(call, "quick", "second")
            await anyio.sleep(1.0)
            runtime.cancel("second")
            await anyio.sleep(0.1)
            assert ended == [("second", 2.0)]
            runtime.cancel("first")
        assert runtime.admission.limiter.borrowed_tokens == 0


async def test_stream_past_the_failure_budget_everything_is_received_before_the_error() -> None:
    config = OK.config(
        agent=AgentConfig(name="failing"),
        scheduling=SchedulingConfig(max_failures=1, max_failure_share=0.0),
    )
    received: list[str] = []
    async with rollout.open_rollout(config) as runtime:
        with pytest.raises(LimitExceeded, match=r"^2 of 3 trajectories failed "):
            async with runtime.stream([user(f"fail {i}") for i in range(2)] + [user("ok")]) as ends:
                await anyio.sleep(60.0)  # all of it is over by now
                received += [trajectory.uid async for trajectory in ends]
    assert sorted(received) == ["prompt-0", "prompt-1", "prompt-2"]


@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
async def test_caller_cancelled_before_the_first_member_starts_none_does() -> None:
    config = Scenario(seed=1).reply("", "ok").config()
    async with rollout.open_rollout(config) as runtime:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await runtime.generate([Prompt(messages="go") for _ in range(20)])
        statistics = runtime.statistics()
        assert scope.cancelled_caught
        assert (statistics.admitted, statistics.outcomes) == (20, {"cancelled": 20})
