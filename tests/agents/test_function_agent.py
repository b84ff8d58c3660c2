"""Functions as agents: what they are told, what they may return, and how they end."""

from __future__ import annotations

import asyncio  # noqa: TID251
import threading
from typing import Any

import anyio
import msgspec
import pytest

import rollout
from fake_gateway import FakeGateway, fake_gateway
from harness import Recorder
from rollout import AgentError, AgentTask, Outcome, Prompt, Reward, RolloutBatch
from rollout.bridge import runs_on_trio
from rollout.config import LimitsConfig, ToolsConfig
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

ON_BOTH = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
LIMITS = LimitsConfig(
    generation_s=20, tool_s=10, turn_s=40, trajectory_s=60, batch_s=500, cleanup_s=2
)
SCENARIO = Scenario(seed=1).reply("", "Well.")
TRIALS: dict[str, Any] = {}


@rollout.agent("native_function", backend="native")
async def native_function(task: AgentTask) -> Any:
    """Does what its test says, on the runtime's loop."""
    return await TRIALS["it"](task)


@rollout.agent("asyncio_function")
async def asyncio_function(task: AgentTask) -> Any:
    return await TRIALS["it"](task)


@rollout.agent("sync_function")
def sync_function(task: AgentTask) -> Any:
    return TRIALS["it"](task)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> FakeGateway:
    return fake_gateway(monkeypatch)


def user(text: str, **fields: Any) -> Prompt:
    return Prompt(messages=[{"role": "user", "content": text}], **fields)


async def tried(
    trial: Any,
    agent: str = "native_function",
    *,
    reward: Any = None,
    prompt: Prompt | None = None,
    **options: Any,
) -> RolloutBatch:
    TRIALS["it"] = trial
    options.setdefault("limits", LIMITS)
    recorder = Recorder()
    # The agent of the configuration would start the gateway with the runtime.
    asked = msgspec.structs.replace(prompt or user("go"), agent_name=agent)
    async with recorder.open_rollout(SCENARIO.config(**options), reward=reward) as runtime:
        batch: RolloutBatch = await runtime.generate([asked], step=1)
    assert recorder.anomalies() == []
    return batch


async def returning(value: Any, **options: Any) -> Any:
    async def trial(task: AgentTask) -> Any:
        return value

    return (await tried(trial, **options)).trajectories[0]


async def test_function_agent_is_told_address_key_model_prompt_and_extra(
    gateway: FakeGateway,
) -> None:
    seen: list[AgentTask] = []

    async def trial(task: AgentTask) -> None:
        seen.append(task)
        task.extra["answer"] = 42
        assert list(gateway.contexts) == [task.api_key]

    prompt = user("go", uid="p", extra={"level": 3})
    (trajectory,) = (await tried(trial, prompt=prompt)).trajectories
    (task,) = seen
    assert task.base_url == "http://127.0.0.1:9999/t/1/v1"
    assert task.root_url == "http://127.0.0.1:9999/t/1"
    assert (task.api_key, task.model) == ("key-of-1/p/0", "served-model")
    assert (task.uid, task.member, task.prompt.uid) == ("p", 0, "p")
    assert task.messages == [{"role": "user", "content": "go"}]
    assert trajectory.extra == {"level": 3, "answer": 42}
    assert trajectory.outcome is Outcome.COMPLETED
    assert (gateway.contexts, gateway.closed) == ({}, 1)


async def test_function_agent_calls_of_the_prompt_are_openai_json(gateway: FakeGateway) -> None:
    async def trial(task: AgentTask) -> None:
        assert task.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'

    call = {"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    ]
    batch = await tried(trial, prompt=Prompt(messages=messages))
    assert batch.trajectories[0].outcome is Outcome.COMPLETED


async def test_function_agent_malformed_prompt_is_rejected(gateway: FakeGateway) -> None:
    trajectory = await returning(1.0, prompt=Prompt(messages=[{"role": "wizard", "content": "x"}]))
    assert (trajectory.outcome, trajectory.reason) == (Outcome.REJECTED, "bad_message")


@pytest.mark.parametrize(
    ("value", "reward"),
    [(0.5, 0.5), (None, None), (Reward(value=3, extra={"why": "x"}), 3.0)],
)
async def test_function_agent_number_is_the_reward(
    gateway: FakeGateway, value: Any, reward: float | None
) -> None:
    trajectory = await returning(value)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, reward)
    assert trajectory.extra == ({"why": "x"} if isinstance(value, Reward) else {})


async def test_function_agent_number_gives_way_to_a_reward_function(gateway: FakeGateway) -> None:
    trajectory = await returning(0.5, reward=lambda trajectory: 7.0)
    assert trajectory.reward == 7.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("good", "the agent 'native_function' returned 'good'; expected a number or a Reward"),
        (float("nan"), "the agent 'native_function' returned nan; expected a finite number"),
    ],
)
async def test_function_agent_bad_value_is_named(
    gateway: FakeGateway, value: Any, message: str
) -> None:
    trajectory = await returning(value)
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "agent")
    assert trajectory.cause.message.startswith(message)
    assert trajectory.reward is None


async def too_late(task: AgentTask) -> None:
    with anyio.fail_after(0.01):
        await anyio.sleep(1)


async def told_by_nothing(task: AgentTask) -> None:
    raise LookupError("no answer in time") from OSError()


@pytest.mark.parametrize(
    ("trial", "cause"),
    [
        (too_late, ("TimeoutError", "")),
        (told_by_nothing, ("LookupError", "no answer in time")),
    ],
)
async def test_function_agent_cause_is_no_cancellation_and_says_something(
    gateway: FakeGateway, trial: Any, cause: tuple[str, str]
) -> None:
    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "agent")
    assert (trajectory.cause.type, trajectory.cause.message) == cause


SHORT = LimitsConfig(
    generation_s=0.2, tool_s=0.2, turn_s=0.2, trajectory_s=0.2, batch_s=60, cleanup_s=1
)


@ON_BOTH
async def test_function_agent_runs_on_asyncio_under_either_backend(gateway: FakeGateway) -> None:
    def trial(task: AgentTask) -> Any:
        async def run() -> float:
            assert not runs_on_trio()
            await asyncio.sleep(0.001)
            return 0.25

        return run()

    (trajectory,) = (await tried(trial, "asyncio_function")).trajectories
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 0.25)


@ON_BOTH
async def test_function_agent_on_asyncio_is_cancelled_once_and_can_clean_up(
    gateway: FakeGateway,
) -> None:
    cleaned: list[str] = []

    async def trial(task: AgentTask) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0.001)
            cleaned.append(task.uid)

    (trajectory,) = (await tried(trial, "asyncio_function", limits=SHORT)).trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.DEADLINE, "trajectory")
    assert cleaned == ["prompt-0"]
    assert (gateway.contexts, gateway.closed) == ({}, 1)


@ON_BOTH
async def test_function_agent_on_asyncio_that_swallows_cancellation_is_given_up(
    gateway: FakeGateway, anyio_backend: str
) -> None:
    release = threading.Event()

    async def trial(task: AgentTask) -> None:
        while not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    try:
        (trajectory,) = (await tried(trial, "asyncio_function", limits=SHORT)).trajectories
    finally:
        release.set()
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "unresponsive")
    assert "did not end within limits.cleanup_s = 1 s" in trajectory.cause.message
    assert gateway.contexts == {}


@ON_BOTH
async def test_function_agent_sync_runs_in_a_thread(gateway: FakeGateway) -> None:
    def trial(task: AgentTask) -> float:
        assert threading.current_thread() is not threading.main_thread()
        return 0.75

    tools = ToolsConfig(max_threads=1)
    (trajectory,) = (await tried(trial, "sync_function", tools=tools)).trajectories
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 0.75)


@ON_BOTH
async def test_function_agent_sync_at_its_deadline_leaves_its_thread(gateway: FakeGateway) -> None:
    release = threading.Event()

    try:
        batch = await tried(lambda task: release.wait(30), "sync_function", limits=SHORT)
    finally:
        release.set()
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.DEADLINE, "trajectory")
    assert gateway.contexts == {}


def generator(task: AgentTask) -> Any:
    yield 1


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (5, "agent('x'): 5; expected a function of one argument, the task"),
        (lambda task, other: 1, "agent('x'): missing a required argument: 'other'; expected a"),
        (generator, "is a generator; expected a function of one argument, the task"),
    ],
)
def test_agent_refuses_what_is_no_function_of_a_task(function: Any, message: str) -> None:
    with pytest.raises(AgentError) as caught:
        rollout.agent("x")(function)
    assert message in str(caught.value)


def test_agent_refuses_a_taken_name_and_an_unknown_backend() -> None:
    with pytest.raises(AgentError, match=r"the name is taken by .*native_function"):
        rollout.agent("native_function")(lambda task: 1.0)
    with pytest.raises(AgentError, match=r"backend = 'curio'; expected 'asyncio' or 'native'"):
        rollout.agent("x", backend="curio")  # type: ignore[arg-type]


async def test_agent_that_takes_its_task_for_a_context_is_told_what_to_write(
    gateway: FakeGateway,
) -> None:
    async def trial(context: Any) -> None:
        await context.generate()

    batch = await tried(trial)
    (cause,) = [each.cause for each in batch.trajectories]
    assert cause is not None
    assert "'AgentTask' object has no attribute 'generate'" in cause.message
    assert "task.base_url" in cause.message
    assert "AgentLoop" in cause.message
