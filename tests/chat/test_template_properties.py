"""Tokens are exact for every chat format on real vocabularies, whatever the conversation.

Each rule is checked against another way to the same tokens: transformers' own rendering, a plain
encoder without special tokens, and renderings of conversations whose contents are harmless words.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from chat_material import (
    FAMILIES,
    HOSTILE,
    LOOK_ALIKES,
    PIECES,
    VOCABULARIES,
    chat,
    source,
    tokenizer,
    variables,
)
from rollout.chat import Transcript
from rollout.types import Message, ToolCall

if TYPE_CHECKING:
    from collections.abc import Sequence

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
PLAIN = st.lists(PIECES, min_size=1, max_size=8).map("".join)
SETTINGS = settings(suppress_health_check=list(HealthCheck), deadline=None)
#: Contents of an assistant in prompts and turns, which some formats trim or search.
WORDS = st.lists(st.sampled_from(["It", " is", " 12", " °C", ".", " 漢字"]), min_size=1).map(
    "".join
)


def _is_harmless(text: str) -> bool:
    return not any(name in text for name in LOOK_ALIKES)


@st.composite
def conversations(draw: st.DrawFn, contents: st.SearchStrategy[str]) -> list[Message]:
    """A prompt, then turns: an answer or calls, and what follows them; ends with a question."""
    system = draw(st.none() | contents)
    messages = [] if system is None else [Message(role="system", content=system)]
    messages.append(Message(role="user", content=draw(contents)))
    for turn in range(draw(st.integers(0, 2))):
        said = draw(WORDS)
        if draw(st.booleans()):
            messages += _call_and_result(turn, said, draw(contents))
            said = draw(WORDS)
        messages.append(Message(role="assistant", content=said))
        messages.append(Message(role="user", content=draw(contents)))
    return messages


def _call_and_result(turn: int, said: str, result: str) -> list[Message]:
    call = ToolCall(name="weather", arguments={"city": "Bern", "days": 3}, id=f"call0000{turn}")
    return [
        Message(role="assistant", content=said, tool_calls=(call,)),
        Message(role="tool", content=result, name="weather", tool_call_id=call.id),
    ]


@st.composite
def observations(draw: st.DrawFn, contents: st.SearchStrategy[str]) -> list[Message]:
    """What may follow a turn: a user's words, or the results of one call or several."""
    if draw(st.booleans()):
        return [Message(role="user", content=draw(contents))]
    count = draw(st.integers(1, 3))
    return [
        Message(role="tool", content=draw(contents), name="weather", tool_call_id=f"call0000{at}")
        for at in range(count)
    ]


FORMATS = pytest.mark.parametrize(
    ("vocabulary", "examples"),
    [(name, 2) for name in VOCABULARIES[:2]]
    + [pytest.param(name, 1000, marks=pytest.mark.slow) for name in VOCABULARIES],
)
FAMILY = st.sampled_from(FAMILIES)


@cache
def plain_tokenizer(vocabulary: str) -> Any:
    """The vocabulary without its special tokens: what text becomes where nothing is special."""
    import json

    state = json.loads(tokenizer(vocabulary).backend_tokenizer.to_str())
    state["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(state))


@cache
def special_ids(vocabulary: str) -> dict[int, str]:
    added = tokenizer(vocabulary).added_tokens_decoder
    return {token_id: token.content for token_id, token in added.items() if token.content.strip()}


def specials_in(vocabulary: str, ids: Sequence[int]) -> list[str]:
    names = special_ids(vocabulary)
    return [names[token] for token in ids if token in names]


def in_pieces(vocabulary: str, ids: Sequence[int]) -> list[list[int]]:
    """The ids between special ones."""
    names, pieces = special_ids(vocabulary), [[]]
    for token in ids:
        if token in names:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces


def normalized(vocabulary: str, text: str) -> str:
    return unicodedata.normalize("NFC", text) if vocabulary == "qwen" else text


def rendered(
    vocabulary: str, family: str, messages: Sequence[Message], *, prompts: bool = True
) -> str:
    """The conversation as transformers renders it, arguments of calls as the family wants them."""
    from rollout.chat.messages import template_messages

    adapted = chat(vocabulary, family)._renderer.adapted(template_messages(messages))
    text = tokenizer(vocabulary).apply_chat_template(
        list(adapted),
        tools=TOOLS,
        chat_template=source(family),
        add_generation_prompt=prompts,
        tokenize=False,
        **variables(family),
    )
    assert isinstance(text, str)
    return text


def with_words(messages: Sequence[Message]) -> list[Message]:
    """The conversation with a harmless word in the place of each content that others wrote."""
    return [
        message
        if message.role == "assistant"
        else Message(
            role=message.role,
            content=f"word{at}",
            name=message.name,
            tool_call_id=message.tool_call_id,
        )
        for at, message in enumerate(messages)
    ]


def check_exact(vocabulary: str, ids: Sequence[int], text: str, harmless: str) -> None:
    """`ids` spell `text`; special are those of `harmless` only; pieces between are whole."""
    names = re.compile(
        "|".join(map(re.escape, sorted(special_ids(vocabulary).values(), key=len, reverse=True)))
    )
    assert specials_in(vocabulary, ids) == names.findall(harmless)
    assert tokenizer(vocabulary).decode(ids, clean_up_tokenization_spaces=False) == normalized(
        vocabulary, text
    )
    backend = plain_tokenizer(vocabulary)
    for piece in in_pieces(vocabulary, ids):
        spelled = backend.decode(piece, skip_special_tokens=False)
        assert backend.encode(spelled, add_special_tokens=False).ids == piece


def check_prompt(vocabulary: str, family: str, messages: Sequence[Message]) -> None:
    ids = chat(vocabulary, family).prompt_ids(messages, TOOLS).tolist()
    text = rendered(vocabulary, family, messages)
    check_exact(vocabulary, ids, text, rendered(vocabulary, family, with_words(messages)))
    if all(_is_harmless(message.content or "") for message in messages):
        expected = tokenizer(vocabulary)(text, add_special_tokens=False)["input_ids"]
        assert ids == expected


def check_observation(vocabulary: str, family: str, messages: Sequence[Message]) -> None:
    template = chat(vocabulary, family)
    ids = template.observation_ids(messages, after=None).tolist()
    harmless = template.observation_ids(with_words(messages), after=None).tolist()
    text = tokenizer(vocabulary).decode(ids, clean_up_tokenization_spaces=False)
    check_exact(vocabulary, ids, text, tokenizer(vocabulary).decode(harmless))
    for message in messages:
        said = normalized(vocabulary, message.content or "").strip()
        assert said in text or repr_of(said) in text
    if all(_is_harmless(message.content or "") for message in messages):
        expected = tokenizer(vocabulary)(text, add_special_tokens=False)["input_ids"]
        assert ids == expected


def repr_of(text: str) -> str:
    import json

    return json.dumps(text, ensure_ascii=False)[1:-1]


@FORMATS
def test_template_prompt_of_harmless_text_has_the_ids_of_transformers(
    vocabulary: str, examples: int
) -> None:
    @settings(SETTINGS, max_examples=examples)
    @given(FAMILY, conversations(PLAIN))
    def check(family: str, messages: list[Message]) -> None:
        assume(all(_is_harmless(message.content or "") for message in messages))
        check_prompt(vocabulary, family, messages)

    check()


@FORMATS
def test_template_prompt_with_spelled_tokens_keeps_them_text(
    vocabulary: str, examples: int
) -> None:
    @settings(SETTINGS, max_examples=examples)
    @given(FAMILY, conversations(HOSTILE))
    def check(family: str, messages: list[Message]) -> None:
        check_prompt(vocabulary, family, messages)

    check()


@FORMATS
def test_template_observation_with_spelled_tokens_keeps_them_text(
    vocabulary: str, examples: int
) -> None:
    @settings(SETTINGS, max_examples=examples)
    @given(FAMILY, observations(HOSTILE))
    def check(family: str, messages: list[Message]) -> None:
        check_observation(vocabulary, family, messages)

    check()


# A whole trajectory


#: Formats under which history stays as it was sampled, and how an answer is sampled in them.
SAMPLED = {
    "chatml": "{}<|im_end|>",
    "qwen2_5": "{}<|im_end|>",
    "qwen3": "{}<|im_end|>",
    "qwen3_coder": "{}<|im_end|>",
    "llama3": "{}<|eot_id|>",
    "mistral": "{}</s>",
    "deepseek_v3": "{}<｜end▁of▁sentence｜>",
    "glm4": "\n<think></think>\n{}",
    "kimi_k2": "{}<|im_end|>",
    "gemma": "{}<end_of_turn>",
}
#: What the model says, whether it is cut before its end token, and what follows.
Turn = tuple[str, bool, list[Message]]


@st.composite
def trajectories(draw: st.DrawFn) -> list[Turn]:
    turns = []
    for _ in range(draw(st.integers(1, 3))):
        is_cut = draw(st.booleans())
        said = draw(st.one_of(HOSTILE, st.just("")) if is_cut else HOSTILE)
        turns.append((said, is_cut, draw(observations(HOSTILE))))
    return turns


def check_transcript(
    vocabulary: str, family: str, prompt: list[Message], turns: list[Turn], random: Any
) -> None:
    template, transcript = chat(vocabulary, family), Transcript()
    end = template.stop_token_ids[-1]
    transcript.append_prompt(template.prompt_ids(prompt, TOOLS))
    pieces = [template.prompt_ids(prompt, TOOLS).tolist()]
    mask, log_probs = [False] * len(pieces[0]), [0.0] * len(pieces[0])
    for said, is_cut, messages in turns:
        # Not the canonical ids of a text: what was sampled is kept, whatever it decodes to.
        sampled = [random.randrange(300, 600) for _ in said] + ([] if is_cut else [end])
        scores = [-random.random() for _ in sampled]
        transcript.append_generated(
            sampled,
            scores,
            versions=[(1, len(sampled))],
            finish_reason="length" if is_cut else "stop",
        )
        added = template.observation_ids(messages, after=transcript.ids())
        whole = template.observation_ids(messages, after=None)
        assert added.tolist() == whole.tolist()[len(whole) - len(added) :]
        assert is_cut == (len(added) == len(whole)) or family == "glm4"
        transcript.append_observation(added)
        pieces += [sampled, added.tolist()]
        mask += [True] * len(sampled) + [False] * len(added)
        log_probs += scores + [0.0] * len(added)
    assert transcript.ids().tolist() == [token for piece in pieces for token in piece]
    assert transcript.mask().tolist() == mask
    assert transcript.log_probs().tolist() == pytest.approx(log_probs)


@FORMATS
def test_transcript_holds_the_prompt_what_was_sampled_and_what_was_added(
    vocabulary: str, examples: int
) -> None:
    @settings(SETTINGS, max_examples=examples)
    @given(FAMILY, conversations(HOSTILE), trajectories(), st.randoms(use_true_random=False))
    def check(family: str, prompt: list[Message], turns: list[Turn], random: Any) -> None:
        check_transcript(vocabulary, family, prompt, turns, random)

    check()


def called(vocabulary: str, said: str, results: Sequence[Message]) -> tuple[Message, str]:
    """A turn of Mistral that asks for `results`, and how it is sampled."""
    calls = [
        ToolCall(name="weather", arguments={"city": said}, id=result.tool_call_id or "")
        for result in results
    ]
    turn = Message(role="assistant", content="", tool_calls=calls)
    text = rendered(vocabulary, "mistral", [Message(role="user", content="q"), turn], prompts=False)
    return turn, text.partition("[/INST]")[2]


def check_rendering(
    vocabulary: str, family: str, turns: Sequence[tuple[str, list[Message]]]
) -> None:
    template = chat(vocabulary, family)
    messages = [Message(role="user", content="What now?")]
    ids = template.prompt_ids(messages, TOOLS)
    for said, following in turns:
        turn = Message(role="assistant", content=said.strip())
        sampled = SAMPLED[family].format(turn.content)
        if family == "mistral" and following[0].role == "tool":  # it takes results of calls only
            turn, sampled = called(vocabulary, said, following)
        ids.extend(tokenizer(vocabulary).encode(sampled, add_special_tokens=False))
        ids.extend(template.observation_ids(following, after=ids))
        messages += [turn, *following]
    texts = template.decode(ids), normalized(vocabulary, rendered(vocabulary, family, messages))
    if family == "mistral":  # it lists its tools before the last question
        tools = re.compile(r"\[AVAILABLE_TOOLS\].*?\[/AVAILABLE_TOOLS\]", re.DOTALL)
        texts = tools.sub("", texts[0]), tools.sub("", texts[1])
    assert texts[0] == texts[1]


@FORMATS
def test_transcript_of_an_append_only_format_decodes_to_its_full_rendering(
    vocabulary: str, examples: int
) -> None:
    @settings(SETTINGS, max_examples=examples)
    @given(
        st.sampled_from(sorted(SAMPLED)),
        st.lists(st.tuples(WORDS, observations(PLAIN)), min_size=1, max_size=3),
    )
    def check(family: str, turns: list[tuple[str, list[Message]]]) -> None:
        check_rendering(vocabulary, family, turns)

    check()
