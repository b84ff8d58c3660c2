"""Chat templates append: what they add after a turn is what they would have rendered."""

from __future__ import annotations

import json
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
    from collections.abc import Mapping, Sequence
    from pathlib import Path

pytestmark = pytest.mark.process
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<|user|>",
    "<|observation|>",
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: Like Qwen2.5: a default system prompt, tools in it, parallel results in one user turn.
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + ({'name': call.function.name,
                'arguments': call.function.arguments} | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

#: Like Qwen3: empty reasoning in front of the last answer only, and calls of users looked for.
REASONING = """
{%- for message in messages %}
    {%- if message.role == 'user' and message.content.startswith('<tool_response>') %}
        {{- '<|im_start|>tool\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' and loop.last %}
        {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}
        {{- message.content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""

#: Like Llama 3: contents are trimmed, results JSON-encoded, calls written instead of contents.
TRIMMING = """
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<s>assistant\\n' + (message.tool_calls[0].function.arguments | tojson) + '</s>' }}
    {%- elif message.role == 'tool' %}
        {{- '<s>ipython\\n' + (message.content | tojson) + '</s>' }}
    {%- else %}
        {{- '<s>' + message.role + '\\n' + (message.content | trim) + '</s>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<s>assistant\\n' }}{%- endif %}
"""

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

#: Like GLM: nothing ends a turn but the opening of the next.
OPENING_ENDS = (
    "{% for message in messages %}"
    "{{ {'user': '<|user|>', 'tool': '<|observation|>'}.get(message.role, '<s>') }}\n"
    "{{ message.content }}{% endfor %}{% if add_generation_prompt %}<s>\n{% endif %}"
)

TEXT_ONLY = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

APPENDING = {
    "chatml": CHATML,
    "qwen": QWEN,
    "reasoning": REASONING,
    "trimming": TRIMMING,
    "text_only": TEXT_ONLY,
}
CONTENTS = st.text(min_size=1).filter(lambda text: not any(token in text for token in SPECIAL))


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


def render(source: str, messages: Sequence[Mapping[str, Any]]) -> str:
    tokenizer = template(source).tokenizer
    return tokenizer.apply_chat_template(  # type: ignore[no-any-return]
        list(messages), chat_template=source, tokenize=False, add_generation_prompt=True
    )


def added(source: str, messages: Sequence[Any], after: str | None) -> str:
    """The text that `messages` add after a turn whose text so far is `after`."""
    chat = template(source)
    ids = chat.observation_ids(messages, after=None if after is None else encode(after))
    assert isinstance(ids, array)
    assert ids.typecode == "i"
    return chat.decode(ids)


# What a template adds


def test_template_prompt_is_rendered_with_its_generation_prompt() -> None:
    ids = template(QWEN).prompt_ids([Message(role="user", content="Grüße ✓")])
    assert isinstance(ids, array)
    assert template(QWEN).decode(ids) == (
        "<|im_start|>system\nYou are helpful.<|im_end|>\n"
        "<|im_start|>user\nGrüße ✓<|im_end|>\n<|im_start|>assistant\n"
    )


def test_template_tools_and_earlier_calls_are_rendered_once_encoded() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = {"id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}}
    expected = (
        f"<|im_start|>system\n# Tools\n{json.dumps(tool)}<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    dicts = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "7", "name": None},
    ]
    calls = [ToolCall(name="f", arguments={"x": 1}, id="a")]
    objects = [Message(role="assistant", tool_calls=calls), Message(role="tool", content="7")]
    for messages in (dicts, objects):
        assert template(QWEN).decode(template(QWEN).prompt_ids(messages, [tool])) == expected


@given(
    st.sampled_from(sorted(APPENDING)),
    CONTENTS,
    st.lists(st.tuples(st.sampled_from(["user", "tool"]), CONTENTS), min_size=1, max_size=3),
)
def test_template_addition_equals_what_a_fresh_rendering_has_after_the_answer(
    name: str, answer: str, new: list[tuple[str, str]]
) -> None:
    source = APPENDING[name]
    messages = [{"role": role, "content": content} for role, content in new]
    start = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "ANSWER" + "!"}]
    after = render(source, [*start, *messages]).partition("ANSWER!")[2]
    assert added(source, messages, answer) == after


@given(CONTENTS, CONTENTS)
def test_template_transcript_equals_the_rendered_conversation(answer: str, result: str) -> None:
    chat = template(CHATML)
    conversation = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": answer},
        {"role": "tool", "content": result},
    ]
    ids = chat.prompt_ids(conversation[:1])
    ids.extend(encode(f"{answer}<|im_end|>"))
    ids.extend(chat.observation_ids(conversation[2:], after=ids))
    assert ids.tolist() == encode(render(CHATML, conversation))


def test_template_messages_from_a_data_set_are_accepted() -> None:
    messages = np.array([{"role": "user", "content": "u", "name": None, "tool_calls": None}])
    text = template(CHATML).decode(template(CHATML).prompt_ids(messages))
    assert text == "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"


def test_template_parallel_results_share_one_turn() -> None:
    results = [Message(role="tool", content=text, tool_call_id=text) for text in ("one", "two")]
    assert added(QWEN, results, "x<|im_end|>") == (
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>"
        "\n<tool_response>\ntwo\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_template_default_system_prompt_is_not_added_again() -> None:
    assert added(QWEN, [Message(role="user", content="go on")], "x<|im_end|>") == (
        "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


# The end of the generated turn


@pytest.mark.parametrize(
    ("after", "start"),
    [
        ("text<|im_end|>", "\n<|im_start|>user"),
        ("text<|im_end|>\n", "<|im_start|>user"),
        ("text", "<|im_end|>\n<|im_start|>user"),
        ("text\n", "<|im_end|>\n<|im_start|>user"),
        ("text<|endoftext|>", "<|im_end|>\n<|im_start|>user"),
        ("text<|im_end|>\n<|im_start|>", "<|im_end|>\n<|im_start|>user"),
        ("", "<|im_end|>\n<|im_start|>user"),
        (None, "<|im_end|>\n<|im_start|>user"),
    ],
)
def test_template_turn_end_is_completed_and_never_repeated(after: str | None, start: str) -> None:
    text = added(CHATML, [Message(role="user", content="u")], after)
    assert text == f"{start}\nu<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: array("i", ids)])
def test_template_ids_so_far_may_be_any_sequence(kind: Any) -> None:
    new = [Message(role="user", content="u")]
    ids = template(CHATML).observation_ids(new, after=kind(encode("text<|im_end|>")))
    assert template(CHATML).decode(ids).startswith("\n<|im_start|>user")


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


def test_template_turn_that_the_next_opening_ends_is_ended_once() -> None:
    user, tool = Message(role="user", content="u"), Message(role="tool", content="t")
    assert added(OPENING_ENDS, [tool], "call<|observation|>") == "\nt<s>\n"
    assert added(OPENING_ENDS, [tool], "call") == "<|observation|>\nt<s>\n"
    assert added(OPENING_ENDS, [user], "text<|user|>") == "\nu<s>\n"


def test_template_that_tells_the_time_is_rendered_for_each_prompt_and_answer() -> None:
    said = "{{ message.content }}{{ strftime_now('%f') if message.role == 'user' }}"
    chat = template(CHATML.replace("{{ message.content }}", said))
    messages = [{"role": "user", "content": "q"}]
    prompts = {chat.decode(chat.prompt_ids(messages)) for _ in range(20)}
    answers = {chat.decode(chat.observation_ids(messages, after=None)) for _ in range(20)}
    assert len(prompts) > 1
    assert len(answers) > 1


def test_template_names_of_messages_are_never_remembered() -> None:
    source = CHATML.replace("{{ message.role }}", "{{ message.role }} {{ message.name }}")
    for name in ("a", "b"):
        text = added(source, [Message(role="tool", content="r", name=name)], "x<|im_end|>")
        assert text == f"\n<|im_start|>tool {name}\nr<|im_end|>\n<|im_start|>assistant\n"


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
        (None, "messages must be a sequence of messages, not None"),
        (
            [{"role": "assistant", "content": "", "tool_calls": 3}],
            "messages[0]: tool_calls must be a sequence, not int",
        ),
        (["hello"], "messages[0] must be a Message or a mapping, not str"),
        (
            [{"content": "x"}],
            "messages[0] has no role; expected one of system, developer, user, assistant, tool",
        ),
        (
            [{"role": "user", "content": "x"}, {"role": "narrator", "content": "x"}],
            "messages[1]: unknown role 'narrator'; "
            "expected one of system, developer, user, assistant, tool",
        ),
        ([{"role": "user"}], "messages[0] (user): content must be a string, not None"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}],
            "messages[0] (user): content[1]: only parts of type 'text' are understood, not "
            "'image': here the model reads text only",
        ),
        (
            [{"role": "user", "content": ["x", 3]}],
            "messages[0] (user): content[1] must be a text part, not int",
        ),
        (
            [Message(role="assistant")],
            "messages[0] (assistant): content must be a string, not None",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0]: arguments are not JSON: Expecting property name enclosed "
            "in double quotes: line 1 column 2 (char 1)",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
            "messages[0].tool_calls[0] names no function",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}],
            "messages[0].tool_calls[0]: arguments must be an object, not list",
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
        with pytest.raises(TemplateError) as caught:
            call(messages)
        assert str(caught.value) == message


def test_template_refusal_of_the_template_is_quoted() -> None:
    users = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    message = "the chat template refuses [user, user]: roles must alternate"
    with pytest.raises(TemplateError) as caught:
        template(STRICT).prompt_ids(users)
    assert str(caught.value) == message
    with pytest.raises(TemplateError, match="roles must alternate"):
        template(STRICT).observation_ids(users, after=[])


REVERSED = CHATML.replace("in messages %", "in messages | reverse %")
COUNTING = "{{ messages | length }} messages\n" + CHATML
QUOTING = CHATML.replace("{% if add", "{{ messages[0].content }}{% if add")
SECRETIVE = CHATML.replace(
    "{{ message.content }}", "{{ message.content if message.role != 'tool' }}"
)
FORGETFUL = CHATML.replace("messages %", "messages if message.role != 'assistant' %")
TWICE = CHATML.replace("{% if add", "{{ messages[-1].content }}{% if add")
#: Writes a call in another way once it is answered, and refuses a result without one.
LAST_CALLED = CHATML.replace(
    "{{ message.content }}",
    "{{ message.content }}{{ message.tool_calls }}{{ 'pending' if loop.last }}"
    "{% if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result needs a call') }}{% endif %}",
)
WRITES = "it writes the contents of [user, assistant, tool] as those of"


@pytest.mark.parametrize(
    ("source", "role", "why"),
    [
        (REVERSED, "tool", f"{WRITES} [tool, assistant, user]"),
        (COUNTING, "tool", "new messages change the text before the first message"),
        (QUOTING, "tool", f"{WRITES} [user, assistant, tool, user]"),
        (FORGETFUL, "tool", f"{WRITES} [user, tool]"),
        (TWICE, "tool", f"{WRITES} [user, assistant, tool, tool]"),
        (LAST_CALLED, "tool", "it writes a call in another way once it is answered"),
        (SECRETIVE, "tool", f"{WRITES} [user, assistant]"),
    ],
    ids=["reversed", "counting", "quoting", "forgetful", "twice", "called", "secretive"],
)
def test_template_that_is_not_append_only_is_refused_with_the_reason(
    source: str, role: str, why: str
) -> None:
    with pytest.raises(TemplateError) as caught:
        template(source).observation_ids([Message(role=role, content="r")], after=[])
    assert str(caught.value) == f"the chat template cannot be used append-only: {why}"


def test_template_missing_or_ambiguous_is_refused() -> None:
    tokenizer = byte_tokenizer()
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(tokenizer)
    assert str(caught.value) == (
        "the tokenizer has no chat template; name a Jinja file in model.chat_template"
    )
    tokenizer.chat_template = {"default": CHATML, "tool_use": QWEN}
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
    assert template(TEXT_ONLY).stop_token_ids == (ids["<|im_end|>"],)
    bare = ChatTemplate(byte_tokenizer(pad_token="<s>"), chat_template=CHATML)
    assert (bare.eos_token_id, bare.pad_token_id) == (None, ids["<s>"])
    assert bare.vocab_size == 256 + len(SPECIAL)


def test_template_opening_inside_reasoning_is_noticed() -> None:
    closed = REASONING.replace("<think>\\n' }}{%- endif", "<think>\\n\\n</think>\\n' }}{%- endif")
    assert template(REASONING).opens_reasoning
    assert not template(closed).opens_reasoning
    assert not template(CHATML).opens_reasoning


def test_template_fingerprint_tells_templates_and_vocabularies_apart() -> None:
    same = ChatTemplate(byte_tokenizer(eos_token="<|im_end|>"), chat_template=CHATML)
    larger = byte_tokenizer(eos_token="<|im_end|>")
    larger.add_tokens(["<new>"])
    assert same.fingerprint == template(CHATML).fingerprint
    prints = {
        same.fingerprint,
        template(QWEN).fingerprint,
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
    tokenizer.chat_template = QWEN
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "mine.jinja").write_text(CHATML)
    assert load_chat_template(str(tmp_path)).fingerprint == template(QWEN).fingerprint
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
    template(QWEN).tokenizer.save_pretrained(tmp_path)
    broken = tmp_path / "broken.jinja"
    broken.write_text("{{ bos_token }}\n{% for message in")
    with pytest.raises(TemplateError, match=r"broken\.jinja, line 2: not valid Jinja: "):
        load_chat_template(str(tmp_path), chat_template_path=str(broken))


def test_load_chat_template_embedded_model_appends_what_it_would_render() -> None:
    from rollout.engine.model_files import resolve_model

    chat = load_chat_template(resolve_model("embedded:smollm2-135m-instruct"))
    answer = 'Sure.\n<tool_call>\n{"name": "add", "arguments": {"a": 12,  "b": 3}}\n</tool_call>'
    conversation = [
        {"role": "user", "content": "What is 12 +  3?"},
        {"role": "assistant", "content": answer},
        {"role": "tool", "content": "15"},
        {"role": "tool", "content": " Zürich:  7 °C\n"},
    ]
    ids = chat.prompt_ids(conversation[:1])
    ids.extend(chat.tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False))
    ids.extend(chat.observation_ids(conversation[2:], after=ids))
    assert ids == chat.prompt_ids(conversation)
    assert chat.stop_token_ids == (chat.eos_token_id,)
    assert not chat.opens_reasoning


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
    with pytest.raises(TemplateError) as caught:
        template("{# nothing #}").prompt_ids([QUESTION])
    assert str(caught.value) == "the chat template makes no text of [user]"
