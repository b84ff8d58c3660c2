"""Texts of ids, and the bytes of one."""

from __future__ import annotations

from array import array
from random import Random  # noqa: TID251  (seeded: the same ids on every machine)

import pytest
from tokenizers import Tokenizer, decoders, models

from chat_material import chat
from rollout.chat.token_text import spell_token, token_text
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
    spelt = [template.spell_token(each) for each in template.text_ids(text)]
    assert b"".join(spelt) == text.encode()
    assert any(b"\xef\xbf\xbd" not in each and not _is_text(each) for each in spelt)


def test_bytes_of_a_vocabulary_of_words_are_spelt_as_they_are() -> None:
    backend = spelled()
    assert [spell_token(backend, backend.decode, each) for each in (2, 6 + 0xE6, 4)] == [
        b"s",
        b"\xe6",
        "é".encode(),
    ]


def _is_text(spelling: bytes) -> bool:
    return "\ufffd" not in spelling.decode(errors="replace")
