"""Word by word and byte by byte gives what the tokenizers library gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import rollout
from chat_material import QWEN_PATTERN, SPECIALS, VOCABULARIES, chat, tokenizer
from rollout.chat.encoding import TextEncoder, WrittenText, encoder_of
from rollout.chat.ids import LONG
from rollout.chat.tokenizer_parts import byte_letters
from rollout.chat.word_ids import word_ids
from slow_cases import slow_after, slow_but

each_vocabulary = pytest.mark.parametrize("vocabulary", slow_but(VOCABULARIES, "smollm2"))

#: What public tokenizers divide by.
DIVIDERS = {
    "gpt2": None,
    "qwen2": QWEN_PATTERN,
    "llama3": QWEN_PATTERN.replace(r"\p{N}|", r"\p{N}{1,3}|"),
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "some": r"[\p{P}\p{S}]|[a-f&&c-z]+|\p{Lu}\p{Ll}*|\s+$",
}
AWKWARD = st.sampled_from(
    [
        *(" ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "'", "a", "B", "7", "123", "x_y", ".", "://"),
        *("\x1c", "\x1f", "\x0b", "\x00", "\x7f", "-", "[", "]", "^", "\\", "~", "|", "&", "$"),
        *("<|im_end|>", "<think>", "<", "é", "漢字", "🙂", "\u2028", "ſ", "K", "<s>", "[INST]"),
        *(name for names in SPECIALS.values() for name in names.split()),
    ]
)
TEXTS = st.lists(AWKWARD, max_size=30).map("".join) | st.text(max_size=200)
ASCII = st.text(st.characters(max_codepoint=127), max_size=200)
ENDS = st.sampled_from(["", "\n", "\n\n", "\r\n", "\t", " ", "\n ", " \n"])
BLANKS = st.lists(AWKWARD | st.text(st.characters(max_codepoint=127), max_size=6)).map(" ".join)
SOURCES = sorted(Path(rollout.__file__).parent.rglob("*.py"))


def of_library(own: PreTrainedTokenizerFast, text: str) -> list[int]:
    return own.backend_tokenizer.encode(text, add_special_tokens=False).ids


def byte_level(pattern: str | None, **parts: Any) -> Tokenizer:
    """A tokenizer of bytes and a few longer tokens that divides so."""
    letters = byte_letters()
    vocabulary = {letter: at for at, letter in enumerate(letters)}
    merges = [(letters[97 + at], letters[97 + (at + 3) % 26]) for at in range(26)]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges))
    dividers: list[Any] = []
    if pattern is not None:
        dividers.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    dividers.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(dividers)
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


@each_vocabulary
@given(text=TEXTS | ASCII | BLANKS)
@settings(deadline=None, max_examples=60)
def test_encode_any_text_is_what_the_library_makes_of_it(vocabulary: str, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    own = tokenizer(vocabulary)
    assert encoder_of(own).encode(text) == of_library(own, text)


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "llama3"])
@given(words=st.lists(AWKWARD, min_size=1, max_size=6), begin=ENDS, end=ENDS)
@settings(deadline=None, max_examples=200)
def test_encode_words_between_white_space_is_what_the_library_makes_of_them(
    name: str, words: list[str], begin: str, end: str
) -> None:
    own = _DIVIDED[name]
    text = begin + " ".join(words) + end
    assert encoder_of(own).encode(text) == of_library(own, text)


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "llama3"])
def test_word_ids_text_between_line_ends_has_only_new_words_divided(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = _DIVIDED[name]
    ids = word_ids(own.backend_tokenizer, lambda text, _: of_library(own, text))
    assert ids is not None
    ids("\nthe result of the call was found\n")
    divided: list[str] = []
    by_patterns = ids.by_patterns

    def note(text: str) -> bytes:
        divided.append(text)
        return by_patterns(text)

    monkeypatch.setattr(ids, "by_patterns", note)
    text = "\nthe call of the result was lost\n"
    assert ids(text) == of_library(own, text)
    assert divided == [" lost\n"]


@each_vocabulary
def test_encode_source_code_is_what_the_library_makes_of_it(vocabulary: str) -> None:
    own = tokenizer(vocabulary)
    for path in SOURCES[len(vocabulary) :: 30]:
        text = path.read_text(encoding="utf-8")[:LONG]
        assert encoder_of(own).encode(text) == of_library(own, text)


@each_vocabulary
def test_word_ids_of_real_vocabularies_are_known(vocabulary: str) -> None:
    backend = tokenizer(vocabulary).backend_tokenizer
    assert word_ids(backend, lambda text, _: of_library(tokenizer(vocabulary), text)) is not None


@pytest.mark.parametrize("name", slow_after(2, DIVIDERS))
@given(text=ASCII | TEXTS | BLANKS)
@settings(deadline=None, max_examples=60)
def test_encode_text_of_any_divider_is_what_the_library_makes_of_it(name: str, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    own = _DIVIDED[name]
    assert encoder_of(own).encode(text) == of_library(own, text)


_DIVIDED = {
    name: PreTrainedTokenizerFast(tokenizer_object=byte_level(pattern), eos_token="<end>")
    for name, pattern in DIVIDERS.items()
}


@pytest.mark.parametrize(
    ("name", "is_known"), [*((name, name != "some") for name in DIVIDERS)], ids=[*DIVIDERS]
)
def test_word_ids_divider_that_means_something_else_in_python_is_left(
    name: str, is_known: bool
) -> None:
    backend = _DIVIDED[name].backend_tokenizer
    found = word_ids(backend, lambda text, _: of_library(_DIVIDED[name], text))
    assert (found is not None) == is_known


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Lowercase()},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", "b")])},
        {"pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": pre_tokenizers.Metaspace()},
        {"model": models.WordLevel({"a": 0, "u": 1}, unk_token="u")},
    ],
    ids=["lowercase", "replace", "prefix", "metaspace", "word level"],
)
def test_word_ids_tokenizer_that_does_more_is_left_to_the_library(parts: dict[str, Any]) -> None:
    backend = byte_level(None, **parts)
    assert word_ids(backend, lambda text, _: backend.encode(text).ids) is None


@pytest.mark.parametrize(
    "added",
    [
        AddedToken("<x>", lstrip=True, special=True),
        AddedToken("<x>", rstrip=True, special=True),
        AddedToken("<x>", single_word=True, special=True),
        AddedToken("<x>", normalized=True, special=True),
        AddedToken("    ", normalized=False, special=False),
        AddedToken("<b>", normalized=False, special=False),
    ],
    ids=["lstrip", "rstrip", "single word", "normalized", "blanks", "markup"],
)
def test_encode_text_with_an_unusual_added_token_is_what_the_library_makes_of_it(
    added: AddedToken,
) -> None:
    own = PreTrainedTokenizerFast(tokenizer_object=byte_level(QWEN_PATTERN), eos_token="<end>")
    own.add_tokens([added])
    encoder = TextEncoder(own)
    for text in ("a <x> b", "a  <x>\n", "a<x>b<x>", "x    y", "<b>bold</b>", "<end> a", "a<end>"):
        assert encoder.encode(text) == of_library(own, text), text


@each_vocabulary
@given(text=TEXTS)
@settings(deadline=None, max_examples=30)
def test_encode_written_plain_places_hold_no_special_token(vocabulary: str, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    own = tokenizer(vocabulary)
    encoder = encoder_of(own)
    head, tail = "<|im_start|>user\n", "<|im_end|>\n"
    places = tuple(encoder.special_token_spellings(text, len(head)))
    ids = encoder.encode_written(WrittenText(head + text + tail, places))
    specials = [token for token in ids if token in encoder.specials.values()]
    assert specials == [encoder.specials["<|im_start|>"], encoder.specials["<|im_end|>"]]


@each_vocabulary
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_decode_any_ids_is_what_the_library_makes_of_them(
    vocabulary: str, data: st.DataObject
) -> None:
    template = chat(vocabulary, "chatml")
    ids = data.draw(st.lists(st.integers(0, template.vocab_size + 3), max_size=60))
    assert template.decode(ids) == template.tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


@each_vocabulary
def test_prompt_ids_of_prompts_with_one_head_are_what_the_library_makes_of_them(
    vocabulary: str,
) -> None:
    template = chat(vocabulary, "qwen2_5")
    schema = {"type": "function", "function": {"name": "look", "description": "Look é", "x": 1}}
    for question in ("Why?", "Warum nicht?", "为什么", "Why?", "a " * 400):
        messages = [{"role": "user", "content": question}]
        text = template.written(messages, [schema], add_generation_prompt=True).text
        ids = list(template.prompt_ids(messages, [schema]))
        assert ids == of_library(tokenizer(vocabulary), text)
