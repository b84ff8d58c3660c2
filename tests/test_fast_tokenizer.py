"""Tokenizers that the driver reads by itself do, id for id, what transformers' do."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.exceptions import SecurityError
from transformers import AutoTokenizer

from chat_material import FAMILIES, SPECIALS, VOCABULARIES, source, tokenizer
from rollout.chat import ChatTemplate, load_chat_template
from rollout.chat.fast_tokenizer import FastTokenizer
from rollout.chat.fast_tokenizer_files import MODEL_TYPES, read_fast_tokenizer
from rollout.errors import TemplateError
from rollout.testing import simulated_tokenizer
from slow_cases import slow_after, slow_but

pytestmark = pytest.mark.model

LOOK_ALIKES = sorted({name for names in SPECIALS.values() for name in names.split()})
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["the", " weather", "Zürich", "12", " 3", "000", "e\u0301", "漢字", "🙂👍🏽"]
        ),
        st.sampled_from([" ", "  ", "\n", "\n\n\n", "\t", "\r\n", "\u00a0", "<", "|>", "'s", '"']),
        st.sampled_from(LOOK_ALIKES),
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6),
    ),
    max_size=10,
).map("".join)
SETTINGS = settings(
    suppress_health_check=list(HealthCheck),
    deadline=None,
    max_examples=20,
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city: 'now' & \"then\" <b>Zürich</b>.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": {}}}


Pair = tuple[FastTokenizer, Any]


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """What we read from the directory of a vocabulary, and what transformers does."""

    @cache
    def pair_of(vocabulary: str) -> Pair:
        folder = tmp_path_factory.mktemp(vocabulary)
        tokenizer(vocabulary).save_pretrained(folder)
        return both(folder)

    return pair_of


def both(folder: Path) -> Pair:
    fast = read(folder)
    assert fast is not None
    return fast, AutoTokenizer.from_pretrained(folder)


def read(folder: Path) -> FastTokenizer | None:
    return read_fast_tokenizer(folder, lambda: pytest.fail("asked transformers"))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The directory of a small tokenizer, to be changed."""
    simulated_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def change(file: Path, **entries: Any) -> None:
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(found | entries))


@pytest.mark.parametrize("vocabulary", slow_but(VOCABULARIES, "smollm2"))
def test_fast_tokenizer_has_the_tokens_of_transformers(
    pair_of: Callable[[str], Pair], vocabulary: str
) -> None:
    fast, whole = pair_of(vocabulary)
    assert type(whole).__name__ == "TokenizersBackend"
    assert fast.get_vocab() == whole.get_vocab()
    assert len(fast) == len(whole)
    assert fast.special_tokens_map == whole.special_tokens_map
    assert (fast.eos_token_id, fast.pad_token_id) == (whole.eos_token_id, whole.pad_token_id)
    assert described(fast) == described(whole)


def described(tokenizer: Any) -> dict[int, str]:
    return {token_id: repr(token) for token_id, token in tokenizer.added_tokens_decoder.items()}


@pytest.mark.parametrize("vocabulary", slow_but(VOCABULARIES, "smollm2", "tekken"))
@SETTINGS
@given(text=TEXTS, is_special=st.booleans())
def test_fast_tokenizer_encodes_and_decodes_as_transformers(
    pair_of: Callable[[str], Pair], vocabulary: str, text: str, is_special: bool
) -> None:
    fast, whole = pair_of(vocabulary)
    ids = fast.encode(text, add_special_tokens=is_special)
    assert ids == whole.encode(text, add_special_tokens=is_special)
    assert fast.encode(text) == whole.encode(text)
    assert fast.decode(ids, skip_special_tokens=is_special) == whole.decode(
        ids, skip_special_tokens=is_special
    )
    for at in range(len(ids)):  # halves of characters
        assert fast.decode(ids[at:]) == whole.decode(ids[at:])


@pytest.mark.parametrize("vocabulary", slow_but(VOCABULARIES, "smollm2", "tekken"))
@pytest.mark.parametrize("family", slow_but(FAMILIES, "llama3", "qwen3"))
@settings(SETTINGS, max_examples=5)
@given(data=st.data())
def test_template_on_it_makes_the_tokens_of_transformers(
    pair_of: Callable[[str], Pair], family: str, vocabulary: str, data: st.DataObject
) -> None:
    fast, whole = pair_of(vocabulary)
    ours, theirs = (
        ChatTemplate(each, chat_template=source(family), chat_template_kwargs={"bos_token": "<s>"})
        for each in (fast, whole)
    )
    question, answer, result = data.draw(TEXTS), data.draw(TEXTS), data.draw(TEXTS)
    system = data.draw(st.none() | TEXTS)
    messages: list[dict[str, Any]] = [] if system is None else [said("system", system)]
    messages += [said("user", question)]
    if data.draw(st.booleans()):
        messages += [
            said("assistant", answer) | {"tool_calls": [CALL]},
            said("tool", result) | {"name": "weather", "tool_call_id": "call00000"},
            said("assistant", answer),
            said("user", question),
        ]
    tools = data.draw(st.sampled_from([None, TOOLS]))
    ids = outcome(lambda each: each.prompt_ids(messages, tools), ours)
    assert ids == outcome(lambda each: each.prompt_ids(messages, tools), theirs)
    following = [said("tool", result) | {"name": "weather", "tool_call_id": "call00000"}]
    for added in (following, [said("user", question)]):
        assert outcome(lambda each: each.observation_ids(added, after=None), ours) == outcome(  # noqa: B023
            lambda each: each.observation_ids(added, after=None),  # noqa: B023
            theirs,
        )
    assert ours.stop_token_ids == theirs.stop_token_ids
    if isinstance(ids, list):
        assert ours.decode(ids) == theirs.decode(ids)


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def outcome(ask: Any, template: ChatTemplate) -> Any:
    try:
        return list(ask(template))
    except TemplateError as error:
        return str(error)


class Colour(enum.StrEnum):
    RED = "red"

    def __str__(self) -> str:
        return "anything"


@dataclasses.dataclass
class Point:
    x: int
    y: Any


class Dumped:
    def model_dump(self) -> dict[str, Any]:
        return {"a": (1, None)}


MESSAGES = [
    {"role": "system", "content": " Zürich <b> & 'quoted'\n", "name": None},
    {
        "role": "user",
        "content": "second",
        "thinking": None,
        "reasoning": "why",
        "flags": [True, 1.5],
    },
    {"role": "assistant", "content": "third", "reasoning_content": "how", "thinking": "what"},
    {
        "role": "user",
        "content": "odd",
        "odd": [Colour.RED, Point(1, Point(2, None)), Dumped(), {1, 2}, object, (1, "x"), b"bytes"],
        "numbers": [np.int64(3), np.float32(0.5), np.bool_(False), np.str_("s"), np.zeros(2), 1j],
        7: "key",
    },
]
TEMPLATES = (
    "{{ messages | tojson }}",
    "{{ messages | tojson(indent=2) }}{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}",
    "{{ messages[0].content | tojson(ensure_ascii=true) }}{{ messages[0] is mapping }}",
    "{{ messages[3] }}{% for value in messages[3].odd %}{{ value }}|{% endfor %}",
    "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{m.reasoning}}{% endfor %}",
    "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "  {% if true %}\n    x\n  {% endif %}\ny\n\n",
    "{%- if true -%}  a  {%- endif %} \n {{- 'b' -}} \n c",
    "a {% generation %} b {% endgeneration %} c",
    "a\n  {%- generation -%} b\n{% endgeneration %}\n c",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% for m in messages %}{% generation %}{{ loop.index }}{% endgeneration %}{% endfor %}",
    "{% generation %}never ended",
    "{% set ns = namespace(n=0) %}{% for m in tools %}{% set ns.n = 1 %}{% endfor %}{{ ns.n }}",
    "{% set ns = namespace(self=1, **{'b': 2}) %}{{ ns.self }}{{ ns.b }}{{ ns.c is defined }}",
    "{{ namespace({'a': 1}).a }}{% set ns = namespace(_a=1) %}",
    "{% set ns = namespace() %}{% set ns._a = 1 %}{{ ns._a }}",
    "{{ dict(a=1, b=[2]) }}{{ dict([('c', 3)]) }}{{ dict.fromkeys(['x', 'y'], 3) }}",
    "{{ dict.mro() }}",
    "{{ raise_exception('no: ' ~ messages[0].content) }}",
    "{{ strftime_now('%Y') }}{{ strftime_now(format='%m') }}",
    "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token is defined }}{{ nothing }}",
    "{{ tools }}{{ documents }}{{ add_generation_prompt }}{{ enable_thinking }}",
    "{% macro m(x) %}[{{ x }}{{ caller() }}]{% endmacro %}{% call m(1) %}in{% endcall %}",
    "{{ messages | map(attribute='role') | join(',') }}{{ messages | selectattr('name') | list }}",
    "{{ messages | length }}{{ messages[0].content.split('<')[0] | trim | upper }}{{ 7 // 2 }}",
    "{{ tools[0].function.parameters.properties.items() | list }}{{ messages[-1].role[::-1] }}",
    "{{ messages.append(1) }}",
    "{% set _ = messages[0].update({'a': 1}) %}",
    "{{ ''.__class__.__mro__ }}{{ messages.__class__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ raise_exception.__globals__ }}{{ namespace.__init__.__globals__ }}",
    "{{ strftime_now.__globals__['sys'] }}",
    "{{ range(1000000) | length }}",
    "{% include 'other' %}",
    "{{ messages[0].content + 1 }}",
    "{{ nothing.at.all }}",
    "{% for m in messages %}",
    "{{ '<b>' | e }}{{ '<b>' }}{{ '<b>' | safe }}",
)


@pytest.mark.parametrize("template", slow_after(4, TEMPLATES))
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_template_renders_as_in_transformers(template: str, tools: Any) -> None:
    whole = simulated_tokenizer()
    fast = FastTokenizer(
        whole.backend_tokenizer,
        special_tokens=whole.special_tokens_map,
        chat_template=template,
        whole=lambda: pytest.fail("asked transformers"),
    )
    whole.chat_template = template
    before = repr(MESSAGES)
    assert rendered(fast, tools) == rendered(whole, tools)
    assert repr(MESSAGES) == before


def rendered(tokenizer: Any, tools: Any) -> Any:
    """The text, or what was raised; our words for what the sandbox forbids are our own."""
    try:
        return tokenizer.apply_chat_template(
            MESSAGES,
            tools=tools,
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=Colour.RED,
            pad_token="<pad>",
        )
    except Exception as error:
        if isinstance(error, SecurityError):
            return type(error)
        return type(error), re.sub(r"'[\w.]+ object'", "an object", str(error))


@pytest.mark.parametrize("model_type", slow_after(3, [None, *MODEL_TYPES]))
def test_fast_tokenizer_is_read_where_transformers_takes_the_file_as_it_is(
    small: Path, model_type: str | None
) -> None:
    if model_type is not None:
        change(small / "config.json", model_type=model_type)
    change(small / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    fast, whole = both(small)
    assert type(whole).__name__ == "TokenizersBackend"
    assert fast.backend_tokenizer.to_str() == whole.backend_tokenizer.to_str()
    assert fast.chat_template == whole.chat_template


def test_fast_tokenizer_is_read_from_what_older_versions_saved(small: Path) -> None:
    template = (small / "chat_template.jinja").read_text()
    (small / "chat_template.jinja").unlink()
    token = {
        "content": "<|im_end|>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    change(
        small / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        chat_template=template,
        added_tokens_decoder={"258": token},
        additional_special_tokens=["<|im_start|>"],
        eos_token=token | {"__type": "AddedToken"},
        clean_up_tokenization_spaces=True,
        add_bos_token=True,
    )
    change(small / "special_tokens_map.json", eos_token="<|im_end|>")
    fast, whole = both(small)
    assert fast.chat_template == whole.chat_template == template
    assert fast.special_tokens_map == whole.special_tokens_map
    assert described(fast) == described(whole)
    text = "a<|im_start|>b , c ."
    assert fast.encode(text) == whole.encode(text)
    assert fast.decode(fast.encode(text)) == whole.decode(whole.encode(text))


OTHERS: tuple[dict[str, Any], ...] = (
    {"tokenizer_class": "Qwen2Tokenizer"},
    {"tokenizer_class": "LlamaTokenizerFast"},
    {"tokenizer_class": None},
    {"auto_map": {"AutoTokenizer": [None, "own.Tokenizer"]}},
    {"backend": "custom"},
    {"split_special_tokens": True},
    {"add_prefix_space": True},
    {"image_token": "<|im_start|>"},
    {"extra_special_tokens": ["<new>"]},
    {"extra_special_tokens": {"image_token": "<|im_start|>"}},
    {"bos_token": "<new>"},
    {"bos_token": 7},
    {"added_tokens_decoder": {"259": {"content": "<new>", "special": True}}},
    {"added_tokens_decoder": {"258": {"content": "<|im_end|>", "lstrip": True}}},
    {"chat_template": [{"name": "default", "template": "a"}, {"name": "b", "template": "b"}]},
)


@pytest.mark.parametrize("entries", slow_after(4, OTHERS), ids=lambda entries: str(entries)[1:60])
def test_tokenizer_with_rules_of_its_own_is_left_to_transformers(
    small: Path, entries: dict[str, Any]
) -> None:
    (small / "chat_template.jinja").unlink()
    change(small / "tokenizer_config.json", **entries)
    assert read(small) is None


@pytest.mark.parametrize(
    "file", ["tekken.json", "special_tokens_map.json", "added_tokens.json", "config.json"]
)
def test_tokenizer_with_files_of_other_kinds_is_left_to_transformers(
    small: Path, file: str
) -> None:
    change(small / file, model_type="qwen2")
    assert read(small) is None


@pytest.mark.parametrize("part", ["truncation", "padding"])
def test_tokenizer_that_cuts_or_pads_is_left_to_transformers(small: Path, part: str) -> None:
    backend = simulated_tokenizer().backend_tokenizer
    backend.enable_truncation(5) if part == "truncation" else backend.enable_padding()
    backend.save(str(small / "tokenizer.json"))
    assert read(small) is None


@pytest.mark.parametrize("content", [None, "[]", "{", "\xff", '{"version": "1.0"}'])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizer_with_broken_files_is_left_to_transformers(
    small: Path, file: str, content: str | None
) -> None:
    (small / file).unlink()
    if content is not None:
        (small / file).write_text(content, encoding="latin-1")
    assert read(small) is None


def test_loader_takes_the_one_it_can_read_and_else_transformers(small: Path) -> None:
    assert isinstance(load_chat_template(str(small)).tokenizer, FastTokenizer)
    other = small / "other"
    shutil.copytree(small, other)
    change(other / "tokenizer_config.json", image_token="<|im_start|>")
    loaded = load_chat_template(str(other))
    assert type(loaded.tokenizer).__name__ == "TokenizersBackend"
    assert loaded.fingerprint == load_chat_template(str(small)).fingerprint


def test_fast_tokenizer_asks_transformers_for_the_rest(small: Path) -> None:
    fast: Any = load_chat_template(str(small)).tokenizer
    whole = AutoTokenizer.from_pretrained(small)
    text, messages = "a<|im_end|>b", [said("user", "hi")]
    assert fast(text)["input_ids"] == whole(text)["input_ids"]
    assert fast.convert_tokens_to_ids("<|im_end|>") == 258
    assert fast.pad_token == "<|endoftext|>"
    assert fast.apply_chat_template(messages)["input_ids"] == whole.encode(
        whole.apply_chat_template(messages, tokenize=False)
    )
    assert fast.apply_chat_template([messages, messages], tokenize=False) == (
        whole.apply_chat_template([messages, messages], tokenize=False)
    )
    assert fast.decode(np.array([97, 98])) == "ab"
    assert fast.encode(text, truncation=True, max_length=1) == [97]
    with pytest.raises(AttributeError, match="nothing"):
        fast.nothing  # noqa: B018
    with pytest.raises(AttributeError, match="_nothing"):
        fast._nothing  # noqa: B018
