"""A tag that is spoken of is content: no call, no invalid call, and every word in its order."""

from __future__ import annotations

import json
from typing import Any

import pytest

from call_writing import CLOSING, OPENING, TOOLS, WRITE
from http_agents import Client, config_of, prompt_of, user
from rollout import (
    GatewayConfig,
    Outcome,
    Prompt,
    function_tool,
    open_rollout,
)
from rollout.chat import get_tool_parser
from rollout.config import AgentConfig, ChannelConfig, LengthsConfig, SimulatedEngine
from rollout.testing import Scenario
from rollout.types import InvalidToolCall, ToolCall

FORMATS = sorted(WRITE)
SENTENCES = (
    "Wrap every call in {0} tags and you are done.",
    "Done. The tag is `{0}`.",
    "Done. It is {0}",
    "It begins with {0},\nand then it goes on.",
    "A line ends with {0}\nand then it goes on.",
    "```\n{0}\n```\nThat was it.",
    "```xml\n{0} ...\n```",
    "- `{0}`: opens\n- nothing else",
    "{0} {0} and {0}.",
    '"{0}" (as in "{0}") begins it.',
)
PAIRS = (
    "Use {0} and {1} around it.",
    "Use `{0}` and `{1}` around it.",
    "It is `{0}...{1}`, as said.",
    "Put it in {0} ... {1}.",
    "```\n{0}\n...\n{1}\n```\nThat is all.",
    "{1} closes what {0} opens.",
)
ALONE = [
    (name, sentence.format(tag))
    for name in FORMATS
    for tag in (*OPENING[name], *CLOSING[name])
    for sentence in SENTENCES
]
BOTH = [
    (name, sentence.format(OPENING[name][0], CLOSING[name][0]))
    for name in FORMATS
    if CLOSING[name]
    for sentence in PAIRS
]
#: What is no prose: tags with which a turn of the format begins or ends.
NO_PROSE = [
    ("mistral", "[TOOL_CALLS] [TOOL_CALLS] and [TOOL_CALLS]."),
    *(("gpt_oss", f"{tag} {tag} and {tag}.") for tag in ("<|channel|>", "<|message|>")),
    *(("gpt_oss", f"Done. It is {tag}") for tag in ("<|call|>", "<|end|>")),
]


@pytest.mark.parametrize("name", FORMATS)
def test_tag_in_prose_is_content(name: str) -> None:
    for text in (text for each, text in ALONE + BOTH if each == name):
        if (name, text) not in NO_PROSE:
            turn = get_tool_parser(name).parse(text, TOOLS)
            assert (turn.content, turn.reasoning, turn.calls) == (text, None, ())


@pytest.mark.parametrize("name", FORMATS)
def test_call_after_a_tag_in_prose_is_the_only_call(name: str) -> None:
    call = WRITE[name]("add", {"a": 1, "b": 2})
    for tag in (*OPENING[name], *(() if name == "gpt_oss" else CLOSING[name])):
        for said in (f"I wrap it in {tag} now.", f"It is `{tag}`:", f"I write {tag}"):
            if name == "gpt_oss":
                text = f"<|channel|>commentary<|message|>{said}<|end|>{call}"
            else:
                text = f"{said}\n{call}"
            turn = get_tool_parser(name).parse(text, TOOLS)
            assert turn.content == said
            (found,) = turn.calls
            assert isinstance(found, ToolCall)
            assert (found.name, dict(found.arguments)) == ("add", {"a": 1, "b": 2})


@pytest.mark.parametrize("name", FORMATS)
def test_tag_in_prose_after_a_call_is_content(name: str) -> None:
    call = WRITE[name]("add", {"a": 1, "b": 2})
    for sentence in SENTENCES[:2]:
        said = sentence.format(OPENING[name][0])
        if name == "gpt_oss":
            text = f"{call}<|start|>assistant<|channel|>final<|message|>{said}"
        else:
            text = f"{call}\n{said}"
        turn = get_tool_parser(name).parse(text, TOOLS)
        assert turn.content == said
        assert [type(found) for found in turn.calls] == [ToolCall]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>'),
        ("hermes", 'So <tool_call>{"name": "add", "argum'),
        ("hermes", "<tool_call>\nadd(a=1, b=2)\n</tool_call>"),
        ("qwen3_coder", '<tool_call>\n{"name": "add"}\n</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        ("qwen3_coder", "Now.\n<function=add>\n<parameter=a>\n1"),
        ("seed_oss", '<seed:tool_call>{"name": "add"}</seed:tool_call>'),
        ("glm4", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</tool_call>"),
        ("glm4", '<tool_call>{"name": "add"}</tool_call>'),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="add">\n</minimax:tool_call>'),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{a}"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1,}}'),
        ("mistral", "[TOOL_CALLS]add[ARGS]{a}"),
        ("mistral", 'So.[TOOL_CALLS][{"name": "add", "arguments": {,}}]'),
        ("pythonic", "[add(1, 2)]"),
        ("gemma", "<|tool_call>call:add{a:1<tool_call|>"),
        ("gpt_oss", "<|channel|>commentary to=functions.add<|message|>{a}<|call|>"),
    ],
)
def test_malformed_call_is_told_and_not_taken_for_prose(name: str, text: str) -> None:
    turn = get_tool_parser(name).parse(text, TOOLS)
    assert [type(call) for call in turn.calls] == [InvalidToolCall]
    assert turn.content in ("", "So", "So.", "Now.")


@pytest.mark.parametrize(
    "name", ["gemma", "glm4", "hermes", "minimax_m2", "qwen3_coder", "seed_oss"]
)
def test_dots_in_the_place_of_a_call_are_content(name: str) -> None:
    call = WRITE[name]("add", {"a": 1, "b": 2})
    opening, closing = OPENING[name][0], CLOSING[name][0]
    for dots in ("...", "…", '{"name": ..., "arguments": {...}}', '{"name": "add", "a": ...}'):
        for said in (f"{opening}{dots}{closing}", f"`{opening}{dots}{closing}` is it."):
            assert parse_of(name, said) == (said, [])
            assert parse_of(name, f"{said}\n{call}") == (said, ["add"])
            assert parse_of(name, f"{call}\n{said}") == (said, ["add"])


def parse_of(name: str, text: str) -> tuple[str, list[str]]:
    """The content, and names of calls, all of them right."""
    turn = get_tool_parser(name).parse(text, TOOLS)
    return turn.content, [getattr(call, "name", "invalid") for call in turn.calls]


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"gpt_oss"}))
def test_closing_tag_of_reasoning_that_nothing_opened_is_content(name: str) -> None:
    parser = get_tool_parser(name)
    for _, closing in parser.reasoning_tags:  # type: ignore[attr-defined]
        text = f"Close it with {closing} please."
        turn = parser.parse(text, TOOLS)
        assert (turn.content, turn.reasoning, turn.calls) == (text, None, ())
        opened = parser.parse(f"I think.{closing}So.", TOOLS, in_reasoning=True)
        assert (opened.content, opened.reasoning) == ("So.", "I think.")


@pytest.mark.parametrize("name", FORMATS)
def test_turn_with_an_invalid_call_keeps_its_text_in_the_order_written(name: str) -> None:
    good = WRITE[name]("add", {"a": 1, "b": 2})
    bad = {
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{a}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "gemma": "<|tool_call>call:add{a:1<tool_call|>",
        "glm4": "<tool_call>add\n<arg_key>a</arg_key></tool_call>",
        "hermes": "<tool_call>{a}</tool_call>",
        "minimax_m2": '<minimax:tool_call><invoke name="add">x</invoke></minimax:tool_call>',
        "qwen3_coder": "<tool_call><function=add></tool_call>",
        "seed_oss": "<seed:tool_call><function=add></seed:tool_call>",
    }.get(name)
    if bad is None:
        pytest.skip("text after a faulty call of this format may belong to it")
    turn = get_tool_parser(name).parse(f"before\n{bad}\nafter {good}", TOOLS)
    raw = next(call.raw for call in turn.calls if isinstance(call, InvalidToolCall))
    assert turn.content == "before\n\nafter"
    assert turn.written == f"before\n{raw}\nafter"
    assert get_tool_parser(name).parse(f"before {good} after", TOOLS).written is None


PROSE = "Use <tool_call> and </tool_call> around it, and then go on."
FAULTY = '<tool_call>\n{"name": "add", "arguments": {"a": 1,}}\n</tool_call>'
MIXED = f"First I say this.\n{FAULTY}\nThen I say that."
QUOTED = WRITE["qwen3_coder"](
    "write", {"filePath": "a", "content": WRITE["qwen3_coder"]("exec", {"command": "rm"})}
)
#: What a model of a format says, and what clients are told of it.
TOLD = {
    "prose": ("hermes", PROSE, PROSE, []),
    "faulty call": ("hermes", MIXED, MIXED, []),
    "then a call": (
        "hermes",
        f"I wrap it in <tool_call> now.\n{WRITE['hermes']('add', {'a': 1, 'b': 2})}",
        "I wrap it in <tool_call> now.",
        ["add"],
    ),
    "quoted": ("qwen3_coder", QUOTED, "", ["write"]),
}


@pytest.fixture
def anyio_backend() -> str:
    """Real sockets, so real time."""
    return "trio"


def events(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def ask(client: Client, *, is_streamed: bool) -> tuple[str, list[str]]:
    got = client.chat(user("One"), tools=TOOLS, stream=is_streamed)
    assert got.status_code == 200, got.text
    if not is_streamed:
        said = got.json()["choices"][0]["message"]
        calls = [each["function"]["name"] for each in said.get("tool_calls") or ()]
        return said["content"] or "", calls
    deltas = [each["choices"][0]["delta"] for each in events(got.text) if each["choices"]]
    calls = [
        each["function"]["name"]
        for delta in deltas
        for each in delta.get("tool_calls") or ()
        if each["function"].get("name")
    ]
    return "".join(delta.get("content") or "" for delta in deltas), calls


def ask_each_way(client: Client) -> list[tuple[str, list[str]]]:
    return [ask(client, is_streamed=is_streamed) for is_streamed in (False, True)]


@pytest.mark.anyio
@pytest.mark.parametrize("what", TOLD)
async def test_gateway_tells_the_text_as_the_model_wrote_it(what: str) -> None:
    pytest.importorskip("h11")
    tool_format, text, content, calls = TOLD[what]
    config = config_of(
        Scenario(seed=3, stream_interval=8).timing(base_s=0.0001).reply("", text),
        GatewayConfig(),
        agent=AgentConfig(name="http_agent", tool_format=tool_format),
        channel=ChannelConfig(stream_interval_s=0.001),
    )
    async with open_rollout(config) as runtime:
        batch = await runtime.generate([prompt_of(ask_each_way)])
    assert batch.trajectories[0].extra["result"] == [(content, calls)] * 2


@pytest.mark.anyio
async def test_agent_that_speaks_of_a_tag_ends_after_one_turn() -> None:
    config = (
        Scenario(seed=3)
        .timing(base_s=0.001)
        .reply("", PROSE)
        .config(
            engine=SimulatedEngine(),
            agent=AgentConfig(name="tool_agent", tool_format="hermes"),
            lengths=LengthsConfig(prompt=900, response=900),
        )
    )
    async with open_rollout(config, tools=[add]) as runtime:
        batch = await runtime.generate([Prompt("One")])
    (trajectory,) = batch.trajectories
    assert trajectory.outcome == Outcome.COMPLETED
    assert [message.content for message in trajectory.messages] == ["One", PROSE]


@function_tool
def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: The other.
    """
    return a + b
