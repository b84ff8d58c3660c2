"""A call that stands in a value of another is text: it never runs, and is no answer."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from call_writing import BARE, CLOSING, OPENING, TOOLS, WRITE, function, invoke
from rollout.chat import ParsedTurn, get_tool_parser
from rollout.types import InvalidToolCall, ToolCall

FORMATS = sorted(WRITE)
COMMAND = {"command": "rm -rf build"}
#: Contents that a bare value holds exactly.
WHOLE = ("call", "call without a block", "two calls", "call in prose", "nested")
GEMMA_TAGS = [("<|tool_call>", "<tool_call|>"), ("<start_function_call>", "<end_function_call>")]


def parse(name: str, text: str) -> ParsedTurn:
    return get_tool_parser(name).parse(text, TOOLS)


def named(turn: ParsedTurn) -> list[str]:
    return [call.name for call in turn.calls if isinstance(call, ToolCall)]


def check_write(turn: ParsedTurn, content: str, *others: str) -> None:
    """One call with the exact content, or one invalid call; then the others."""
    assert turn.content == ""
    first = turn.calls[0]
    if isinstance(first, ToolCall):
        assert first.name == "write"
        assert first.arguments == {"filePath": "a.md", "content": content}
    assert [call.name for call in turn.calls[1:] if isinstance(call, ToolCall)] == list(others)
    assert len(turn.calls) == 1 + len(others)


def quoted(name: str) -> dict[str, str]:
    """Contents that quote calls and tags of a format."""
    call = WRITE[name]("exec", COMMAND)
    bare = {"minimax_m2": invoke, "qwen3_coder": function, "seed_oss": function}.get(name)
    found = {
        "call": f"# Tools\nA call:\n{call}\nThat is all.",
        "call alone": call,
        "call without a block": f"So: {bare('exec', COMMAND) if bare else call} and more.",
        "two calls": f"{call}\n{call}",
        "call in prose": f"Write {call} to run.",
        "nested": f"A\n{WRITE[name]('write', {'filePath': 'b', 'content': call})}\nB",
        "own call": WRITE[name]("write", {"filePath": "b", "content": "c"}),
    }
    tags = (*OPENING[name], *CLOSING[name])
    for tag in tags:
        found[f"lone {tag}"] = f"The tag\n{tag}\nis a tag: {tag}."
        found[f"only {tag}"] = tag
        found[f"call and {tag}"] = f"{tag} and\n{call}\nand {tag}"
        found[f"{tag} at the end"] = f"{call} {tag}"
    found["all tags"] = " ".join(tags)
    found["all closing tags"] = "\n".join(reversed(CLOSING[name])) + "\nand on"
    found["closing tags, call"] = "\n".join(reversed(CLOSING[name])) + f"\n so\n{call}\nend"
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_write_that_quotes_a_call_is_one_call_and_a_true_one_after_it_counts(name: str) -> None:
    for what, content in quoted(name).items():
        text = WRITE[name]("write", {"filePath": "a.md", "content": content})
        alone = parse(name, text)
        check_write(alone, content)
        if name in BARE and what in WHOLE:
            assert isinstance(alone.calls[0], ToolCall), what
        turn = parse(name, f"{text}\n{WRITE[name]('add', {'a': 1, 'b': 2})}")
        # Where a call ends that quotes the beginning of one, and not its end, is not known.
        is_known = what != "all tags" or name not in BARE
        check_write(turn, content, *(["add"] if is_known or len(turn.calls) > 1 else []))


@pytest.mark.parametrize("name", FORMATS)
def test_call_before_a_write_that_quotes_one_counts(name: str) -> None:
    content = quoted(name)["call"]
    write = WRITE[name]("write", {"filePath": "a.md", "content": content})
    turn = parse(name, f"{WRITE[name]('add', {'a': 1, 'b': 2})}\n{write}")
    assert named(turn)[0] == "add"
    assert "exec" not in named(turn)
    assert turn.content == ""


@pytest.mark.parametrize("name", FORMATS)
def test_write_that_is_cut_runs_no_call_that_it_quotes(name: str) -> None:
    call = WRITE[name]("exec", COMMAND)
    text = WRITE[name]("write", {"filePath": "a.md", "content": f"x\n{call}\ny\n{call}\nz"})
    stop = text.rindex("z")
    for length in range(text.index("write") + len("write") + 12, stop + 1):
        turn = parse(name, text[:length])
        assert turn.content == "", text[:length]
        (found,) = turn.calls
        assert isinstance(found, InvalidToolCall) or found.name == "write", text[:length]


def unescaped(name: str) -> str:
    """A call whose value quotes a whole one as it is, without escapes."""
    call = WRITE[name]("exec", COMMAND)
    written = WRITE[name]("write", {"filePath": "a.md", "content": "@"})
    return written.replace("@", f'say "so":\n{call}\nand\n{call}\nend')


@pytest.mark.parametrize("name", FORMATS)
def test_malformed_write_runs_no_call_that_it_quotes(name: str) -> None:
    turn = parse(name, unescaped(name))
    assert turn.content == ""
    (found,) = turn.calls
    assert isinstance(found, InvalidToolCall) or found.name == "write"


@pytest.mark.parametrize("name", BARE)
def test_write_with_a_fault_before_its_content_runs_no_call_that_it_quotes(name: str) -> None:
    call = WRITE[name]("exec", COMMAND)
    text = WRITE[name]("write", {"filePath": "a.md", "content": f"x\n{call}\ny"})
    first = text.index(">", text.index("write")) + 1 if name != "glm4" else text.index("\n") + 1
    turn = parse(name, f"{text[:first]}oops {text[first:]}")
    assert turn.content == ""
    (found,) = turn.calls
    assert isinstance(found, InvalidToolCall)


@pytest.mark.parametrize(("tag", "end"), GEMMA_TAGS)
def test_gemma_fence_whose_string_quotes_its_end_and_a_call_runs_none(tag: str, end: str) -> None:
    quoted = f"{tag}call:exec{{}}{end}"
    text = f'```tool_code\nwrite(content="\\n```\\n{quoted}")\n```'
    for length in range(text.index("content"), len(text) + 1):
        (found,) = parse("gemma", text[:length]).calls
        assert isinstance(found, InvalidToolCall) or found.name == "write", text[:length]


def test_gemma_bare_value_that_quotes_a_call_is_one_invalid_call() -> None:
    call = "<|tool_call>call:exec{command:rm -rf build}<tool_call|>"
    for content in (call, f"a {call} b", f"{call} {call}", "a <tool_call|> b", "a <|tool_call> b"):
        text = f"<|tool_call>call:write{{content:{content},filePath:a.md}}<tool_call|>"
        turn = parse("gemma", text)
        assert turn.content == ""
        assert [type(found) for found in turn.calls] == [InvalidToolCall], content
        both = parse("gemma", f"{text}<|tool_call>call:add{{a:1,b:2}}<tool_call|>")
        assert named(both) == ["add"], content


@pytest.mark.parametrize("tools", [None, TOOLS[1:]])
@pytest.mark.parametrize("name", BARE)
def test_write_without_a_schema_runs_no_call_that_it_quotes(name: str, tools: object) -> None:
    content = quoted(name)["call"]
    text = WRITE[name]("write", {"filePath": "a.md", "content": content})
    turn = get_tool_parser(name).parse(text, tools)  # type: ignore[arg-type]
    check_write(turn, content)


@pytest.mark.parametrize("name", BARE)
def test_value_with_parameters_of_other_tools_and_its_own_is_exact_or_invalid(name: str) -> None:
    for key in ("command", "content", "filePath"):
        between = WRITE[name]("f", {"x": "|", key: "|"}).split("|")[1]
        content = f"a{between}b"
        text = WRITE[name]("write", {"filePath": "a.md", "content": content})
        check_write(parse(name, text), content)


@pytest.mark.parametrize("name", FORMATS)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_write_of_any_tags_is_the_exact_call_or_one_invalid_call(
    name: str, data: st.DataObject
) -> None:
    call = WRITE[name]("exec", COMMAND)
    pieces = [*OPENING[name], *CLOSING[name], call, "a", " ", "\n", "\n\n", '"', "{", "`", "\\"]
    if name not in BARE:
        pieces.append("</think>")
    content = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=8)))
    content = content.strip() if name in ("glm4", "minimax_m2") else content
    text = WRITE[name]("write", {"filePath": "a.md", "content": content})
    check_write(parse(name, text), content)


def test_hermes_call_whose_quotes_are_not_escaped_runs_no_call_that_it_quotes() -> None:
    call = WRITE["hermes"]("exec", COMMAND)
    text = WRITE["hermes"]("write", {"content": "@"}).replace("@", f'x"}}}}\n{call}')
    check_write(parse("hermes", text), "")
    both = f"{text}\n{WRITE['hermes']('add', {'a': 1, 'b': 2})}"
    check_write(parse("hermes", both), "", "add")


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "kimi_k2", "mistral"])
def test_arguments_in_a_string_whose_quotes_are_not_escaped_run_no_call_that_they_quote(
    name: str,
) -> None:
    arguments = f"""{{"content": "{WRITE[name]("exec", COMMAND)}"}}"""
    text = WRITE[name]("write", {}).replace("{}", f'"{arguments}"')
    assert named(parse(name, text)) == []


@pytest.mark.parametrize(
    "text",
    [
        '```tool_code\nx = write(content="a ``` <|tool_call>call:exec{}<tool_call|>")\n```',
        '```tool_code\nimport os\nwrite(content="""\n```\n```tool_code\nexec()\n```\n""")\n```',
        '```tool_code\nimport os\nwrite(content="""\n```\n```tool_code\nexec()\n```\n and',
    ],
)
def test_gemma_malformed_fence_runs_no_call_that_a_string_of_it_quotes(text: str) -> None:
    turn = parse("gemma", text)
    assert [(type(call), call.raw) for call in turn.calls] == [(InvalidToolCall, text)]


def test_gemma_apostrophe_in_a_comment_of_a_malformed_fence_opens_no_string() -> None:
    call = "<|tool_call>call:add{a:1,b:2}<tool_call|>"
    assert named(parse("gemma", f"```tool_code\nx = 1  # it's\n```\n{call}")) == ["add"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            ("gemma", f"{tag}call:write{{content:{quote}a{end} {tag}call:exec{{}}{end} and")
            for tag, end in GEMMA_TAGS
            for quote in ('"', "'", 'r"', '<|"|>', "<escape>")
        ),
        (
            "gemma",
            '<|tool_call>call:write{content:<|"|>a<tool_call|> <|tool_call>call:exec{command:<|"|>b'
            '<|"|>}<tool_call|>',
        ),
        ("pythonic", "<|python_start|>[write(content='a<|python_end|>b [exec()] and"),
        ("pythonic", '<|python_start|>[write(content="""a<|python_end|>\n[exec()]\n and'),
        ("pythonic", '<|python_start|>[write(content="""a<|python_end|> b"\n[exec()]\n and'),
        ("pythonic", "<|python_start|>[write(content=it is 'a<|python_end|>\n[exec()]\n and"),
    ],
)
def test_write_that_is_cut_in_a_string_with_an_end_tag_is_invalid_to_its_end(
    name: str, text: str
) -> None:
    turn = parse(name, text)
    assert [(type(call), call.raw) for call in turn.calls] == [(InvalidToolCall, text)]


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("hermes", "</tool_call>"),
        ("kimi_k2", "<|tool_call_end|>"),
        ("deepseek_v3", "<｜tool▁call▁end｜>"),
    ],
)
def test_write_that_is_cut_after_a_string_with_an_end_tag_is_invalid_to_its_end(
    name: str, end: str
) -> None:
    text = WRITE[name]("write", {"content": f"{end} {WRITE[name]('exec', {})}", "filePath": "a"})
    for stop in ('"filePath"', '"a"'):
        turn = parse(name, text[: text.index(stop)])
        assert [type(call) for call in turn.calls] == [InvalidToolCall]
        assert turn.content == ""


@pytest.mark.parametrize(
    ("name", "call"),
    [("llama3", "<function=exec>{}</function>"), ("gemma", "<|tool_call>call:exec{}<tool_call|>")],
)
def test_malformed_object_runs_no_call_that_it_quotes_whatever_its_first_key(
    name: str, call: str
) -> None:
    for key in ("parameters", "arguments", "id", "x"):
        for end in ("", ",}"):
            turn = parse(name, f'{{"{key}": {{"content": "{call}"}}, "name": "write"{end}')
            assert named(turn) == []
            assert len(turn.calls) == (key != "x")
