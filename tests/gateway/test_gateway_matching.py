"""Which of a client's messages are which turns, however it writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway_clients import ADD, LOOK, ask, asked, echo, result, system, tried, user
from rollout import AgentContext, Outcome
from rollout.config import LengthsConfig
from rollout.gateway.calls import ClientCall, ClientMessage
from rollout.gateway.message_keys import canonicalize, hash_reasoning, hash_turn
from rollout.gateway.session import GatewaySession
from rollout.gateway.turn_index import Turn, TurnIndex
from rollout.testing import Scenario, run_virtual, tool_call

Messages = list[ClientMessage]
replace = msgspec.structs.replace

BOTH = (
    "<think>Two sums.</think>\n\nI add.\n"
    + tool_call("add", a=2, b=3, note="né", ratio=1.0, more={"y": [1, 2], "x": None})
    + "\n"
    + tool_call("add", a=4, b=5)
)
SCENARIO = Scenario(seed=1).reply("Add all", BOTH).then("They are 5 and 9.").then("Welcome.")


def the(
    at: int, change: Callable[[ClientMessage], ClientMessage]
) -> Callable[[Messages], Messages]:
    """Changes the message at one place; the conversation's turns are at 2 and 5."""
    return lambda messages: [*messages[:at], change(messages[at]), *messages[at + 1 :]]


def parsed_again(write: Callable[[Any], str]) -> Callable[[ClientMessage], ClientMessage]:
    """Arguments as a client that writes JSON so sends them."""
    return lambda message: replace(
        message,
        calls=tuple(
            replace(call, arguments=json.loads(write(call.arguments))) for call in message.calls
        ),
    )


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(list(value))}
    return value


def with_call(at: int, **fields: Any) -> Callable[[ClientMessage], ClientMessage]:
    def change(message: ClientMessage) -> ClientMessage:
        calls = list(message.calls)
        calls[at] = replace(calls[at], **fields)
        return replace(message, calls=tuple(calls))

    return change


def renamed(messages: Messages) -> Messages:
    """All ids are the client's own."""
    names = {call.id: f"own-{at}" for at, call in enumerate(messages[2].calls)}
    calls = tuple(replace(call, id=names[call.id]) for call in messages[2].calls)
    changed = [replace(each, ids=()) for each in messages]
    changed[2] = replace(changed[2], calls=calls)
    return [replace(each, call_id=names.get(each.call_id, "")) for each in changed]


def without_ids(messages: Messages) -> Messages:
    calls = tuple(replace(call, id="") for call in messages[2].calls)
    changed = [replace(each, ids=(), call_id="") for each in messages]
    changed[2] = replace(changed[2], calls=calls)
    return changed


def swapped(messages: Messages) -> Messages:
    return [*messages[:3], messages[4], messages[3], *messages[5:]]


def swapped_ids(messages: Messages) -> Messages:
    """Each result is said to be the other call's."""
    one, two = messages[3], messages[4]
    changed = [replace(one, call_id=two.call_id), replace(two, call_id=one.call_id)]
    return [*messages[:3], *changed, *messages[5:]]


EXTEND: dict[str, Callable[[Messages], Messages]] = {
    "nothing": lambda messages: messages,
    "argument spacing": the(2, parsed_again(lambda value: json.dumps(value, indent=4))),
    "key order": the(2, parsed_again(lambda value: json.dumps(reordered(value)))),
    "numbers as JavaScript writes them": the(
        2, parsed_again(lambda value: json.dumps(value).replace("1.0", "1"))
    ),
    "dropped reasoning": the(2, lambda message: replace(message, reasoning=None)),
    "right-trimmed reasoning": the(2, lambda m: replace(m, reasoning=f"{m.reasoning}\n")),
    "white space around text": the(5, lambda message: replace(message, text=f"\n{message.text} ")),
    "renamed ids": renamed,
    "no ids": without_ids,
    "reordered results": swapped,
}
FORK: dict[str, Callable[[Messages], Messages]] = {
    "text left out": the(2, lambda message: replace(message, text="")),
    "an edited turn": the(5, lambda message: replace(message, text="They are 5 and 10.")),
    "an edited call": the(2, with_call(1, arguments={"a": 4, "b": 6})),
    "a string for a number": the(2, with_call(1, arguments={"a": "4", "b": 5})),
    "a call and its result left out": lambda messages: [
        *the(2, lambda message: replace(message, calls=message.calls[:1]))(messages)[:4],
        *messages[5:],
    ],
    "calls in another order": the(2, lambda m: replace(m, calls=m.calls[::-1])),
    "other reasoning": the(2, lambda message: replace(message, reasoning="Hm.")),
    "a deleted exchange": lambda messages: [*messages[:2], *messages[6:]],
    "an edited result": the(4, lambda message: replace(message, text="10")),
    "results of each other's calls": swapped_ids,
    "another system prompt": the(0, lambda message: replace(message, text="Be long.")),
    "a message between": lambda messages: [*messages[:5], user("Quick!"), *messages[5:]],
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", [*EXTEND, *FORK])
async def test_mutation_extends_or_forks(name: str) -> None:
    change = {**EXTEND, **FORK}[name]

    async def trial(session: GatewaySession, context: AgentContext) -> None:
        told = [system("Be brief."), user("Add all")]
        first = (await ask(session, *told, tools=(ADD,))).answers[0]
        ids = [call.id for call in echo(first).calls]
        told += [echo(first), result("5", ids[0]), result("9", ids[1])]
        second = (await ask(session, *told, tools=(ADD,))).answers[0]
        told += [echo(second), user("Thanks")]
        await ask(session, *change(told), tools=(ADD,))

    found = await tried(trial, SCENARIO)
    assert len(found.purposes) == (1 if name in EXTEND else 2)
    sampled = [
        record.generation.ids
        for call in found.recorder.runtimes[0].calls
        for record in call.all_generations()
    ]
    assert found.trained() == sum(map(len, sampled))


@pytest.mark.anyio
@pytest.mark.parametrize("tools", [(LOOK,), (LOOK, ADD)])
async def test_other_tools_fork_and_their_order_does_not(tools: Any) -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        first = (await ask(session, user("Add all"), tools=(ADD, LOOK))).answers[0]
        await ask(session, user("Add all"), echo(first), user("More"), tools=tools)

    found = await tried(trial, SCENARIO)
    assert len(found.purposes) == (1 if len(tools) == 2 else 2)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


def as_javascript(value: Any) -> Any:
    """The value after a client whose only numbers are doubles."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        if isinstance(value, dict):
            return {key: as_javascript(each) for key, each in reversed(value.items())}
        return [as_javascript(each) for each in value] if isinstance(value, list) else value
    double = float(value)
    return int(double) if double.is_integer() and abs(double) < 2**53 else double


@example(2**53)
@example(2**53 + 1)
@example(float(2**53))
@given(JSON)
def test_values_are_equal_after_any_client(value: Any) -> None:
    sent = json.loads(json.dumps(as_javascript(value)))
    key = hash_turn("", [("f", {"v": value})])
    assert key == hash_turn("", [("f", {"v": sent})])
    assert key == hash_turn("", [("f", MappingProxyType({"v": value}))])


@given(JSON, JSON)
def test_values_that_differ_are_not_taken_for_each_other(one: Any, two: Any) -> None:
    is_same = typed(canonicalize(one)) == typed(canonicalize(two))
    assert (hash_turn("", [("f", [one])]) == hash_turn("", [("f", [two])])) == is_same


def typed(value: Any) -> Any:
    """Python takes True for 1."""
    if isinstance(value, dict):
        return {key: typed(each) for key, each in value.items()}
    return [typed(each) for each in value] if isinstance(value, list) else (type(value), value)


ALONE = Scenario(seed=1).reply("Add", tool_call("add", a=2, b=3)).then("It is 5.")


@pytest.mark.anyio
@pytest.mark.parametrize("text", ["", "\n"])
async def test_turn_of_calls_alone_comes_back_with_null_or_empty_content(text: str) -> None:
    async def trial(session: GatewaySession, context: AgentContext) -> None:
        (first,) = (await ask(session, user("Add"), tools=(ADD,))).answers
        again = replace(echo(first), text=text)
        told = [user("Add"), again, result("5", first.calls[0].id)]  # type: ignore[union-attr]
        await ask(session, *told, tools=(ADD,))

    assert (await tried(trial, ALONE)).purposes == ["main"]


#: Few texts and calls, so that different turns often say the same.
TEXTS = st.sampled_from(["", "a", "b", " a"])
GIVEN = st.builds(ClientMessage, role=st.sampled_from(["user", "system"]), text=TEXTS)
CALLS = st.lists(
    st.builds(ClientCall, st.sampled_from(["f", "g"]), st.sampled_from([{}, {"x": 1}, {"x": 1.0}])),
    max_size=2,
).map(tuple)
SAID = st.builds(
    ClientMessage,
    role=st.just("assistant"),
    text=TEXTS,
    reasoning=st.sampled_from([None, "", "r"]),
    calls=CALLS,
)
ASKED = st.lists(st.one_of(GIVEN, SAID), min_size=1, max_size=6)


def form(message: ClientMessage) -> Any:
    """What a message says, by other means than the code that is checked."""
    calls = [(call.name, json.dumps(call.arguments).replace("1.0", "1")) for call in message.calls]
    text = message.text.strip() if message.role == "assistant" else message.text
    return message.role, text, calls


def is_same(stored: tuple[str, ClientMessage], asked: ClientMessage, policy: str) -> bool:
    kind, message = stored
    if form(message) != form(asked):
        return False
    if kind == "given" or asked.reasoning:
        return (message.reasoning or "") == (asked.reasoning or "")
    return not (message.reasoning and policy == "fork")


@given(
    st.lists(st.tuples(ASKED, SAID), max_size=12), st.sampled_from(["accept", "fork"]), st.data()
)
def test_deepest_generated_turn_is_found(
    script: list[tuple[Messages, ClientMessage]], policy: str, data: st.DataObject
) -> None:
    index = TurnIndex(is_reasoning_needed=policy == "fork")
    row: Any = SimpleNamespace(transcript=())
    turns: list[tuple[list[tuple[str, ClientMessage]], Turn]] = []
    for new, said in script:
        known = data.draw(st.sampled_from([[], *(path for path, _ in turns)]))
        messages = [*(message for _, message in known), *new]
        found = index.match(asked(*messages))
        fitting = [
            (path, turn)
            for path, turn in turns
            if len(path) <= len(messages)
            and all(is_same(a, b, policy) for a, b in zip(path, messages, strict=False))
        ]
        depth = max((len(path) for path, _ in fitting), default=0)
        assert found.depth == depth
        assert not depth or found.turn in [turn for path, turn in fitting if len(path) == depth]
        start = next((path for path, turn in fitting if turn is found.turn), [])
        content = hash_turn(said.text, [(call.name, call.arguments) for call in said.calls])
        turn = Turn(
            conversation=row, stop=0, content=content, reasoning=hash_reasoning(said.reasoning)
        )
        index.add(found, turn)
        path = [*start, *(("given", message) for message in messages[depth:]), ("said", said)]
        turns.append((path, turn))


LETTERS = "abcdefghijklmnopqrstuvwxyz"
HARMLESS = ("faithful", "stripped", "no ids", "no reasoning")
HARMFUL = ("edited", "deleted")
STEPS = st.lists(
    st.tuples(
        st.integers(0, 7),
        st.sampled_from(HARMLESS * 3 + HARMFUL),
        st.sampled_from(["once", "retried", "twice"]),
    ),
    min_size=1,
    max_size=8,
)


def echoed(message: ClientMessage, how: str) -> list[ClientMessage]:
    if how == "deleted":
        return []
    if how == "edited":
        return [replace(message, text=f"{message.text}!")]
    changes: dict[str, dict[str, Any]] = {
        "stripped": {"text": f"\n {message.text}\n"},
        "no ids": {"ids": ()},
        "no reasoning": {"reasoning": None},
    }
    return [replace(message, **changes.get(how, {}))]


@given(STEPS)
def test_rows_of_random_conversations_hold_every_token_once(steps: list[Any]) -> None:
    """Each step continues one of the turns so far, as some client would."""
    counted = [1]

    async def trial(session: GatewaySession, context: AgentContext) -> None:
        first = await ask(session, user("question"))
        turns: list[tuple[Messages, ClientMessage]] = [([user("question")], echo(first.answers[0]))]
        extended: set[int] = set()
        for number, (drawn, how, fate) in enumerate(steps):
            at = drawn % len(turns)
            before, said = turns[at]
            messages = [*before, *echoed(said, how), user(f"more {LETTERS[number]}")]
            call = asked(*messages)
            is_new = how in HARMFUL or at in extended
            completion = await session.complete(call)
            if fate == "retried":
                session.mark_lost(completion.id)
                assert await session.complete(call) == completion
            counted[0] += is_new
            if how in HARMLESS:
                extended.add(at)
            turns.append((messages, echo(completion.answers[0])))
            if fate == "twice":
                again = await ask(session, *messages)
                counted[0] += 1
                turns.append((messages, echo(again.answers[0])))

    scenario = Scenario(seed=3).reply("question", filler=12)
    lengths = LengthsConfig(prompt=1500, response=6000)
    found = run_virtual(partial(tried, trial, scenario, lengths=lengths))
    sampled = sum(
        len(record.generation.ids)
        for call in found.recorder.runtimes[0].calls
        for record in call.all_generations()
    )
    assert found.trajectory.outcome is Outcome.COMPLETED
    assert len(found.purposes) == counted[0]
    assert found.trained() == sampled
    assert found.balance.given == found.balance.transcripts
