"""Results of tools in the order of the calls that they answer, whatever order they ended in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import rollout
from harness import Recorder
from race_situations import add
from rollout import (
    AgentContext,
    AgentLoop,
    Message,
    Outcome,
    Prompt,
    ToolCall,
    Trajectory,
    register_agent,
)
from rollout.config import AgentConfig, LengthsConfig, SchedulingConfig
from rollout.testing import Scenario, tool_call

pytestmark = pytest.mark.anyio

BOTH = tool_call("add", a=1, b=2) + "\n" + tool_call("add", a=3, b=4)
SCENARIO = Scenario(seed=1).reply("go", BOTH).then("Done.").then("Again.").reply("sum", "A sum.")
TRIALS: dict[str, Any] = {}


@register_agent("answers_its_calls")
class AnswersItsCalls(AgentLoop):
    """Does what its test says."""

    async def run(self, context: AgentContext) -> None:
        await TRIALS["it"](context)


async def generate_once(context: AgentContext) -> None:
    await context.generate()


async def all_tried(trial: Any, prompts: Any, **agent: Any) -> list[Trajectory]:
    """One trajectory for each list of messages."""
    TRIALS["it"] = trial
    recorder = Recorder()
    config = SCENARIO.config(
        agent=AgentConfig(name="answers_its_calls", **agent),
        lengths=LengthsConfig(prompt=1200, response=1200),
        scheduling=SchedulingConfig(max_retries=0),
    )
    async with recorder.open_rollout(config, [add]) as runtime:
        batch = await runtime.generate([Prompt(messages=messages) for messages in prompts])
    assert recorder.anomalies() == []
    return list(batch.trajectories)


async def tried(trial: Any, messages: Any = None, **agent: Any) -> Trajectory:
    (trajectory,) = await all_tried(trial, [messages or [GO]], **agent)
    return trajectory


def call(call_id: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"type": "function", "function": function} | ({"id": call_id} if call_id else {})


def asks(*ids: str) -> dict[str, Any]:
    calls = [call(each, a=at, b=at) for at, each in enumerate(ids)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(call_id: str | None, text: str) -> dict[str, Any]:
    message = {"role": "tool", "name": "add", "content": text}
    return message if call_id is None else message | {"tool_call_id": call_id}


def as_records(messages: list[Any]) -> list[Any]:
    """The same as `Message` objects."""
    return [
        Message(
            role=each["role"],
            content=each["content"],
            name=each.get("name"),
            tool_call_id=each.get("tool_call_id"),
            tool_calls=tuple(
                ToolCall(id=c.get("id", ""), **c["function"]) for c in each.get("tool_calls", ())
            ),
        )
        for each in messages
    ]


GO, STOP = {"role": "user", "content": "go"}, {"role": "user", "content": "Well?"}
A, B, C = result("a", "one"), result("b", "two"), result("c", "three")
SAID = {"role": "assistant", "content": "I see."}
#: Histories in the order of completion, and in that of the calls.
HISTORIES = {
    "three": ([GO, asks("a", "b", "c"), C, A, B], [GO, asks("a", "b", "c"), A, B, C]),
    "a user between": (
        [GO, asks("a", "b"), B, STOP, A],
        [GO, asks("a", "b"), A, STOP, B],
    ),
    "ids used again": (
        [GO, asks("a", "b"), B, A, asks("b", "a"), A, B, SAID, STOP],
        [GO, asks("a", "b"), A, B, asks("b", "a"), B, A, SAID, STOP],
    ),
    "as many as there are calls with ids": (
        [GO, asks("a", "", "b"), B, result(None, "none"), A],
        [GO, asks("a", "", "b"), A, result(None, "none"), B],
    ),
}


@pytest.mark.parametrize("form", [list, as_records])
async def test_prompt_results_stand_in_the_order_of_their_calls(form: Any) -> None:
    prompts = [form(messages) for history in HISTORIES.values() for messages in history]
    trajectories = await all_tried(generate_once, prompts)
    for one, other in zip(trajectories[::2], trajectories[1::2], strict=True):
        assert one.outcome is other.outcome is Outcome.COMPLETED
        length = other.transcript.spans[0].stop
        assert one.transcript.ids()[:length].tolist() == other.transcript.ids()[:length].tolist()
        assert list(one.messages[:-1]) == list(other.messages[:-1])


async def test_prompt_results_without_calls_stay_as_given() -> None:
    prompts = [
        [GO, asks("", ""), result(None, "two"), result(None, "one")],  # by their names, as given
        [GO, SAID, result("b", "two"), result("a", "one")],  # calls that stand in a text
        [GO, asks("a", "b"), STOP],
        [GO, asks("a", "b")],
        [B, STOP],  # the rest of a history that was cut
    ]
    for messages, trajectory in zip(prompts, await all_tried(generate_once, prompts), strict=True):
        assert trajectory.outcome is Outcome.COMPLETED
        assert [m.content for m in trajectory.messages[:-1]] == [m["content"] for m in messages]


#: Results of a turn that asks for a and b, and what is said of them.
REFUSED = {
    "of no call": ([A, result("c", "three")], "messages[3]: a result of the call 'c'"),
    "doubled": ([A, B, A], "messages[4]: a second result of the call 'a'"),
    "missing": ([B], "messages[1]: no result of the call 'a'"),
    "without an id": ([B, result(None, "one")], "messages[1]: no result of the call 'a'"),
    "given later": ([A, SAID, B], "messages[1]: no result of the call 'b'"),
}


async def test_prompt_results_that_are_missing_or_doubled_are_refused() -> None:
    prompts = [[GO, asks("a", "b"), *results] for results, _ in REFUSED.values()]
    prompts.append([GO, asks("a", "b", "a"), A, B, A])
    reasons = [
        *(why for _, why in REFUSED.values()),
        "messages[1]: two of its calls have the id 'a'",
    ]
    for why, trajectory in zip(reasons, await all_tried(generate_once, prompts), strict=True):
        assert (trajectory.outcome, trajectory.reason) == (Outcome.REJECTED, "bad_message")
        assert trajectory.cause is not None
        assert trajectory.cause.message.startswith(why)


Doing = Callable[[AgentContext, list[Any]], Any]


async def observe(context: AgentContext, results: list[Any]) -> None:
    context.observe(results)


async def answer(context: AgentContext, results: list[Any]) -> None:
    await context.answer(results)


async def answer_in_branch(context: AgentContext, results: list[Any]) -> None:
    context.observe([STOP])
    await context.generate()
    end = context.transcript.spans[1].stop
    branch = await context.branch(end)
    branch.observe(results)
    await branch.generate()
    other = await context.branch(end, messages=results)
    await other.generate()


DOINGS = {each.__name__: each for each in (observe, answer, answer_in_branch)}


def own(*numbers: int) -> list[dict[str, Any]]:
    """Results of the model's own calls, by their numbers."""
    return [result(f"call_{number}", f"result {number}") for number in numbers]


async def observed(doing: Doing, results: list[Any]) -> Trajectory:
    async def trial(context: AgentContext) -> None:
        turn = await context.generate()
        assert [each.id for each in turn.calls] == ["call_0", "call_1"]  # type: ignore[union-attr]
        await doing(context, results)
        await context.generate()

    return await tried(trial)


@pytest.mark.parametrize("doing", DOINGS)
async def test_observed_results_stand_in_the_order_of_the_calls(doing: str) -> None:
    one = await observed(DOINGS[doing], own(1, 0))
    other = await observed(DOINGS[doing], own(0, 1))
    assert (one.outcome, one.cause) == (other.outcome, other.cause) == (Outcome.COMPLETED, None)
    for each, same in zip(one.segments, other.segments, strict=True):
        assert each.transcript.ids().tolist() == same.transcript.ids().tolist()
        assert list(each.messages) == list(same.messages)


@pytest.mark.parametrize(
    ("results", "why"),
    [
        (own(0, 1, 0), "messages[2]: a second result of the call 'call_0'"),
        (own(0, 2), "messages[1]: a result of the call 'call_2', which the turn before them has"),
        (own(1), "the turn before them: no result of the call 'call_0'"),
    ],
)
async def test_observed_results_that_are_missing_or_doubled_are_refused(
    results: list[Any], why: str
) -> None:
    trajectory = await observed(observe, results)
    assert trajectory.outcome is Outcome.FAILED
    assert trajectory.cause is not None
    assert trajectory.cause.type == "TemplateError"
    assert trajectory.cause.message.startswith(why)


async def test_observed_results_are_refused_once_their_calls_are_answered() -> None:
    async def trial(context: AgentContext) -> None:
        turn = await context.generate()
        await context.call_tools(turn.calls[:1])
        with pytest.raises(rollout.TemplateError, match="a second result of the call 'call_0'"):
            context.observe(own(0, 1))
        context.observe(own(1))  # the agent has that one answered itself
        with pytest.raises(rollout.TemplateError, match="a second result of the call 'call_1'"):
            context.observe(own(1))
        context.observe([result(None, "without an id"), STOP])
        await context.generate()

    trajectory = await tried(trial)
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert [m.role for m in trajectory.messages].count("tool") == 3


async def test_called_tools_answer_in_the_order_of_the_turn() -> None:
    def running(step: int) -> Any:
        async def trial(context: AgentContext) -> None:
            turn = await context.generate()
            results = await context.call_tools(turn.calls[::step])
            assert [each.text for each in results] == ["3", "7"][::step]
            await context.generate()

        return trial

    one, other = await tried(running(-1)), await tried(running(1))
    assert one.transcript.ids().tolist() == other.transcript.ids().tolist()


async def test_rendered_history_of_results_that_are_left_out_is_not_refused() -> None:
    """The agent runs one of two calls; its own history is no message of somebody else's."""

    async def trial(context: AgentContext) -> None:
        turn = await context.generate()
        await context.call_tools(turn.calls[:1])
        await context.generate()
        context.observe([STOP])
        await context.generate()

    for history in ("append_only", "inference_template"):
        trajectory = await tried(trial, history=history, tokenization_check="strict")
        assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)


async def open_segment(context: AgentContext, messages: list[Any]) -> None:
    async with context.open_segment(messages) as segment:
        await segment.generate()


async def compact(context: AgentContext, messages: list[Any]) -> None:
    await context.compact(messages)


async def subagent(context: AgentContext, messages: list[Any]) -> None:
    await (await context.subagent(messages)).generate()


SEGMENTS = {each.__name__: each for each in (open_segment, compact, subagent)}


@pytest.mark.parametrize("doing", SEGMENTS)
async def test_segment_results_stand_in_the_order_of_their_calls(doing: str) -> None:
    async def trial(context: AgentContext) -> None:
        await context.generate()
        for history in HISTORIES.values():
            for messages in history:
                await SEGMENTS[doing](context, messages)

    trajectory = await tried(trial)
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    rows = [
        each.transcript.prefix.slice(0, each.transcript.spans[0].stop)
        for each in trajectory.segments
    ]
    assert len(rows) == 1 + 2 * len(HISTORIES)
    assert rows[1::2] == rows[2::2]


async def test_prompt_that_ends_with_calls_is_answered_in_their_order() -> None:
    def answering(*results: Any) -> Any:
        async def trial(context: AgentContext) -> None:
            await context.begin()
            context.observe(list(results))
            await context.generate()

        return trial

    prompt = [GO, asks("a", "b")]
    one, other = await tried(answering(B, A), prompt), await tried(answering(A, B), prompt)
    assert one.outcome is Outcome.COMPLETED
    assert one.transcript.ids().tolist() == other.transcript.ids().tolist()
    refused = await tried(answering(A), prompt)
    assert refused.cause is not None
    assert "no result of the call 'b'" in refused.cause.message
