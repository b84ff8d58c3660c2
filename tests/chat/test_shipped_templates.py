"""Tokens are those of transformers for our formats and every chat template that packages ship.

With TRL installed (`make test-trainers`) these are some thirty of the models that people train.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chat_material import FORMATS, tokenizer
from rollout.chat import ChatTemplate
from rollout.chat.messages import template_messages
from rollout.errors import TemplateError
from rollout.types import Message, ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
#: What contents are made of, and spellings of special tokens that stay text in them.
HARMLESS = st.sampled_from(
    ["the", " weather", "Zürich", "12", " 3\n", "漢字", "🙂", "{", "е́", "\t#"]
)
SPELLED = st.sampled_from(["<|im_end|>", "<think>", "</s>", "[INST]", "<|eot_id|>", "</tool_call>"])
ANSWER = "rolloutSaidThis"
SETTINGS = settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=6)


def find_templates() -> Iterator[tuple[str, Path]]:
    """Chat templates by name: ours, and those in the files of installed packages."""
    for path in sorted(FORMATS.glob("*.jinja")):
        yield path.stem, path
    for package in distributions():
        has_any = ".jinja" in (package.read_text("RECORD") or "")  # to list files takes long
        for file in (package.files or ()) if has_any else ():
            if file.suffix == ".jinja" and "template" in str(file.parent):
                path = Path(str(package.locate_file(file)))
                if path.exists() and "message" in path.read_text(encoding="utf-8"):
                    yield f"{package.name}/{file.stem}", path


TEMPLATES = dict(find_templates())


@cache
def make_template(name: str) -> ChatTemplate:
    source = TEMPLATES[name].read_text(encoding="utf-8")
    return ChatTemplate(
        tokenizer("smollm2"), chat_template=source, chat_template_kwargs={"bos_token": "<s>"}
    )


def render(
    template: ChatTemplate, messages: Sequence[Message], prompts: bool, **options: Any
) -> Any:
    adapted = template._renderer.adapted(template_messages(messages))
    return template.tokenizer.apply_chat_template(
        list(adapted),
        chat_template=template.source,
        add_generation_prompt=prompts,
        bos_token="<s>",
        **options,
    )


@st.composite
def conversations(draw: st.DrawFn, piece: st.SearchStrategy[str]) -> list[Message]:
    """A system prompt or none, a question, and earlier turns, one of them with a tool's result."""
    contents = st.lists(piece, min_size=1, max_size=5).map(lambda pieces: f"q{''.join(pieces)}q")
    messages = [Message(role="system", content=draw(contents))] * draw(st.integers(0, 1))
    messages.append(Message(role="user", content=draw(contents)))
    if draw(st.booleans()):
        call = ToolCall(name="weather", arguments={"city": "Bern"}, id="call00001")
        messages += [
            Message(role="assistant", content="", tool_calls=(call,)),
            Message(role="tool", content=draw(contents), name="weather", tool_call_id=call.id),
            Message(role="assistant", content="It is."),
            Message(role="user", content=draw(contents)),
        ]
    return messages


@pytest.mark.parametrize("name", TEMPLATES)
@SETTINGS
@given(messages=conversations(HARMLESS), tools=st.sampled_from([None, TOOLS]))
def test_prompt_has_the_ids_of_transformers(name: str, messages: Any, tools: Any) -> None:
    template = make_template(name)
    try:
        ids = template.prompt_ids(messages, tools).tolist()
    except TemplateError:
        with pytest.raises(Exception):  # noqa: B017, PT011  (a template raises what it likes)
            render(template, messages, True, tools=tools, tokenize=False)
        return
    expected = render(template, messages, True, tools=tools, tokenize=True, return_dict=False)
    assert ids == expected


@pytest.mark.parametrize("name", TEMPLATES)
@SETTINGS
@given(messages=conversations(HARMLESS | SPELLED))
def test_prompt_with_spelled_tokens_is_the_rendered_text(name: str, messages: Any) -> None:
    template = make_template(name)
    try:
        ids = template.prompt_ids(messages, TOOLS)
    except TemplateError:
        return
    assert template.decode(ids) == render(template, messages, True, tools=TOOLS, tokenize=False)
    words = [
        message if message.role == "assistant" else msg_with_words(message) for message in messages
    ]
    special = set(template.encoder.specials.values())
    harmless = [token for token in template.prompt_ids(words, TOOLS) if token in special]
    assert [token for token in ids if token in special] == harmless


def msg_with_words(message: Message) -> Message:
    return Message(
        role=message.role,
        content="words",
        name=message.name,
        tool_call_id=message.tool_call_id,
    )


@pytest.mark.parametrize("name", TEMPLATES)
@SETTINGS
@given(messages=conversations(HARMLESS), following=conversations(HARMLESS))
def test_observation_is_the_tail_of_the_full_rendering(
    name: str, messages: Any, following: Any
) -> None:
    template = make_template(name)
    asked, added = [*messages, Message(role="assistant", content=ANSWER)], [following[-1]]
    try:
        ids = template.observation_ids(added, after=None).tolist()
        before = render(template, asked, False, tokenize=False)
        whole = render(template, [*asked, *added], True, tokenize=False)
    except Exception:  # it refuses such conversations, or cannot be continued
        return
    head, _, tail = whole.partition(ANSWER)
    if before.partition(ANSWER)[0] == head and ANSWER in before:  # what stood before stays
        assert template.decode(ids) == tail
        assert ids == template.text_ids(tail)
