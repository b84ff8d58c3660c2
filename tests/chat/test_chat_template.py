"""Chat templates append: what they add after a turn is what they would have rendered."""

from __future__ import annotations

import re
from array import array
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.chat import ChatTemplate, load_chat_template
from rollout.errors import TemplateError
from rollout.types import Message, ToolCall

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.process
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: Like Mistral and Llama 2: strict turns, ids of calls, a space before the end token.
STRICT = """
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if not loop.first and messages[loop.index0 - 1].role == 'user' %}
            {{- raise_exception('roles must alternate') }}
        {%- endif %}
        {{- '<s>[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '[CALL]' + (call.function.arguments | tojson) + call.id }}
        {%- endfor %}
        {{- ' </s>' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or not (messages[loop.index0 - 1].tool_calls
                                  or messages[loop.index0 - 1].role == 'tool') %}
            {{- raise_exception('a result needs a call') }}
        {%- endif %}
        {{- '[RESULT]' + message.tool_call_id + ' ' + message.content + '[/RESULT]' }}
    {%- endif %}
{%- endfor %}
"""


def byte_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes, so that every text has one obvious encoding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@cache
def template(source: str) -> ChatTemplate:
    return ChatTemplate(byte_tokenizer(eos_token="<|im_end|>"), chat_template=source)


def encode(text: str) -> list[int]:
    ids: list[int] = template(CHATML).tokenizer.encode(text, add_special_tokens=False)
    return ids


def added(source: str, messages: Sequence[Any], after: str | None) -> str:
    """The text that `messages` add after a turn whose text so far is `after`."""
    chat = template(source)
    ids = chat.observation_ids(messages, after=None if after is None else encode(after))
    assert isinstance(ids, array)
    assert ids.typecode == "i"
    return chat.decode(ids)


# What a template adds


def test_template_calls_of_dicts_and_of_objects_are_written_alike() -> None:
    written = (
        "{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
        "{{ call.function.arguments | tojson }}{% endfor %}"
    )
    source = CHATML.replace("{{ message.content }}", written)
    call = {"id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}}
    dicts = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "name": None},
    ]
    calls = [ToolCall(name="f", arguments={"x": 1}, id="a")]
    objects = [Message(role="assistant", tool_calls=calls), Message(role="tool", content="7")]
    expected = template(source).prompt_ids(objects)
    assert '{"x": 1}' in template(source).decode(expected)
    assert template(source).prompt_ids(dicts) == expected


def test_template_messages_from_a_data_set_are_accepted() -> None:
    messages = np.array([{"role": "user", "content": "u", "name": None, "tool_calls": None}])
    text = template(CHATML).decode(template(CHATML).prompt_ids(messages))
    assert text == "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"


# The end of the generated turn


@pytest.mark.parametrize(
    ("after", "start"),
    [
        ("text<|im_end|>", "\n<|im_start|>user"),
        ("text<|im_end|>\n", "<|im_start|>user"),
        ("text", "<|im_end|>\n<|im_start|>user"),
        ("text\n", "<|im_end|>\n<|im_start|>user"),
        (None, "<|im_end|>\n<|im_start|>user"),
    ],
)
def test_template_turn_end_is_completed_and_never_repeated(after: str | None, start: str) -> None:
    text = added(CHATML, [Message(role="user", content="u")], after)
    assert text == f"{start}\nu<|im_end|>\n<|im_start|>assistant\n"


def test_template_space_before_the_end_token_is_not_added_behind_it() -> None:
    result = [Message(role="tool", content="r", tool_call_id="abc")]
    assert added(STRICT, result, " x </s>") == "[RESULT]abc r[/RESULT]"
    assert added(STRICT, result, " x</s>") == "[RESULT]abc r[/RESULT]"
    assert added(STRICT, result, " x") == " </s>[RESULT]abc r[/RESULT]"


def test_template_that_writes_results_otherwise_after_a_call_is_shown_one() -> None:
    source = CHATML.replace(
        "{{ message.content }}",
        "{{ message.content }}{{ message.tool_calls }}{% if message.role == 'tool' %}"
        "{% set calls = messages[loop.index0 - 1].tool_calls %}"
        " of {{ calls[0].function.name if calls else 'nobody' }}{% endif %}",
    )
    result = [Message(role="tool", content="7", name="weather", tool_call_id="abc")]
    told = "\n<|im_start|>tool\n7 of weather<|im_end|>\n<|im_start|>assistant\n"
    assert added(source, result, "x<|im_end|>") == told


def test_template_that_tells_the_time_is_rendered_for_each_prompt_and_answer() -> None:
    said = "{{ message.content }}{{ strftime_now('%f') if message.role == 'user' }}"
    chat = template(CHATML.replace("{{ message.content }}", said))
    messages = [{"role": "user", "content": "q"}]
    prompts = {chat.decode(chat.prompt_ids(messages)) for _ in range(5)}
    answers = {chat.decode(chat.observation_ids(messages, after=None)) for _ in range(5)}
    assert len(prompts) > 1
    assert len(answers) > 1


def test_template_unknown_keys_of_messages_reach_the_template() -> None:
    source = CHATML.replace("{{ message.content }}", "{{ message.mood }}{{ message.content }}")
    for mood in ("calm", "keen"):
        text = added(source, [{"role": "user", "content": "u", "mood": mood}], "x<|im_end|>")
        assert f"user\n{mood}u<|im_end|>" in text


# Faults


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty; expected at least one message"),
        ("hello", "messages must be a sequence of messages, not str"),
        (["hello"], "messages[0] must be a Message or a mapping, not str"),
        ([{"content": "x"}], "messages[0] has no role; expected one of system, developer, user"),
        ([{"role": "narrator", "content": "x"}], "messages[0]: unknown role 'narrator'; expected"),
        ([{"role": "user"}], "messages[0] (user): content must be a string, not None"),
        (
            [{"role": "user", "content": ["x", 3]}],
            "(user): content[1] must be a text part, not int",
        ),
        (
            [{"role": "assistant", "tool_calls": 3}],
            "messages[0]: tool_calls must be a sequence, not",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0]: arguments are not JSON",
        ),
    ],
)
def test_template_malformed_messages_are_refused_with_the_reason(
    messages: Any, message: str
) -> None:
    for call in (
        template(CHATML).prompt_ids,
        lambda m: template(CHATML).observation_ids(m, after=[]),
    ):
        with pytest.raises(TemplateError, match=re.escape(message)):
            call(messages)


def test_template_refusal_of_the_template_is_quoted() -> None:
    users = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(TemplateError, match=r"refuses \[user, user\]: roles must alternate"):
        template(STRICT).prompt_ids(users)
    with pytest.raises(TemplateError, match="roles must alternate"):
        template(STRICT).observation_ids(users, after=[])


REVERSED = CHATML.replace("in messages %", "in messages | reverse %")
COUNTING = "{{ messages | length }} messages\n" + CHATML
SECRETIVE = CHATML.replace(
    "{{ message.content }}", "{{ message.content if message.role != 'tool' }}"
)
#: Writes a call in another way once it is answered, and refuses a result without one.
LAST_CALLED = CHATML.replace(
    "{{ message.content }}",
    "{{ message.content }}{{ message.tool_calls }}{{ 'pending' if loop.last }}"
    "{% if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result needs a call') }}{% endif %}",
)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (REVERSED, "it writes the contents of [user, assistant, tool] as those of [tool, "),
        (COUNTING, "new messages change the text before the first message"),
        (LAST_CALLED, "it writes a call in another way once it is answered"),
        (SECRETIVE, "it writes the contents of [user, assistant, tool] as those of [user, a"),
    ],
    ids=["reversed", "counting", "called", "secretive"],
)
def test_template_that_is_not_append_only_is_refused_with_the_reason(source: str, why: str) -> None:
    said = re.escape(f"the chat template cannot be used append-only: {why}")
    with pytest.raises(TemplateError, match=said):
        template(source).observation_ids([Message(role="tool", content="r")], after=[])


def test_template_missing_or_ambiguous_is_refused() -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(TemplateError, match=r"name a Jinja file in model\.chat_template"):
        ChatTemplate(tokenizer)
    tokenizer.chat_template = {"default": CHATML, "tool_use": STRICT}
    with pytest.raises(TemplateError, match=r"several chat templates \(default, tool_use\)"):
        ChatTemplate(tokenizer)


# Facts about the tokenizer


def test_template_stop_tokens_are_the_end_token_and_the_turn_end() -> None:
    tokenizer = byte_tokenizer(eos_token="<|endoftext|>")
    ids = dict(zip(SPECIAL, encode("".join(SPECIAL)), strict=True))
    chatml = ChatTemplate(tokenizer, chat_template=CHATML)
    assert chatml.stop_token_ids == (ids["<|endoftext|>"], ids["<|im_end|>"])
    assert (chatml.eos_token_id, chatml.pad_token_id) == (ids["<|endoftext|>"],) * 2
    assert template(CHATML).stop_token_ids == (ids["<|im_end|>"],)
    assert template(STRICT).stop_token_ids == (ids["<|im_end|>"], ids["</s>"])
    bare = ChatTemplate(byte_tokenizer(pad_token="<s>"), chat_template=CHATML)
    assert (bare.eos_token_id, bare.pad_token_id) == (None, ids["<s>"])
    assert bare.vocab_size == 256 + len(SPECIAL)


def test_template_fingerprint_tells_templates_and_vocabularies_apart() -> None:
    same = ChatTemplate(byte_tokenizer(eos_token="<|im_end|>"), chat_template=CHATML)
    larger = byte_tokenizer(eos_token="<|im_end|>")
    larger.add_tokens(["<new>"])
    assert same.fingerprint == template(CHATML).fingerprint
    prints = {
        same.fingerprint,
        template(STRICT).fingerprint,
        ChatTemplate(larger, chat_template=CHATML).fingerprint,
    }
    assert len(prints) == 3
    assert all(len(text) == 16 for text in prints)


@given(st.text())
def test_template_decoding_keeps_special_tokens_and_every_character(text: str) -> None:
    kept = f"<|im_start|>{text}<|im_end|>"
    assert template(CHATML).decode(array("i", encode(kept))) == kept


def test_template_truncation_set_by_others_changes_nothing() -> None:
    tokenizer = byte_tokenizer(eos_token="<|im_end|>")
    chat = ChatTemplate(tokenizer, chat_template=CHATML)
    tokenizer.backend_tokenizer.enable_truncation(3)
    assert len(chat.prompt_ids([Message(role="user", content="x" * 100)])) > 100


# Loading


def test_load_chat_template_saved_tokenizer_is_loaded(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(eos_token="<|im_end|>")
    tokenizer.chat_template = STRICT
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "mine.jinja").write_text(CHATML)
    assert load_chat_template(str(tmp_path)).fingerprint == template(STRICT).fingerprint
    replaced = load_chat_template(str(tmp_path), chat_template_path=str(tmp_path / "mine.jinja"))
    assert replaced.fingerprint == template(CHATML).fingerprint


def test_load_chat_template_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match=f"^the tokenizer of {tmp_path} cannot be loaded: "):
        load_chat_template(str(tmp_path))
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(TemplateError, match=r"no\.jinja cannot be read: "):
        load_chat_template(str(tmp_path), chat_template_path=str(tmp_path / "no.jinja"))


@pytest.mark.model
def test_load_chat_template_that_is_no_jinja_is_refused_with_its_line(tmp_path: Path) -> None:
    template(STRICT).tokenizer.save_pretrained(tmp_path)
    broken = tmp_path / "broken.jinja"
    broken.write_text("{{ bos_token }}\n{% for message in")
    with pytest.raises(TemplateError, match=r"broken\.jinja, line 2: not valid Jinja: "):
        load_chat_template(str(tmp_path), chat_template_path=str(broken))


QUESTION = Message(role="user", content="q")


def test_template_that_goes_through_its_tools_unasked_gets_an_empty_list() -> None:
    chat = template("{% for tool in tools %}<tool>{{ tool.function.name }}{% endfor %}" + CHATML)
    plain = template(CHATML)
    assert chat.prompt_ids([QUESTION]) == plain.prompt_ids([QUESTION])
    assert chat.observation_ids([QUESTION], after=None) == plain.observation_ids(
        [QUESTION], after=None
    )
    offered = [{"type": "function", "function": {"name": "look"}}]
    assert chat.decode(chat.prompt_ids([QUESTION], offered)).startswith("<tool>look")


def test_template_that_makes_no_text_is_an_error() -> None:
    with pytest.raises(TemplateError, match=r"the chat template makes no text of \[user\]"):
        template("{# nothing #}").prompt_ids([QUESTION])
