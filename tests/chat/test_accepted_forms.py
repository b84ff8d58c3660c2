"""Forms in which people write what a prompt, a reward, a turn or a call of a tool is."""

from __future__ import annotations

import inspect
import pickle  # noqa: TID251  (as user code may)
from typing import Any

import msgspec
import pytest

import rollout
from race_situations import add, nap
from rollout import AgentContext, Message, Outcome, Prompt, Reward
from rollout.config import SamplingConfig
from rollout.testing import Scenario
from trial_agent import run_trial

pytestmark = pytest.mark.anyio

SCENARIO = Scenario(seed=1).reply("question", "word " * 30).reply("", "yes")


def test_prompt_of_a_text_is_what_a_user_says() -> None:
    said = Prompt(messages=[Message(role="user", content="question")])
    assert Prompt("question") == Prompt(messages="question") == said


def test_prompt_takes_its_messages_without_a_name_and_nothing_else() -> None:
    messages = [{"role": "system", "content": "Be brief."}, Message(role="user", content="x")]
    assert Prompt(messages) == Prompt(messages=messages)
    assert Prompt(tuple(messages), uid="a").messages == tuple(messages)
    kept = Prompt("x", ground_truth="42", extra={"a": None})
    assert pickle.loads(pickle.dumps(kept)) == kept
    assert msgspec.structs.replace(kept, uid="b").messages == kept.messages
    assert next(iter(inspect.signature(Prompt).parameters)) == "messages"
    with pytest.raises(TypeError):
        Prompt("question", "42")  # type: ignore[misc]


@pytest.mark.parametrize("wrong", [5, {"role": "user", "content": "x"}])
async def test_prompt_of_another_kind_is_refused_by_name(wrong: Any) -> None:
    async with rollout.open_rollout(SCENARIO.config()) as runtime:
        with pytest.raises(rollout.PromptError) as caught:
            await runtime.generate([Prompt(wrong)])
    assert f"prompts[0].messages = {wrong!r}" in str(caught.value)
    assert "expected a text or a list of messages" in str(caught.value)


def test_reward_takes_its_value_without_a_name() -> None:
    assert Reward(1.0) == Reward(value=1.0)
    assert Reward(0.5, extra={"format": 1}).extra == {"format": 1}
    with pytest.raises(TypeError):
        Reward(1.0, {"format": 1})  # type: ignore[misc]


async def tried(trial: Any, prompt: Prompt | None = None, **options: Any) -> rollout.Trajectory:
    sampling = SamplingConfig(temperature=0.7, top_p=0.9)
    options = {"sampling": sampling, "tools": [add, nap], **options}
    batch = await run_trial(trial, SCENARIO, prompt=prompt or Prompt("question"), **options)
    (trajectory,) = batch.trajectories
    return trajectory


def asked(context: AgentContext) -> list[Any]:
    """The sampling of each request to the engines from now on."""
    found: list[Any] = []
    engines = context.services.engines
    before = engines.generate

    async def noted(generation: Any) -> None:
        found.append(generation.sampling)
        await before(generation)

    object.__setattr__(engines, "generate", noted)
    return found


async def test_generate_takes_fields_of_sampling_for_one_turn() -> None:
    async def trial(context: AgentContext) -> None:
        before, seen = context.sampling, asked(context)
        await context.generate(temperature=0.2, max_new_tokens=3, stop_token_ids=[9], top_p=None)
        context.observe([{"role": "user", "content": "more"}])
        await context.generate(seed=7)
        assert context.sampling == before
        async with context.open_segment(OTHER, sampling={"temperature": 0.4}) as child:
            await child.generate(top_k=5)
        branch = await context.branch()
        await branch.generate(min_p=0.1)
        first, second, third, fourth = seen
        assert (first.temperature, first.top_p, first.max_new_tokens) == (0.2, 0.9, 3)
        assert 9 in first.stop_token_ids
        assert (second.temperature, second.seed) == (0.7, 7)
        assert (third.temperature, third.top_k) == (0.4, 5)
        assert (fourth.temperature, fourth.min_p) == (0.7, 0.1)

    trajectory = await tried(trial)
    assert trajectory.cause is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"temprature": 0.2},
            "generate: sampling.temprature: unknown field; known: max_new",
        ),
        ({"temperature": "hot"}, "sampling.temperature = 'hot': expected `float`, got `str`"),
        (
            {"stop_token_ids": [2**30]},
            "generate: sampling.stop_token_ids = (1073741824,); expected",
        ),
    ],
)
async def test_generate_refuses_what_no_sampling_has(fields: dict[str, Any], said: str) -> None:
    async def trial(context: AgentContext) -> None:
        for _ in range(2):  # before the trajectory has begun, and afterwards
            with pytest.raises((rollout.AgentError, rollout.EngineError)) as caught:
                await context.generate(**fields)
            assert str(caught.value).startswith(said)
        await context.generate()

    trajectory = await tried(trial)
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)


async def test_sampling_assigned_as_a_mapping_gives_fields_over_those_of_the_prompt() -> None:
    async def trial(context: AgentContext) -> None:
        context.sampling = {"temperature": 0.1}
        assert (context.sampling.temperature, context.sampling.top_p) == (0.1, 0.5)
        context.sampling = {"min_p": 0.2, "top_p": None}
        found = context.sampling
        assert (found.temperature, found.min_p, found.top_p) == (0.7, 0.2, 0.5)
        context.sampling = {"greedy": True}
        assert context.sampling.temperature == 0.0
        kept = context.sampling
        for wrong in ({"temprature": 1}, {"temperature": "hot"}, 0.5, [("top_p", 1)]):
            with pytest.raises(rollout.AgentError, match=r"sampling(\.| = )"):
                context.sampling = wrong  # type: ignore[assignment]
        assert context.sampling is kept
        await context.generate()

    trajectory = await tried(trial, Prompt("question", sampling={"top_p": 0.5}))
    assert trajectory.cause is None


OTHER = [{"role": "user", "content": "other"}]
FUNCTION = {"name": "add", "arguments": {"a": 1, "b": 2}}


@pytest.mark.parametrize(
    "call",
    [
        FUNCTION,
        {"name": "add", "arguments": '{"a": 1, "b": 2}'},
        {"id": "call_1", "type": "function", "function": FUNCTION},
    ],
)
async def test_call_tools_takes_dicts(call: dict[str, Any]) -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        mixed = [call, rollout.ToolCall(name="add", arguments={"a": 3, "b": 4})]
        one, other = await context.call_tools(mixed)
        assert (one.text, other.text, one.is_error) == ("3", "7", False)
        told = context.messages[-2]
        assert (told.role, told.name, told.content) == ("tool", "add", "3")
        assert told.tool_call_id == call.get("id")
        await context.generate()

    trajectory = await tried(trial)
    assert (trajectory.cause, trajectory.metrics["tool_calls"]) == (None, 2)


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        (FUNCTION, "calls = {'name'"),
        ([FUNCTION, None], "calls[1] must be a ToolCall or a mapping, not None; expected {'name'"),
        ([{"arguments": {}}], "calls[0] names no function; expected {'name'"),
        ([{"name": "add", "args": {"a": 1}}], "calls[0] has no arguments, but args"),
        ([{"name": "add", "arguments": "{a: 1}"}], "calls[0]: arguments are not JSON: "),
        ([{"name": "add", "arguments": 3}], "calls[0]: arguments must be an object, not int"),
    ],
)
async def test_call_tools_names_what_is_wrong_with_a_call(calls: Any, said: str) -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        count = len(context.messages)
        with pytest.raises(rollout.AgentError) as caught:
            await context.call_tools(calls)
        assert str(caught.value).startswith(f"call_tools: {said}")
        assert len(context.messages) == count

    trajectory = await tried(trial)
    assert trajectory.cause is None
    assert trajectory.metrics.get("tool_calls", 0) == 0
