"""Environments as agents: what is said, what is rewarded, what is closed."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

from harness import Recorder
from race_situations import user
from rollout import (
    AgentError,
    EnvironmentAgent,
    Message,
    Outcome,
    RolloutBatch,
    register_agent,
)
from rollout.config import AgentConfig, LengthsConfig, LimitsConfig
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

SCENARIO = Scenario(seed=1).reply("door", "left").then("right").then("open")
LIMITS = LimitsConfig(
    generation_s=20, tool_s=10, turn_s=40, trajectory_s=60, batch_s=500, cleanup_s=2
)


class Maze:
    """Three doors; `log` says what was asked of it."""

    log: list[Any]

    def __init__(self) -> None:
        type(self).log = self.log = []

    async def reset(self, prompt: Any) -> Any:
        self.log.append(("reset", prompt.uid))
        return "You see a door."

    async def step(self, action: str) -> Any:
        self.log.append(action)
        steps = len(self.log) - 1
        return f"Room {steps}.", 0.25 * steps, steps == 3, {"rooms": steps}

    async def close(self) -> None:
        self.log.append("close")


class SyncMaze(Maze):
    def reset(self, prompt: Any) -> Any:  # type: ignore[override]
        self.log.append(("reset", prompt.uid))
        return [{"role": "user", "content": "You see a door."}]

    def step(self, action: str) -> Any:  # type: ignore[override]
        self.log.append(action)
        steps = len(self.log) - 1
        return {"role": "user", "content": f"Room {steps}."}, 0.25 * steps, steps == 3, None

    def close(self) -> None:  # type: ignore[override]
        self.log.append("close")


async def played(
    environment: Any, *, reward: Any = None, scenario: Scenario = SCENARIO, **options: Any
) -> RolloutBatch:
    is_agent = issubclass(environment, EnvironmentAgent)
    name = f"plays_{environment.__name__}"
    register_agent(name)(environment if is_agent else EnvironmentAgent(environment))
    agent = AgentConfig(name=name, **options.pop("agent", {}))
    options.setdefault("limits", LIMITS)
    recorder = Recorder()
    config = scenario.config(agent=agent, **options)
    async with recorder.open_rollout(config, reward=reward) as runtime:
        batch: RolloutBatch = await runtime.generate([user("Find the way out.", uid="p")])
    assert recorder.anomalies() == []
    return batch


@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
@pytest.mark.parametrize("maze", [Maze, SyncMaze])
async def test_environment_is_played_to_its_end(maze: Any) -> None:
    batch = await played(maze)
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert maze.log == [("reset", "p"), "left", "right", "open", "close"]
    assert [(m.role, m.content) for m in trajectory.messages] == [
        ("user", "Find the way out."),
        ("user", "You see a door."),
        ("assistant", "left"),
        ("user", "Room 1."),
        ("assistant", "right"),
        ("user", "Room 2."),
        ("assistant", "open"),
    ]
    assert trajectory.turn_scores == [0.25, 0.5, 0.75]
    assert trajectory.reward == 1.5
    assert trajectory.num_turns == 6
    if maze is Maze:
        assert trajectory.extra == {"rooms": 3}


async def test_environment_rewards_stand_at_the_last_tokens_of_turns() -> None:
    batch = await played(Maze)
    (trajectory,) = batch.trajectories
    ends = [span.stop - 1 for span in trajectory.transcript.generated_spans()]
    rewards = batch.tensors["token_rewards"][0]
    prompt = trajectory.transcript.prompt_length
    assert [float(rewards[end - prompt]) for end in ends] == [0.25, 0.5, 0.75]
    assert float(rewards.sum()) == 1.5
    assert float(batch.tensors["rewards"][0]) == 1.5


async def test_environment_reward_gives_way_to_a_reward_function() -> None:
    batch = await played(Maze, reward=lambda trajectory: 10 * trajectory.turn_scores[-1])
    assert batch.trajectories[0].reward == 7.5
    assert batch.trajectories[0].turn_scores == [0.25, 0.5, 0.75]


async def test_environment_turn_limit_ends_it_and_keeps_its_rewards() -> None:
    (trajectory,) = (await played(Maze, agent={"max_assistant_turns": 2})).trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.LIMIT, "turns")
    assert trajectory.turn_scores == [0.25, 0.5]
    assert Maze.log[-1] == "close"


async def test_environment_turn_that_was_cut_ends_it() -> None:
    lengths = LengthsConfig(prompt=900, response=100, turn=2)
    (trajectory,) = (await played(Maze, lengths=lengths)).trajectories
    assert (trajectory.outcome, trajectory.reward) == (Outcome.LENGTH, 0.0)
    assert Maze.log == [("reset", "p"), "close"]


class Subclass(EnvironmentAgent):
    """An agent that is its environment, and acts on other than the text."""

    def read_action(self, turn: Any) -> Any:
        return turn.text.encode()

    async def reset(self, prompt: Any) -> Any:
        self.actions: list[Any] = []
        return "A door."

    async def step(self, action: Any) -> Any:
        self.actions.append(action)
        return None, True, len(self.actions) == 2, {"actions": len(self.actions)}


async def test_environment_agent_may_be_its_own_environment() -> None:
    (trajectory,) = (await played(Subclass)).trajectories
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 2.0)
    assert trajectory.extra == {"actions": 2}


def broken(**methods: Any) -> Any:
    return type("Broken", (Maze,), methods)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            (1, 2),
            "step of the environment returned (1, 2); expected (observation, reward, done, in",
        ),
        (("a", "b", False, {}), "step of the environment returned 'b'; expected a number"),
        ((5, 1, False, {}), "step of the environment returned the observation 5; expected a text"),
    ],
)
async def test_environment_wrong_step_is_named(step: Any, message: str) -> None:
    async def wrong(self: Any, action: str) -> Any:
        return step

    maze = broken(step=wrong)
    (trajectory,) = (await played(maze)).trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "agent")
    assert trajectory.cause.message.startswith(message)
    assert maze.log[-1] == "close"


async def test_environment_that_raises_fails_its_trajectory_and_is_closed() -> None:
    async def boom(self: Any, action: str) -> Any:
        raise ValueError("lost")

    maze = broken(step=boom)
    (trajectory,) = (await played(maze)).trajectories
    assert (trajectory.outcome, trajectory.cause.message) == (Outcome.FAILED, "lost")
    assert maze.log[-1] == "close"


@pytest.mark.parametrize("length", [1, 20_000])
async def test_environment_observation_that_is_no_text_is_named(length: int) -> None:
    class HalfWords:
        async def reset(self, prompt: Any) -> str:
            return "a door"

        async def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
            return "\ud83d" + length * "x", 0.5, False, {}

    (trajectory,) = (await played(HalfWords)).trajectories
    assert trajectory.outcome is Outcome.FAILED
    assert trajectory.cause.message == ("the messages hold '\\ud83d': half of a character, no text")


async def test_environment_slow_step_ends_at_the_turns_deadline() -> None:
    async def slow(self: Any, action: str) -> Any:
        await anyio.sleep(1000)

    maze = broken(step=slow)
    (trajectory,) = (await played(maze)).trajectories
    assert (trajectory.outcome, trajectory.limit_source) == (Outcome.DEADLINE, "limits.turn_s")
    assert maze.log[-1] == "close"


async def test_environment_close_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def boom(self: Any) -> Any:
        raise ValueError("stuck")

    (trajectory,) = (await played(broken(close=boom))).trajectories
    assert trajectory.outcome is Outcome.COMPLETED
    assert "close of Broken failed: ValueError: stuck" in caplog.text


def test_environment_agent_refuses_what_is_no_environment() -> None:
    with pytest.raises(AgentError, match=r"environment = 5; expected what makes one"):
        EnvironmentAgent(5)  # type: ignore[arg-type]
    with pytest.raises(AgentError, match="EnvironmentAgent has no method reset and no step"):
        EnvironmentAgent()


def message(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


class Gym(Maze):
    """As gymnasium has it: what it begins with and how it ends is said by its subclasses."""

    first: Any = ("You see a door.", {"level": 3})
    last: tuple[Any, Any] = (True, False)

    async def reset(self, prompt: Any) -> Any:
        self.log.append("reset")
        return self.first

    async def step(self, action: str) -> Any:
        self.log.append(action)
        steps = len(self.log) - 1
        ends = self.last if steps == 2 else (False, False)
        return (f"Room {steps}.", 0.25, *ends, {"rooms": steps})


@pytest.mark.parametrize("last", [(True, False), (np.bool_(False), np.bool_(True))])
async def test_environment_of_gymnasium_is_played_until_it_terminates_or_truncates(
    last: tuple[Any, Any],
) -> None:
    class Ends(Gym):
        pass

    Ends.last = last
    (trajectory,) = (await played(Ends)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert Ends.log == ["reset", "left", "right", "close"]
    assert (trajectory.reward, trajectory.extra) == (0.5, {"level": 3, "rooms": 2})
    assert [m.content for m in trajectory.messages[:3]] == [
        "Find the way out.",
        "You see a door.",
        "left",
    ]


@pytest.mark.parametrize("how", ["keyword", "wrapper"])
async def test_environment_reset_of_gymnasium_gets_a_seed_and_no_prompt(how: str) -> None:
    seeds: list[Any] = []

    class Seeded(Gym):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:  # type: ignore[override]
            seeds.append(seed)
            return self.first

    class Wrapper(Gym):
        async def reset(self, **kwargs: Any) -> Any:  # type: ignore[override]
            seeds.append(kwargs["seed"])
            return self.first

    kind = {"keyword": Seeded, "wrapper": Wrapper}[how]
    for _ in range(2):
        (trajectory,) = (await played(kind)).trajectories
        assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert seeds[0] == seeds[1]
    assert 0 <= seeds[0] < 2**32


PAIR = (message("Rules.", "user"), message("A door."))
RESETS: list[tuple[Any, list[str], dict[str, Any]]] = [
    (("A door.", {}), ["A door."], {}),
    (([message("A door.")], {"role": "knight"}), ["A door."], {"role": "knight"}),
    ((None, {"level": 1}), [], {"level": 1}),
    # Observations, and no info: two messages, whatever they are made of.
    (PAIR, ["Rules.", "A door."], {}),
    ((Message(role="user", content="Rules."), PAIR[1]), ["Rules.", "A door."], {}),
]


@pytest.mark.parametrize(("first", "said", "info"), RESETS)
async def test_environment_reset_tells_an_info_from_an_observation_of_two_messages(
    first: Any, said: list[str], info: dict[str, Any]
) -> None:
    class Begins(Gym):
        pass

    Begins.first = first
    scenario = Scenario(seed=1).reply("way", "left").then("right").then("open")
    (trajectory,) = (await played(Begins, scenario=scenario)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    found = [m.content for m in trajectory.messages]
    assert found[1 : found.index("left")] == said
    assert {key: trajectory.extra[key] for key in info} == info
    assert len(trajectory.extra) == len(info) + 1


@pytest.mark.parametrize("first", [("a", "b"), ("a", "b", {})])
async def test_environment_reset_of_another_form_is_refused(first: Any) -> None:
    class Wrong(Gym):
        pass

    Wrong.first = first
    (trajectory,) = (await played(Wrong)).trajectories
    assert trajectory.outcome is Outcome.FAILED
    assert trajectory.cause.message.startswith("reset of the environment returned")
    assert trajectory.cause.message.endswith("and from reset also (observation, info)")
