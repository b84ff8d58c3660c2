"""A tag that is spoken of is content: no call, no invalid call, and every word in its order."""

from __future__ import annotations

import pytest

from call_writing import CLOSING, OPENING, TOOLS, WRITE
from rollout.chat import get_tool_parser
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


@pytest.mark.parametrize(("name", "text"), [each for each in ALONE + BOTH if each not in NO_PROSE])
def test_tag_in_prose_is_content(name: str, text: str) -> None:
    turn = get_tool_parser(name).parse(text, TOOLS)
    assert (turn.content, turn.reasoning, turn.calls) == (text, None, ())


@pytest.mark.parametrize("text", [text for name, text in ALONE + BOTH if name == "gpt_oss"])
def test_token_in_a_final_message_is_content(text: str) -> None:
    parser = get_tool_parser("gpt_oss")
    turn = parser.parse(f"<|channel|>final<|message|>{text} So.<|return|>", TOOLS)
    assert (turn.content, turn.reasoning, turn.calls) == (f"{text} So.", None, ())


@pytest.mark.parametrize("name", FORMATS)
def test_call_after_a_tag_in_prose_is_the_only_call(name: str) -> None:
    call = WRITE[name]("add", {"a": 1, "b": 2})
    for tag in (*OPENING[name], *(() if name == "gpt_oss" else CLOSING[name])):
        for said in (f"I wrap it in {tag} now.", f"It is `{tag}`:", f"I write {tag}"):
            if name == "gpt_oss":
                call = WRITE[name]("add", {"a": 1, "b": 2})
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
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{a}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
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
