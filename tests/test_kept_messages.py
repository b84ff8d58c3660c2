"""Messages that are made again from their tokens are those that there were, byte for byte."""

from __future__ import annotations

import copy
import gc
import pickle  # noqa: TID251  (callers send trajectories to other processes)
from array import array
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rollout
from chat_material import FAMILIES, HOSTILE, VOCABULARIES, chat
from parser_cases import CASES, TOOLS
from rollout import AgentLoop, Prompt, function_tool, register_agent
from rollout.agents.kept_messages import KeptMessages, TurnReader, find_texts
from rollout.chat import get_tool_parser, tool_parser_names
from rollout.config import AgentConfig
from rollout.errors import TemplateError
from rollout.testing import Scenario, run_virtual, tool_call
from rollout.token_prefix import TokenPrefix
from rollout.types import Message, ToolCall
from slow_cases import slow_but

if TYPE_CHECKING:
    from rollout import AgentContext, Trajectory

SETTINGS = settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=15)
CONTENTS = st.one_of(HOSTILE, st.sampled_from(["", " ", "\n", "im_end", "tool", "{}"]))


def reader_of(vocabulary: str, family: str, tool_format: str = "hermes") -> TurnReader:
    return TurnReader(chat(vocabulary, family), get_tool_parser(tool_format), TOOLS)


@pytest.mark.parametrize("vocabulary", slow_but(VOCABULARIES, "smollm2", "tekken"))
@pytest.mark.parametrize("family", slow_but(FAMILIES, "llama3", "qwen3"))
@SETTINGS
@given(data=st.data())
def test_messages_told_are_read_again_as_they_were(
    vocabulary: str, family: str, data: st.DataObject
) -> None:
    reader = reader_of(vocabulary, family)
    template = reader.template
    results = data.draw(st.lists(CONTENTS, min_size=1, max_size=3))
    extra: dict[str, Any] = data.draw(st.sampled_from([{}, {"k": 1}]))
    told = [
        Message(
            role="tool", content=each, name="weather", tool_call_id=f"call0000{at}", extra=extra
        )
        for at, each in enumerate(results)
    ]
    after = template.end_ids() if data.draw(st.booleans()) else None
    try:
        ids = template.observation_ids(told, after=after)
    except TemplateError:
        return
    text = template.decode(ids)
    messages, tokens = KeptMessages(reader), TokenPrefix()
    tokens.extend(array("i", [1, 2, 3]))
    tokens.extend(ids)
    messages.hear(told, tokens, 3, find_texts(told, text))
    assert messages == told


@pytest.mark.parametrize("vocabulary", slow_but(VOCABULARIES, "smollm2", "tekken"))
@pytest.mark.parametrize("tool_format", slow_but(tool_parser_names(), "hermes", "gpt_oss"))
@SETTINGS
@given(data=st.data())
def test_messages_said_are_read_again_as_they_were(
    vocabulary: str, tool_format: str, data: st.DataObject
) -> None:
    reader = reader_of(vocabulary, "chatml", tool_format)
    known = [case.text for case in CASES.get(tool_format, ())]
    text = data.draw(st.one_of(HOSTILE, st.sampled_from(known)) if known else HOSTILE)
    in_reasoning, cut_by = data.draw(st.booleans()), data.draw(st.sampled_from([None, "abort"]))
    ids = array("i", reader.template.text_ids(text))
    turn = reader.turn(ids, cut_by, in_reasoning=in_reasoning)
    messages, tokens = KeptMessages(reader), TokenPrefix()
    tokens.extend(ids)
    messages.say(turn, tokens, 0, in_reasoning=in_reasoning)
    at_once, first = messages.turn(0), messages[0]
    messages.settle()
    assert at_once is turn
    assert messages[0] == first
    again = messages.turn(0)
    assert (again.text, again.content, again.reasoning, again.calls) == (
        (turn.text, turn.content, turn.reasoning, turn.calls)
    )


# --- through a runtime

LONG_TEXT = "".join(f"line {number} of what the tool found\n" for number in range(40))
SCENARIO = (
    Scenario(seed=3)
    .reply("go", "Let me look. " + tool_call("look", what="it"), filler=40)
    .then("<think>Hm.</think>Once more: " + tool_call("look", what="äöü 漢字"))
    .then("It is there, at last, and nobody had thought of looking for it.")
)


@function_tool
async def look(what: str) -> str:
    """Look.

    Args:
        what: For what.
    """
    return LONG_TEXT + what


SEEN: list[list[Message]] = []


@register_agent("keeps_what_it_sees")
class KeepsWhatItSees(AgentLoop):
    """Calls tools, and keeps what was said as it was said."""

    async def run(self, context: AgentContext) -> None:
        await context.begin()
        own = list(context.prompt.messages)
        for _ in range(3):
            turn = await context.generate()
            calls = tuple(call for call in turn.calls if isinstance(call, ToolCall))
            own.append(Message(role="assistant", content=turn.content, tool_calls=calls))
            if not calls:
                break
            for call, result in zip(calls, await context.call_tools(calls), strict=True):
                name, call_id = call.name, call.id or None
                own.append(
                    Message(role="tool", content=result.text, name=name, tool_call_id=call_id)
                )
        SEEN.append(copy.deepcopy(own))


def run(agent: str = "tool_agent", **options: Any) -> Trajectory:
    agents = AgentConfig(name=agent, **options)

    async def act() -> Trajectory:
        async with rollout.open_rollout(SCENARIO.config(agent=agents), [look]) as runtime:
            batch = await runtime.generate([Prompt(messages=[Message(role="user", content="go")])])
            return batch.trajectories[0]

    return run_virtual(act)


def held_by(*roots: object) -> list[object]:
    """All that is reachable, but for what reads the tokens and what is shared by all."""
    found: dict[int, object] = {}
    waiting = list(roots)
    while waiting:
        each = waiting.pop()
        if id(each) not in found and not isinstance(each, type | TurnReader | Prompt):
            found[id(each)] = each
            waiting += gc.get_referents(each)
    return list(found.values())


@pytest.mark.parametrize("history", ["append_only", "inference_template"])
def test_trajectory_messages_are_those_that_its_agent_saw(history: str) -> None:
    SEEN.clear()
    trajectory = run("keeps_what_it_sees", history=history)
    (seen,) = SEEN
    assert trajectory.messages == seen
    assert [m.role for m in seen] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert trajectory.answer == seen[-1].content
    assert trajectory.messages[-2:] == seen[-2:]
    assert seen[3].tool_calls == trajectory.messages[3].tool_calls
    assert all(segment.messages == seen for segment in trajectory.segments)


@pytest.mark.parametrize("history", ["append_only", "inference_template"])
def test_trajectory_finished_holds_no_text_that_its_tokens_spell(history: str) -> None:
    trajectory = run(history=history)
    assert str(trajectory.messages[2].content).startswith(LONG_TEXT)
    texts = [each for each in held_by(trajectory) if isinstance(each, str) and len(each) > 40]
    assert texts == []
    assert not [each for each in held_by(trajectory) if isinstance(each, ToolCall)]


def test_trajectory_messages_leave_as_a_list() -> None:
    messages = run().messages
    for other in (pickle.loads(pickle.dumps(messages)), copy.deepcopy(messages)):
        assert type(other) is list
        assert other == messages
    assert [*messages[:1], *messages[1:]] == messages + messages[:0]
    assert messages[:1] + messages == [messages[0], *messages]
    assert messages != messages[:-1]
    assert repr(messages) == repr(list(messages))


def test_context_messages_read_once_are_not_parsed_again() -> None:
    parsed: list[str] = []

    class Counting:
        def parse(self, text: str, tools: Any = None, *, in_reasoning: bool = False) -> Any:
            parsed.append(text)
            return get_tool_parser("hermes").parse(text, tools, in_reasoning=in_reasoning)

    reader = TurnReader(chat("qwen", "chatml"), Counting(), TOOLS)
    messages, tokens = KeptMessages(reader), TokenPrefix()
    for number in range(4):
        ids, start = array("i", reader.template.text_ids(f"turn {number}")), len(tokens)
        turn = reader.turn(ids, None, in_reasoning=False)
        tokens.extend(ids)
        messages.say(turn, tokens, start, in_reasoning=False)
        assert [m.content for m in messages] == [f"turn {each}" for each in range(number + 1)]
    assert len(parsed) == 4
    messages.settle()
    assert messages[3].content == "turn 3"
    assert len(parsed) == 5
