"""What can be registered as an agent: what makes one for each trajectory, or what all may share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest

import rollout
from race_situations import user
from rollout import AgentContext, AgentError, AgentLoop, EnvironmentAgent, Outcome, ProgramAgent
from rollout.agents import CompactingAgent, ToolAgent, get_agent, register_agent
from rollout.config import AgentConfig, SchedulingConfig
from rollout.integrations.langgraph import GraphAgent
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

SCENARIO = Scenario(seed=1).reply("", "Well.")


class Counting(AgentLoop):
    """Says how often it has run."""

    made: ClassVar[list[Counting]] = []

    def __init__(self, step: int = 1) -> None:
        self.runs, self.step = 0, step
        self.made.append(self)

    async def run(self, context: AgentContext) -> None:
        self.runs += self.step
        await context.generate()
        context.extra["runs"] = self.runs


def make_counting() -> Counting:
    return Counting(step=3)


class Maze:
    def reset(self, prompt: Any) -> str:
        return "A door."

    def step(self, action: Any) -> Any:
        return "", 1.0, True, {}


def make_maze() -> Maze:
    return Maze()


class CallableMaze(Maze):
    def __call__(self) -> Maze:
        return Maze()


async def played(name: str) -> list[rollout.Trajectory]:
    config = SCENARIO.config(
        agent=AgentConfig(name=name), scheduling=SchedulingConfig(samples_per_prompt=3)
    )
    async with rollout.open_rollout(config) as runtime:
        batch = await runtime.generate([user("go"), user("on")])
    return list(batch.trajectories)


@pytest.mark.parametrize(
    ("factory", "runs"), [(Counting, 1), (partial(Counting, step=2), 2), (make_counting, 3)]
)
async def test_registered_factory_makes_an_agent_for_each_trajectory(
    factory: Callable[[], AgentLoop], runs: int
) -> None:
    name = f"counts_{runs}"
    register_agent(name)(factory)
    Counting.made.clear()
    trajectories = await played(name)
    assert [each.outcome for each in trajectories] == [Outcome.COMPLETED] * 6
    assert [each.extra["runs"] for each in trajectories] == [runs] * 6
    assert len({id(each) for each in Counting.made}) == 6


class WithoutItsInit(EnvironmentAgent):
    """Is the environment, and does not call `EnvironmentAgent.__init__`."""

    def __init__(self, doors: int = 3) -> None:
        self.doors = doors

    def reset(self, prompt: Any) -> str:
        return f"{self.doors} doors."

    def step(self, action: Any) -> Any:
        return "", 1.0, True, {}


async def test_registered_environment_agent_with_an_init_of_its_own_plays_itself() -> None:
    register_agent("without_its_init")(WithoutItsInit)
    trajectories = await played("without_its_init")
    assert [(each.outcome, each.turn_scores) for each in trajectories] == [
        (Outcome.COMPLETED, [1.0])
    ] * 6
    with pytest.raises(AgentError, match="register the class, WithoutItsInit"):
        register_agent("one_for_all")(WithoutItsInit())


async def test_registered_factory_that_makes_no_agent_is_named() -> None:
    register_agent("makes_a_maze")(make_maze)  # type: ignore[type-var]
    for trajectory in await played("makes_a_maze"):
        assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "agent")
        assert "expected an AgentLoop" in str(trajectory.cause)


class Shared(AgentLoop):
    is_shared = True

    async def run(self, context: AgentContext) -> None:
        await context.generate()


class Heir(Shared):
    """Keeps nothing either."""


class AroundMaze(EnvironmentAgent):
    def read_action(self, turn: Any) -> Any:
        return turn.content.upper()


@pytest.mark.parametrize(
    "agent",
    [
        Shared(),
        Heir(),
        ToolAgent(),
        EnvironmentAgent(make_maze),
        AroundMaze(Maze),
        ProgramAgent(["true"]),
        GraphAgent(lambda model: None),
    ],
)
def test_register_agent_takes_an_instance_that_may_be_shared(agent: AgentLoop) -> None:
    name = f"shared_{type(agent).__name__}"
    register_agent(name)(agent)
    assert get_agent(name) is agent


class IsMaze(EnvironmentAgent):
    def reset(self, prompt: Any) -> str:
        return "A door."

    def step(self, action: Any) -> Any:
        return "", 1.0, True, {}


class Remembering(ToolAgent):
    def __init__(self) -> None:
        self.seen: list[str] = []


@pytest.mark.parametrize("agent", [Counting(), IsMaze(), Remembering(), CompactingAgent()])
def test_register_agent_refuses_an_instance_that_trajectories_would_share(
    agent: AgentLoop,
) -> None:
    name, kind = f"refused_{type(agent).__name__}", type(agent).__name__
    with pytest.raises(AgentError) as caught:
        register_agent(name)(agent)
    assert str(caught.value).startswith(f"register_agent({name!r}): {kind} is registered as an")
    assert f"register the class, {kind}" in str(caught.value)
    with pytest.raises(AgentError, match="no agent is registered"):
        get_agent(name)


@pytest.mark.parametrize("environment", [Maze(), CallableMaze()])
def test_environment_agent_refuses_one_environment_for_all(environment: Any) -> None:
    with pytest.raises(AgentError, match=r"environment = .*: register the class"):
        EnvironmentAgent(environment)


class WithoutRun(AgentLoop):
    pass


class NoAgent:
    async def run(self, context: AgentContext) -> None:
        pass


class Needy(Counting):
    def __init__(self, step: int) -> None:
        super().__init__(step)


async def plain(context: AgentContext) -> None:
    pass


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (WithoutRun, r"WithoutRun has no run; expected async def run\(self, context\)"),
        (NoAgent, "NoAgent'> is not a subclass of AgentLoop; expected a subclass"),
        (Needy, "cannot be called without arguments .*'step'.*; expected a subclass"),
        (plain, "makes none at once; expected a subclass"),
    ],
)
def test_register_agent_refuses_what_makes_no_agent(given: Any, words: str) -> None:
    with pytest.raises(AgentError, match=r"register_agent\('wrong'\): .*" + words):
        register_agent("wrong")(given)
    with pytest.raises(AgentError, match="no agent is registered"):
        get_agent("wrong")
