"""Every pair of limits, to the exact virtual second."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

import rollout
from rollout import Outcome, Prompt, Trajectory, function_tool
from rollout.config import AgentConfig, LimitsConfig, SchedulingConfig
from rollout.interactions import Interaction, InteractionContext, InteractionTurn
from rollout.testing import Scenario, tool_call
from slow_cases import slow_after

pytestmark = pytest.mark.anyio

#: Seconds of the generation that calls the tool: one token a second, and no prefill to speak of.
CALL = tool_call("slow")
SPOKEN_S = 2.0


@function_tool
async def slow() -> str:
    """Take thirty seconds."""
    await anyio.sleep(30.0)
    return "done"


def scenario(tokens_per_s: float) -> Scenario:
    return (
        Scenario(seed=1)
        .reply("use the tool", CALL)
        .then("thanks")
        .reply("just talk", filler=100_000)
        .timing(base_s=1 / tokens_per_s, slope_s=0.0, prefill_tokens_per_s=1e12)
    )


async def run_one(word: str, limits: dict[str, Any], **sections: Any) -> tuple[Trajectory, float]:
    # A call of len(CALL) tokens and an end token take exactly SPOKEN_S.
    config = scenario((len(CALL) + 1) / SPOKEN_S).config(
        limits=LimitsConfig(**limits),
        lengths=rollout.LengthsConfig(prompt=2048, response=100_000),
        **sections,
    )
    async with rollout.open_rollout(config, [slow]) as runtime:
        start = anyio.current_time()
        batch = await runtime.generate([Prompt(messages=[{"role": "user", "content": word}])])
        return batch.trajectories[0], anyio.current_time() - start


#: limits given, what the model does, when it ends, whose limit it was
ENDINGS = [
    # The generation never ends by itself: each limit around it against its outer.
    ({"batch_s": 4}, "just talk", 4.0, "limits.batch_s"),
    ({"generation_s": 4, "turn_s": 5}, "just talk", 4.0, "limits.generation_s"),
    ({"turn_s": 4, "trajectory_s": 5}, "just talk", 4.0, "limits.turn_s"),
    ({"trajectory_s": 4, "batch_s": 5}, "just talk", 4.0, "limits.trajectory_s"),
    # Equal limits: the outer one is named, since nothing inside it could have continued.
    ({"generation_s": 4, "turn_s": 4}, "just talk", 4.0, "limits.turn_s"),
    ({"trajectory_s": 4, "batch_s": 4}, "just talk", 4.0, "limits.batch_s"),
    # The tool starts after SPOKEN_S; limits that count from earlier on win although equal.
    ({"tool_s": 7, "turn_s": 7}, "use the tool", 7.0, "limits.turn_s"),
    ({"turn_s": 7, "tool_s": 6}, "use the tool", 7.0, "limits.turn_s"),
    ({"batch_s": 7, "tool_s": 6}, "use the tool", 7.0, "limits.batch_s"),
]


@pytest.mark.parametrize(("limits", "word", "seconds", "source"), ENDINGS)
async def test_limit_that_fires_first_ends_the_trajectory_at_its_time(
    limits: dict[str, float], word: str, seconds: float, source: str
) -> None:
    trajectory, elapsed = await run_one(word, limits)
    assert (trajectory.outcome, trajectory.limit_source) == (Outcome.DEADLINE, source)
    assert trajectory.reason == source.removeprefix("limits.").removesuffix("_s")
    assert elapsed == pytest.approx(seconds, abs=1e-6)
    assert trajectory.metrics["total_s"] == pytest.approx(seconds, abs=1e-6)
    assert trajectory.transcript.generated_length > 0
    assert not trajectory.trainable


async def test_tool_limit_within_a_wider_one_is_an_observation_at_its_time() -> None:
    trajectory, elapsed = await run_one("use the tool", {"tool_s": 10, "turn_s": 40})
    assert trajectory.outcome is Outcome.COMPLETED
    assert trajectory.metrics["tool_s"] == pytest.approx(10.0, abs=1e-9)
    said = [m.content for m in trajectory.messages if m.role == "tool"]
    assert said == ["timed out after 10 s (limits.tool_s)"]
    spoken = len("thanks") + 1
    assert elapsed == pytest.approx(SPOKEN_S + 10.0 + spoken * SPOKEN_S / (len(CALL) + 1), abs=1e-6)


async def test_tool_within_its_limit_is_not_touched() -> None:
    trajectory, _ = await run_one("use the tool", {"tool_s": 31})
    assert [m.content for m in trajectory.messages if m.role == "tool"] == ["done"]


async def test_limits_written_as_none_end_nothing() -> None:
    names = ("generation_s", "tool_s", "turn_s", "trajectory_s", "batch_s")
    trajectory, _ = await run_one("use the tool", dict.fromkeys(names))
    assert trajectory.outcome is Outcome.COMPLETED


async def test_batch_limit_counts_from_the_call_and_trajectory_limit_from_admission() -> None:
    config = scenario(1.0).config(
        limits=LimitsConfig(trajectory_s=4, batch_s=10),
        scheduling=SchedulingConfig(samples_per_prompt=4, max_in_flight=1),
    )
    async with rollout.open_rollout(config) as runtime:
        start = anyio.current_time()
        batch = await runtime.generate(
            [Prompt(messages=[{"role": "user", "content": "just talk"}])]
        )
        assert anyio.current_time() - start == pytest.approx(10.0, abs=1e-6)
    assert [(t.limit_source, len(t.transcript) > 0) for t in batch.trajectories] == [
        ("limits.trajectory_s", True),
        ("limits.trajectory_s", True),
        ("limits.batch_s", True),
        ("limits.batch_s", False),
    ]


class Mute(Interaction):
    """A user that never answers."""

    name = "mute"

    async def start(self, context: InteractionContext) -> None:
        """Nothing to do."""

    async def respond(self, messages: Any) -> InteractionTurn:
        """Wait for ever."""
        await anyio.sleep_forever()
        raise AssertionError

    async def finish(self) -> None:
        """Hang, too: closing is bounded."""
        await anyio.sleep_forever()


async def test_user_that_never_answers_and_never_finishes_is_bounded() -> None:
    config = (
        Scenario(seed=1)
        .reply("", "hello")
        .timing(base_s=0.5, slope_s=0.0, prefill_tokens_per_s=1e12)
        .config(
            limits=LimitsConfig(turn_s=8, cleanup_s=2.5),
            agent=AgentConfig(interaction="mute"),
        )
    )
    async with rollout.open_rollout(config, interactions=[Mute]) as runtime:
        start = anyio.current_time()
        batch = await runtime.generate([Prompt(messages=[{"role": "user", "content": "x"}])])
        assert anyio.current_time() - start == pytest.approx(8.0 + 2.5, abs=1e-6)
    (trajectory,) = batch.trajectories
    assert trajectory.limit_source == "limits.turn_s"


async def test_reward_that_never_returns_meets_its_limit_and_keeps_the_tokens() -> None:
    async def reward(trajectory: Trajectory) -> float:
        await anyio.sleep_forever()
        return 1.0

    config = Scenario(seed=1).reply("", "ok").config(limits=LimitsConfig(reward_s=3))
    async with rollout.open_rollout(config, reward=reward) as runtime:
        batch = await runtime.generate([Prompt(messages=[{"role": "user", "content": "x"}])])
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.DEADLINE, "reward")
    assert trajectory.limit_source == "limits.reward_s"
    assert trajectory.metrics["reward_s"] == pytest.approx(3.0, abs=1e-9)
    assert trajectory.reward is None
    assert trajectory.answer == "ok"


@pytest.mark.parametrize("word", ["use the tool", "just talk"])
async def test_agent_timeout_of_a_prompt_ends_its_agent_and_is_rewarded(word: str) -> None:
    strict = AgentConfig(tokenization_check="strict")
    config = scenario((len(CALL) + 1) / SPOKEN_S).config(
        lengths=rollout.LengthsConfig(prompt=2048, response=2000), agent=strict
    )
    messages = [{"role": "user", "content": word}]
    extras: list[dict[str, Any]] = [{"agent_timeout_s": 7}, {"agent_timeout_s": None}]
    prompts = [Prompt(messages=messages, extra=extra) for extra in extras]

    async def late(trajectory: Trajectory) -> float:
        await anyio.sleep(20.0)
        return 0.5

    async with rollout.open_rollout(config, [slow], late) as runtime:
        timed, free = (await runtime.generate(prompts)).trajectories
    source = "extra.agent_timeout_s"
    assert (timed.outcome, timed.reason) == (Outcome.LIMIT, "agent_timeout")
    assert (timed.limit_source, timed.reward, timed.trainable) == (source, 0.5, True)
    assert 27.0 <= timed.metrics["total_s"] < 27.1
    assert free.limit_source != source


@pytest.mark.parametrize("value", [0, "7", float("nan")])
async def test_agent_timeout_that_is_no_time_is_refused(value: Any) -> None:
    prompt = Prompt(messages="hi", extra={"agent_timeout_s": value})
    async with rollout.open_rollout(scenario(1.0).config()) as runtime:
        with pytest.raises(rollout.PromptError, match=r"\['agent_timeout_s'\] = .*a number > 0"):
            await runtime.generate([prompt])


@pytest.mark.parametrize("seconds", slow_after(1, [60.0, 1200.0]))
async def test_engine_that_stays_full_ends_a_trajectory_by_its_limit(seconds: float) -> None:
    full = Scenario(seed=1).reply("", filler=5).fault(reject_share=1.0)
    limits = LimitsConfig(batch_s=9000.0, trajectory_s=8000.0, turn_s=None, generation_s=seconds)
    async with rollout.open_rollout(full.config(limits=limits)) as runtime:
        batch = await runtime.generate([Prompt(messages=[{"role": "user", "content": "x"}])])
    [trajectory] = batch.trajectories
    assert (trajectory.outcome, trajectory.limit_source) == (
        Outcome.DEADLINE,
        "limits.generation_s",
    )
