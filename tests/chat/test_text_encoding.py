"""Texts become the ids that their tokenizer gives, whoever encodes them and in whatever pieces."""

from __future__ import annotations

import logging
import re
import sys
from array import array
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from chat_material import VOCABULARIES, chat, tokenizer
from rollout.chat import ChatTemplate, encoding, tokenizer_backend
from rollout.chat.encoding import TextEncoder, WrittenText, get_encoder, make_plain_codec
from rollout.chat.tokenizer_backend import LONG, copy_tokenizer, spell_token
from rollout.errors import TemplateError
from rollout.testing import simulated_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TEXTS = st.lists(
    st.one_of(
        st.text(max_size=40),
        st.text(st.characters(max_codepoint=127), max_size=40),
        st.sampled_from([" ", "  ", "\n\n", "\r\n", "\t", "漢字", "e\u0301", "🙂", "<think>"]),
        st.sampled_from(["<|im_end|>", "<|im_start|>", "</s>", "1234", "it's a", "x = {}\n"]),
    ),
    max_size=12,
).map("".join)
each_vocabulary = pytest.mark.parametrize(
    "vocabulary",
    [
        pytest.param(name, marks=() if name in ("smollm2", "qwen") else pytest.mark.slow)
        for name in VOCABULARIES
    ],
)


def library_ids(vocabulary: str, text: str) -> list[int]:
    backend = tokenizer(vocabulary).backend_tokenizer
    return list(backend.encode(text, add_special_tokens=False).ids)


@each_vocabulary
@given(text=TEXTS)
def test_encode_any_text_gives_the_ids_of_the_library(vocabulary: str, text: str) -> None:
    encoder = get_encoder(tokenizer(vocabulary))
    assert encoder.encode(text).tolist() == library_ids(vocabulary, text)


@each_vocabulary
@given(text=TEXTS)
def test_encode_plain_places_hold_no_special_token(vocabulary: str, text: str) -> None:
    encoder = get_encoder(tokenizer(vocabulary))
    head, tail = "<|im_start|>user\n", "<|im_end|>"
    spelled = encoder.pattern.finditer(text)
    places = tuple((each.start() + len(head), each.end() + len(head)) for each in spelled)
    ids = encoder.encode(WrittenText(head + text + tail, places)).tolist()
    special = set(encoder.specials.values())
    assert [token for token in ids if token in special] == [ids[0], ids[-1]]
    whole = tokenizer(vocabulary).decode(ids, clean_up_tokenization_spaces=False)
    known = tokenizer(vocabulary).decode(library_ids(vocabulary, head + text + tail))
    assert whole == known


def test_encode_half_of_a_character_is_refused() -> None:
    encoder = get_encoder(tokenizer("smollm2"))
    for text in ("\ud800", "x" * LONG + "\udc00"):
        with pytest.raises(TemplateError, match="half of a character"):
            encoder.encode(text)


# Who encodes


def test_fastokens_gives_the_ids_of_tokenizers() -> None:
    pytest.importorskip("fastokens")
    plain = copy_tokenizer(tokenizer("smollm2").backend_tokenizer)
    plain.encode_special_tokens = True
    assert tokenizer_backend.open_fastokens(plain) is not None


class OtherTokenizer:
    """What gives other ids, or other texts, than `tokenizers` for one text of the self-test."""

    def __init__(self, backend: Any, wrong: str, other: str = "ids") -> None:
        self._backend, self._wrong, self._other = backend, wrong, other

    def from_json_str(self, state: str) -> OtherTokenizer:
        return self

    def encode_batch_flat(self, texts: list[str], *, split_special_tokens: bool) -> Any:
        text = texts[0] + ("x" if self._other == "ids" and self._wrong in texts[0] else "")
        return array("i", self._backend.encode(text).ids).tobytes(), b""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text + ("x" if self._other == "texts" and self._wrong in text else "")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend, and what is known of others forgotten."""
    monkeypatch.setattr(tokenizer_backend, "_TRIED", {})
    tokenizer_backend._log_once.cache_clear()
    return simulated_tokenizer().backend_tokenizer


@pytest.mark.parametrize("other", ["ids", "texts"])
def test_fastokens_that_disagrees_is_left_and_the_log_says_so_once(
    other: str,
    library: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "rollout.chat")
    tokenizer = OtherTokenizer(library, "東京", other)
    monkeypatch.setitem(sys.modules, "fastokens", type("Library", (), {"Tokenizer": tokenizer}))
    for _ in range(2):
        encode, decode = make_plain_codec(library, ["<|im_end|>"])
        ids = array("i", encode("東京 a")).tolist()
        assert ids == library.encode("東京 a").ids
        assert decode(ids) == "東京 a"
    said = [record.message for record in caplog.records]
    assert said == [
        "texts are encoded by tokenizers: fastokens gives other ids, or texts, for a vocabulary"
    ]


def test_fastokens_that_is_missing_leaves_texts_to_tokenizers(
    library: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollout.chat")
    monkeypatch.setitem(sys.modules, "fastokens", None)
    for _ in range(2):
        assert list(array("i", make_plain_codec(library, [])[0]("a b"))) == list(b"a b")
    assert len(caplog.records) == 1


# Tokenizers that cannot be split


def word_pieces(normalizer: Any = None, divider: Any = None, **added: bool) -> Any:
    """A tokenizer of letters with ``<a>`` and ``<b>``, which puts texts together as it is told."""
    letters = {letter: at for at, letter in enumerate("▁ abcdefghi<>/\n")}
    backend = Tokenizer(models.BPE(letters, [], unk_token=" "))
    if normalizer is not None:
        backend.normalizer = normalizer
    if divider is not None:
        backend.pre_tokenizer = divider
    backend.add_special_tokens([AddedToken("<a>", normalized=False)])
    backend.add_special_tokens([AddedToken("<b>", **{"normalized": False, **added})])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


UNUSUAL = {
    "prepends once": word_pieces(divider=pre_tokenizers.Metaspace(prepend_scheme="first")),
    "prepends": word_pieces(normalizers.Prepend("▁")),
    "always prepends": word_pieces(divider=pre_tokenizers.Metaspace(prepend_scheme="always")),
    "takes white space before": word_pieces(lstrip=True),
    "takes white space after": word_pieces(rstrip=True),
    "words alone": word_pieces(single_word=True),
    "finds in normalized text": word_pieces(normalizers.Lowercase(), normalized=True),
}


@pytest.mark.parametrize("name", UNUSUAL)
@given(text=st.lists(st.sampled_from(["<a>", "<b>", " ", "a", "bc d", "\n", "e"])).map("".join))
def test_encode_by_a_tokenizer_that_cannot_be_split_takes_the_whole_text(
    name: str, text: str
) -> None:
    own = UNUSUAL[name]
    ids = own.backend_tokenizer.encode(text, add_special_tokens=False).ids
    assert TextEncoder(own).encode(text).tolist() == ids


@pytest.mark.parametrize("name", UNUSUAL)
def test_encode_by_a_tokenizer_that_cannot_be_split_keeps_spelled_tokens_text(name: str) -> None:
    encoder = TextEncoder(UNUSUAL[name])
    ids = encoder.encode(WrittenText("<a>a <b> b<a>", ((5, 8),))).tolist()
    first, other = encoder.specials["<a>"], encoder.specials["<b>"]
    assert [ids.count(first), ids.count(other)] == [2, 0]


@pytest.mark.parametrize("name", UNUSUAL)
def test_encode_by_a_tokenizer_that_cannot_be_split_adds_nothing_beside_spelled_tokens(
    name: str,
) -> None:
    encoder, text = TextEncoder(UNUSUAL[name]), "ghi<a>e <b> \n <a>ghi ghi <a>\n"
    ids = {letter: UNUSUAL[name].convert_tokens_to_ids(letter) for letter in "ghi<b>"}
    spelt = {ids["g"]: ids["<"], ids["h"]: ids["b"], ids["i"]: ids[">"]}
    expected = [spelt.get(each, each) for each in encoder.encode(text)]
    plain = tuple(match.span() for match in re.finditer("ghi", text))
    assert encoder.encode(WrittenText(text.replace("ghi", "<b>"), plain)).tolist() == expected


def test_encode_by_a_tokenizer_in_python_splits_plain_places() -> None:
    class InPython:
        added_tokens_decoder = UNUSUAL["prepends"].added_tokens_decoder

        def encode(self, text: str, add_special_tokens: bool, **options: bool) -> Sequence[int]:
            is_split = options.get("split_special_tokens", False)
            return [900] if text == "<a>" and not is_split else [len(text), int(is_split)]

    encoder: Any = get_encoder(InPython())  # type: ignore[arg-type]
    special = encoder.specials["<a>"]
    assert encoder.encode("<a>").tolist() == [900]
    assert encoder.encode(WrittenText("<a>x<a>", ((4, 7),))).tolist() == [special, 4, 1]
    with pytest.raises(AttributeError, match="InPython"):  # its own error
        encoder.decode([1])


# What is remembered


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pieces that were encoded, as encoders made from now on do."""
    pieces: list[str] = []

    def make(backend: Any, specials: Iterable[str]) -> tuple[Any, Any]:
        exact, decode = make_plain_codec(backend, specials)

        def encode(text: str) -> bytes:
            pieces.append(text)
            return exact(text)

        return encode, decode

    monkeypatch.setattr(encoding, "make_plain_codec", make)
    return pieces


def test_encode_forgets_long_pieces_that_were_used_longest_ago(
    encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_REMEMBERED_BYTES", 512 * 1024)
    encoder = TextEncoder(simulated_tokenizer())
    letters = "abcdefghijklmnopqrstuvwxyz"
    for letter in (*letters, "z", "a"):
        encoder.encode(letter * 16_000)
    assert [text[0] for text in encoded] == [*letters, "a"]


def test_prompt_ids_of_prompts_with_one_head_encode_it_once(encoded: list[str]) -> None:
    template = ChatTemplate(simulated_tokenizer())
    system = {"role": "system", "content": "Be brief. " * 20}
    for question in ("one", "two", "two"):
        ids = template.prompt_ids([system, {"role": "user", "content": question}])
        assert template.decode(ids).count("Be brief. ") == 20
    assert sum("Be brief" in text for text in encoded) == 1
    assert sum("two" in text for text in encoded) == 1


# Bytes of one token


@pytest.mark.parametrize("vocabulary", ["smollm2", "qwen"])
def test_spellings_of_parts_of_characters_join_to_the_text(vocabulary: str) -> None:
    template, text = chat(vocabulary, "chatml"), "漢字 👩‍👩‍👧 so<|im_end|>"
    spelt = [template.spell_token(each) for each in template.text_ids(text)]
    assert b"".join(spelt) == text.encode()
    assert any(b"\xef\xbf\xbd" not in each and not _is_text(each) for each in spelt)


def spelled() -> Tokenizer:
    """Words after a mark of their space, and bytes for what has no word."""
    words = ["▁a", "▁day", "s", "▁", "é", "。"]
    names = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, []))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def test_bytes_of_a_vocabulary_of_words_are_spelt_as_they_are() -> None:
    backend = spelled()
    assert [spell_token(backend, each) for each in (2, 6 + 0xE6, 4)] == [
        b"s",
        b"\xe6",
        "é".encode(),
    ]


def _is_text(spelling: bytes) -> bool:
    return "\ufffd" not in spelling.decode(errors="replace")
