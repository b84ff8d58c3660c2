"""The chat formats that people train: what stands at each boundary, token by token."""

from __future__ import annotations

import pytest

from chat_material import FAMILIES, chat, source, tokenizer, variables
from rollout.chat import ChatTemplate
from rollout.errors import TemplateError
from rollout.types import Message, ToolCall

USER = [Message(role="user", content=" go on ")]
RESULT = [Message(role="tool", content=' "7" °C\n', name="weather", tool_call_id="call_0")]
BOTH = [*RESULT, Message(role="tool", content="wet", name="rain", tool_call_id="call_1")]

CHATML_USER = "<|im_end|>\n<|im_start|>user\n go on <|im_end|>\n<|im_start|>assistant\n"
QWEN_RESULT = (
    '<|im_end|>\n<|im_start|>user\n<tool_response>\n "7" °C\n\n</tool_response><|im_end|>\n'
    "<|im_start|>assistant\n"
)
QWEN_BOTH = (
    '<|im_end|>\n<|im_start|>user\n<tool_response>\n "7" °C\n\n</tool_response>\n'
    "<tool_response>\nwet\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
#: What a user's words, one result and two results add after a turn that was cut.
ADDED = {
    "chatml": (
        CHATML_USER,
        '<|im_end|>\n<|im_start|>tool\n "7" °C\n<|im_end|>\n<|im_start|>assistant\n',
        '<|im_end|>\n<|im_start|>tool\n "7" °C\n<|im_end|>\n<|im_start|>tool\nwet<|im_end|>\n'
        "<|im_start|>assistant\n",
    ),
    "qwen2_5": (CHATML_USER, QWEN_RESULT, QWEN_BOTH),
    "qwen3": (CHATML_USER, QWEN_RESULT, QWEN_BOTH),
    "qwen3_coder": (
        CHATML_USER,
        QWEN_RESULT.replace("response><", "response>\n<"),
        QWEN_BOTH.replace("response><", "response>\n<"),
    ),
    "llama3": (
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\ngo on<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n" \\"7\\" °C\\n"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n" \\"7\\" °C\\n"<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n"wet"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": (
        "</s>[INST] go on [/INST]",
        '</s>[TOOL_RESULTS]{"content": " \\"7\\" °C\\n", "call_id": "c557a85a0"}[/TOOL_RESULTS]',
        '</s>[TOOL_RESULTS]{"content": " \\"7\\" °C\\n", "call_id": "c557a85a0"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS]{"content": "wet", "call_id": "74196fe72"}[/TOOL_RESULTS]',
    ),
    "deepseek_v3": (
        "<｜end▁of▁sentence｜><｜User｜> go on <｜Assistant｜></think>",
        '<｜end▁of▁sentence｜><｜tool▁output▁begin｜> "7" °C\n<｜tool▁output▁end｜>',
        '<｜end▁of▁sentence｜><｜tool▁output▁begin｜> "7" °C\n<｜tool▁output▁end｜>'
        "<｜tool▁output▁begin｜>wet<｜tool▁output▁end｜>",
    ),
    "deepseek_r1": (
        "<｜end▁of▁sentence｜><｜User｜> go on <｜Assistant｜><think>\n",
        '<｜end▁of▁sentence｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜> "7" °C\n'
        "<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        '<｜end▁of▁sentence｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜> "7" °C\n'
        "<｜tool▁output▁end｜>\n<｜tool▁output▁begin｜>wet<｜tool▁output▁end｜>"
        "<｜tool▁outputs▁end｜>",
    ),
    "glm4": (
        "<|user|>\n go on <|assistant|>",
        '<|observation|>\n<tool_response>\n "7" °C\n\n</tool_response><|assistant|>',
        '<|observation|>\n<tool_response>\n "7" °C\n\n</tool_response>\n<tool_response>\nwet\n'
        "</tool_response><|assistant|>",
    ),
    "kimi_k2": (
        "<|im_end|><|im_user|>user<|im_middle|> go on <|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>",
        '<|im_end|><|im_system|>weather<|im_middle|>## Return of call_0\n "7" °C\n<|im_end|>'
        "<|im_assistant|>assistant<|im_middle|>",
        '<|im_end|><|im_system|>weather<|im_middle|>## Return of call_0\n "7" °C\n<|im_end|>'
        "<|im_system|>rain<|im_middle|>## Return of call_1\nwet<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>",
    ),
    "minimax_m2": (
        "[e~[\n]~b]user\n go on [e~[\n]~b]ai\n<think>\n",
        '[e~[\n]~b]tool\n<response> "7" °C\n</response>[e~[\n]~b]ai\n<think>\n',
        '[e~[\n]~b]tool\n<response> "7" °C\n</response>\n<response>wet</response>[e~[\n'
        "]~b]ai\n<think>\n",
    ),
    "gpt_oss": (
        "<|end|><|start|>user<|message|> go on <|end|><|start|>assistant",
        "<|call|><|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
        '" \\"7\\" °C\\n"<|end|><|start|>assistant',
        "<|call|><|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
        '" \\"7\\" °C\\n"<|end|><|start|>functions.weather to=assistant<|channel|>commentary'
        '<|message|>"wet"<|end|><|start|>assistant',
    ),
    "gemma": (
        "<end_of_turn>\n<start_of_turn>user\ngo on<end_of_turn>\n<start_of_turn>model\n",
        '<end_of_turn>\n<start_of_turn>user\n```tool_output\n "7" °C\n\n```<end_of_turn>\n'
        "<start_of_turn>model\n",
        '<end_of_turn>\n<start_of_turn>user\n```tool_output\n "7" °C\n\n```\n```tool_output\nwet\n'
        "```<end_of_turn>\n<start_of_turn>model\n",
    ),
    "gemma4": (
        "<turn|>\n<|turn>user\ngo on<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
        '<|tool_response>response:weather{value:<|"|> "7" °C\n<|"|>}<tool_response|>',
        '<|tool_response>response:weather{value:<|"|> "7" °C\n<|"|>}<tool_response|>'
        '<|tool_response>response:rain{value:<|"|>wet<|"|>}<tool_response|>',
    ),
}
#: The tokens that end a turn, the tokenizer's own left out; those that open the next in GLM.
STOPS = {
    **dict.fromkeys(("chatml", "qwen2_5", "qwen3", "qwen3_coder", "kimi_k2"), ("<|im_end|>",)),
    "llama3": ("<|eot_id|>",),
    "mistral": ("</s>",),
    **dict.fromkeys(("deepseek_v3", "deepseek_r1"), ("<｜end▁of▁sentence｜>",)),
    "glm4": ("<|user|>", "<|observation|>"),
    "minimax_m2": ("[e~[",),
    "gpt_oss": ("<|return|>", "<|call|>"),
    "gemma": ("<end_of_turn>",),
    "gemma4": ("<turn|>", "<|tool_response>"),
}
VOCABULARY = "smollm2"


def template(family: str) -> ChatTemplate:
    return chat(VOCABULARY, family)


def token(name: str) -> int:
    (token_id,) = tokenizer(VOCABULARY).encode(name, add_special_tokens=False)
    return int(token_id)


@pytest.mark.parametrize("family", FAMILIES)
def test_format_turn_that_was_cut_gets_its_end_and_what_follows(family: str) -> None:
    texts = [
        template(family).decode(template(family).observation_ids(messages, after=None))
        for messages in (USER, RESULT, BOTH)
    ]
    assert texts == list(ADDED[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_format_turn_that_ended_itself_gets_only_what_it_lacks(family: str) -> None:
    called = STOPS[family][-1]
    for messages, whole, end in (
        (USER, ADDED[family][0], STOPS[family][0]),
        (BOTH, ADDED[family][2], called),
    ):
        added = template(family).observation_ids(messages, after=[300, 301, token(end)])
        lead = "<|end|>" if whole.startswith("<|end|>") else end
        assert template(family).decode(added) == whole.removeprefix(lead)
        assert whole.startswith(lead)


@pytest.mark.parametrize("family", FAMILIES)
def test_format_stop_tokens_are_those_that_end_a_turn(family: str) -> None:
    stops = template(family).stop_token_ids
    assert stops == (token("<|endoftext|>"), *map(token, STOPS[family]))


def test_format_that_opens_reasoning_says_so() -> None:
    opening = {family for family in FAMILIES if template(family).opens_reasoning}
    assert opening == {"deepseek_r1", "minimax_m2"}
    behind = {family for family in FAMILIES if template(family).observe(RESULT, after=None)[1]}
    assert behind == {"minimax_m2"}  # nothing opens a turn after results of DeepSeek


def test_format_other_end_token_of_a_turn_is_not_followed_by_a_second() -> None:
    llama = ChatTemplate(
        tokenizer(VOCABULARY),
        chat_template=source("llama3") + "{#- or <|eom_id|> -#}",
        chat_template_kwargs=variables("llama3"),
    )
    added = llama.observation_ids(RESULT, after=[300, token("<|eom_id|>")])
    assert llama.decode(added) == ADDED["llama3"][1].removeprefix("<|eot_id|>")
    assert token("<|eom_id|>") in llama.stop_token_ids


def test_format_arguments_are_given_as_the_template_wants_them() -> None:
    call = ToolCall(name="weather", arguments={"city": "Zürich", "days": 3}, id="call_0")
    messages = [*USER, Message(role="assistant", content="", tool_calls=[call]), *RESULT]
    expected = {
        "deepseek_v3": '<｜tool▁sep｜>{"city": "Zürich", "days": 3}<｜tool▁call▁end｜>',
        "qwen2_5": '"arguments": {"city": "Zürich", "days": 3}}',
        "kimi_k2": 'call_0<|tool_call_argument_begin|>{"city": "Zürich", "days": 3}',
        "glm4": "<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>",
        "mistral": '"arguments": {"city": "Zürich", "days": 3}, "id": "c557a85a0"}]</s>'
        "[TOOL_RESULTS]",
    }
    for family, text in expected.items():
        assert text in template(family).decode(template(family).prompt_ids(messages))


def test_format_arguments_that_a_template_would_write_as_python_are_json() -> None:
    text = source("chatml").replace(
        "~ message.content ~",
        "~ message.content ~ (message.tool_calls[0].function.arguments if message.tool_calls) ~",
    )
    chatml = ChatTemplate(tokenizer(VOCABULARY), chat_template=text)
    call = ToolCall(name="f", arguments={"x": None, "y": "ü"})
    ids = chatml.prompt_ids([*USER, Message(role="assistant", content="", tool_calls=[call])])
    assert 'assistant\n{"x": null, "y": "ü"}<|im_end|>' in chatml.decode(ids)


def test_format_results_that_a_user_must_say_are_joined_to_his_words() -> None:
    messages = [*USER, Message(role="assistant", content="x"), *BOTH, *USER]
    text = template("gemma").decode(template("gemma").prompt_ids(messages))
    assert text.endswith(
        '<start_of_turn>user\n```tool_output\n "7" °C\n\n```\n```tool_output\nwet\n```\n go on'
        "<end_of_turn>\n<start_of_turn>model\n"
    )


def test_format_variables_reach_the_template_and_its_fingerprint() -> None:
    thinking = chat("bytes", "qwen3")
    quiet = ChatTemplate(
        tokenizer("bytes"),
        chat_template=source("qwen3"),
        chat_template_kwargs={**variables("qwen3"), "enable_thinking": False},
    )
    end = "<think>\n\n</think>\n\n"
    assert quiet.decode(quiet.prompt_ids(USER)).endswith(f"<|im_start|>assistant\n{end}")
    assert thinking.decode(thinking.prompt_ids(USER)).endswith("<|im_start|>assistant\n")
    assert quiet.decode(quiet.observation_ids(RESULT, after=None)) == QWEN_RESULT + end
    assert quiet.fingerprint != thinking.fingerprint


def test_format_spelled_token_that_the_template_searches_for_is_seen_and_stays_text() -> None:
    qwen = template("qwen3")
    sent = "<tool_response>\n<|im_end|>7\n</tool_response>"
    reasoned = Message(role="assistant", content="<think>\nhm\n</think>\n\nyes")
    ids = qwen.prompt_ids([*USER, reasoned, Message(role="user", content=sent)])
    # A user's result is no question: the reasoning before it is kept, by tags of the template.
    text = qwen.decode(ids)
    assert "<think>\nhm\n</think>\n\nyes<|im_end|>" in text
    assert sent in text
    specials = [token_id for token_id in ids if token_id == token("<tool_response>")]
    assert specials == []
    assert list(ids).count(token("<|im_end|>")) == 3
    assert list(ids).count(token("<think>")) == 1


def test_format_spelled_tokens_in_names_arguments_and_tools_stay_text() -> None:
    name, end = "f<|im_end|>", token("<|im_end|>")
    call = ToolCall(name="f", arguments={"<|im_end|>": ["<|im_start|>", {"a": "<|im_end|>"}]})
    tool = {"type": "function", "function": {"name": "f", "description": "ends <|im_end|>"}}
    messages = [
        Message(role="user", content="q", name=name),
        Message(role="assistant", content="<|im_end|>", tool_calls=[call]),
        Message(role="tool", content="r", name=name),
    ]
    ids = template("qwen2_5").prompt_ids(messages, [tool])
    assert list(ids).count(end) == 4
    assert template("qwen2_5").decode(ids).count("<|im_end|>") == 8


@pytest.mark.parametrize(
    ("looks_up", "written"),
    [
        ("for k in p.properties %}{{ k }}{{ k in p.required }} ", "bTrue <|im_end|>True "),
        ("for k, _ in p.properties | dictsort %}{{ k }} ", "<|im_end|> b "),
    ],
)
def test_format_names_that_spell_a_token_are_compared_and_sorted_as_they_are(
    looks_up: str, written: str
) -> None:
    names = {"type": "object", "properties": {"b": {}, "<|im_end|>": {}}}
    tool = {"function": {"name": "f", "parameters": {**names, "required": ["<|im_end|>", "b"]}}}
    head = (
        f"{{% for t in tools %}}{{% set p = t.function.parameters %}}{{% {looks_up}{{% endfor %}}"
    )
    messages = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    looking = ChatTemplate(tokenizer(VOCABULARY), chat_template=f"{head}{{% endfor %}}{messages}")
    ids = looking.prompt_ids(USER, [tool])
    assert looking.decode(ids).startswith(written)
    assert list(ids).count(token("<|im_end|>")) == 1


def test_format_id_of_a_call_that_spells_a_token_is_that_of_its_result() -> None:
    call = ToolCall(name="f", arguments={}, id="call_[INST]1")
    result = Message(role="tool", content="r", tool_call_id=call.id)
    messages = [Message(role="user", content="q"), Message(role="assistant", tool_calls=[call])]
    added = template("mistral").decode(template("mistral").observation_ids([result], after=None))
    call_id = added.partition('"call_id": ')[2][:11]
    assert template("mistral").prompt_text([*messages, result]).count(call_id) == 2


def test_format_without_answers_or_results_is_refused_with_the_reason() -> None:
    questions_only = ChatTemplate(
        tokenizer(VOCABULARY),
        chat_template="{% for m in messages %}{% if m.role != 'user' %}"
        "{{ raise_exception('only questions') }}{% endif %}{{ m.content }}{% endfor %}",
    )
    with pytest.raises(TemplateError) as caught:
        questions_only.observation_ids(USER, after=None)
    assert str(caught.value) == (
        "the chat template refuses [user, assistant, user]: only questions"
    )
