"""Texts of ids, and the bytes of one."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models

from chat_material import chat
from rollout.chat.tokenizer_parts import spell_token


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


@pytest.mark.parametrize("vocabulary", ["smollm2", "qwen"])
def test_spellings_of_parts_of_characters_join_to_the_text(vocabulary: str) -> None:
    template, text = chat(vocabulary, "chatml"), "漢字 👩‍👩‍👧 so<|im_end|>"
    spelt = [template.spell_token(each) for each in template.text_ids(text)]
    assert b"".join(spelt) == text.encode()
    assert any(b"\xef\xbf\xbd" not in each and not _is_text(each) for each in spelt)


def test_bytes_of_a_vocabulary_of_words_are_spelt_as_they_are() -> None:
    backend = spelled()
    assert [spell_token(backend, each) for each in (2, 6 + 0xE6, 4)] == [
        b"s",
        b"\xe6",
        "é".encode(),
    ]


def _is_text(spelling: bytes) -> bool:
    return "\ufffd" not in spelling.decode(errors="replace")
