"""The tokenizer of the driver's benchmark: 32,000 byte-level tokens and a ChatML template.

It is trained on the sources of Python's standard library, which every machine has, so that nothing
is downloaded; splitting and special tokens are those of Qwen2.5.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

TOKENS = 32_000
#: Of the standard library, in alphabetical order.
FILES = 220
SPLITTING = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
#: Ordinary text to whoever decodes, but one token each.
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def save_tokenizer(directory: Path) -> None:
    """Train it and write it as transformers read it; takes seconds."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLITTING), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_paths()["stdlib"])
    backend.train([str(path) for path in sorted(library.glob("*.py"))[:FILES]], trainer)
    backend.add_special_tokens(list(CONTROL))
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=None,
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = Path(__file__).with_name("chat.jinja").read_text(encoding="utf-8")
    tokenizer.save_pretrained(directory)
