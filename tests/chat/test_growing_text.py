"""Texts of ids that come bit by bit."""

from __future__ import annotations

from array import array
from random import Random  # noqa: TID251  (seeded: the same ids on every machine)

import pytest
from tokenizers import Tokenizer, decoders, models

from chat_material import chat
from rollout.chat.token_text import GrowingText, token_text
from slow_cases import slow_after


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


def check(growing: GrowingText, ids: list[int], whole: str, random: Random) -> str:
    told = ""
    while ids:
        size = random.choice((1, 1, 2, 5))
        told += growing.more(ids[:size])
        ids = ids[size:]
        assert whole.startswith(told)
    return told


@pytest.mark.parametrize("seed", slow_after(4, range(40)))
def test_text_of_bytes_that_make_characters_grows(seed: int) -> None:
    backend, random = spelled(), Random(seed)
    ids: list[int] = []
    for _ in range(60):
        word = random.choice(["word", "word", "漢", "\n", "bad"])
        if word == "word":
            ids.append(random.randrange(6))
        elif word == "bad":
            ids.append(6 + random.randrange(256))
        else:
            ids += [6 + byte for byte in word.encode()]
    ids.append(0)

    def decode(some: object) -> str:
        return str(backend.decode(some, skip_special_tokens=False))

    growing = GrowingText(decode, token_text(backend), backend)
    assert check(growing, ids, decode(ids), random)


@pytest.mark.parametrize("seed", slow_after(2, range(10)))
@pytest.mark.parametrize("vocabulary", ["smollm2", "qwen"])
def test_text_of_byte_level_ids_grows_to_all_of_it(vocabulary: str, seed: int) -> None:
    template, random = chat(vocabulary, "chatml"), Random(seed)
    text = "Grüße, 漢字 👩‍👩‍👧 and <|im_end|> so.\n" * 2
    ids = template.text_ids(text) + [random.randrange(1000) for _ in range(20)]
    ids += template.text_ids(" end")
    told = check(template.growing_text(), list(ids), template.decode(ids), random)
    assert told == template.decode(ids)


@pytest.mark.parametrize("seed", slow_after(2, range(20)))
@pytest.mark.parametrize("vocabulary", ["smollm2", "qwen"])
def test_text_of_packed_ids_is_that_of_the_same_in_a_list(vocabulary: str, seed: int) -> None:
    backend, random = chat(vocabulary, "chatml").tokenizer.backend_tokenizer, Random(seed)
    size = backend.get_vocab_size()
    told = token_text(backend)
    assert told is not None
    for most in (size, size, size + 3, size):  # some are of no token
        ids = [random.randrange(most) for _ in range(random.choice((0, 1, 200)))]
        text = told(array("i", ids))
        assert text == told(ids) == told(array("i", ids))
        known = [each for each in ids if each < size]
        assert text == backend.decode(known, skip_special_tokens=False)
    with pytest.raises(OverflowError):
        told(array("i", [5, -1]))


def test_text_of_ids_that_a_vocabulary_leaves_gaps_between() -> None:
    backend = Tokenizer(models.BPE({"a": 0, "b": 7, "c": 100}, []))
    backend.decoder = decoders.ByteLevel()
    told = token_text(backend)
    assert told is not None
    for _ in range(2):
        assert told(array("i", [100, 0, 50, 7, 100])) == told([100, 0, 50, 7, 100]) == "cabc"
        assert told.spelling(7) == b"b"


@pytest.mark.parametrize("vocabulary", ["smollm2", "qwen"])
def test_spellings_of_parts_of_characters_join_to_the_text(vocabulary: str) -> None:
    template, text = chat(vocabulary, "chatml"), "漢字 👩‍👩‍👧 so<|im_end|>"
    growing = template.growing_text()
    spelt = [growing.spelling(each) for each in template.text_ids(text)]
    assert b"".join(spelt) == text.encode()
    assert any(b"\xef\xbf\xbd" not in each and not _is_text(each) for each in spelt)


def test_bytes_of_a_vocabulary_of_words_are_spelt_as_they_are() -> None:
    backend = spelled()
    growing = GrowingText(lambda ids: str(backend.decode(list(ids))), None, backend)
    assert [growing.spelling(each) for each in (2, 6 + 0xE6, 4)] == [b"s", b"\xe6", "é".encode()]


def _is_text(spelling: bytes) -> bool:
    return "\ufffd" not in spelling.decode(errors="replace")
