"""Reads a tokenizer from its files, where they alone say what transformers would make of them.

For most models transformers has rules of its own: it builds the tokenizer in Python, patches it, or
adds tokens. Only what it would take from ``tokenizer.json`` as it is, is read here. What is not
known to be so is left to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollout.chat.fast_tokenizer import FastTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

#: Classes of transformers that take ``tokenizer.json`` as it is.
_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
#: Model types for which it takes these classes at their word; for others it may know better.
MODEL_TYPES = (
    *("deepseek_v3", "glm4", "glm4_moe", "gpt_oss", "kimi_k2", "llama", "llama4_text"),
    *("olmo2", "qwen3", "qwen3_moe", "smollm3"),
)
#: Names of special tokens, all of which templates can read.
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
#: Lists of further ones.
_MORE = ("additional_special_tokens", "extra_special_tokens")
#: What else ``tokenizer_config.json`` may say without a change to ids, texts or templates.
_WITHOUT_EFFECT = {
    *("add_bos_token", "add_eos_token", "is_local", "local_files_only", "max_length"),
    *("model_input_names", "model_max_length", "name_or_path", "padding_side"),
    *("processor_class", "truncation_side"),
}
#: What is read here of it.
_READ = {
    *("added_tokens_decoder", "backend", "chat_template", "clean_up_tokenization_spaces"),
    *("split_special_tokens", "tokenizer_class", *_NAMED, *_MORE),
}
#: Files from which transformers takes more than is read here.
_OTHERS = ("additional_chat_templates", "tekken.json")
#: Files with tokens that count where ``tokenizer_config.json`` lists none.
_LEGACY = ("added_tokens.json", "special_tokens_map.json")
#: All that an added token has beside its id.
_PROPERTIES = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def read_fast_tokenizer(
    folder: Path, whole: Callable[[], PreTrainedTokenizerBase]
) -> FastTokenizer | None:
    """The tokenizer of a model's directory; None where transformers has to read it.

    Args:
        folder: The directory.
        whole: As `FastTokenizer` takes it.
    """
    try:
        config, model = (_read(folder / f"{name}.json") for name in ("tokenizer_config", "config"))
        if not _is_generic(folder, config, model):
            return None
        chat_template = _chat_template(folder, config)
        special = {name: _content(config[name]) for name in _NAMED if config.get(name) is not None}
        backend = _backend(folder / "tokenizer.json")
        if not _is_complete(backend, config, special.values()):
            return None
    except Exception:  # transformers finds the words for what is wrong with a file
        return None
    return FastTokenizer(backend, special_tokens=special, chat_template=chat_template, whole=whole)


def _read(file: Path) -> dict[str, Any]:
    """A file's object; empty where there is no file."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return dict(**found)


def _is_generic(folder: Path, config: Mapping[str, Any], model: Mapping[str, Any]) -> bool:
    """Whether transformers has no rule for this tokenizer or its model."""
    others = _OTHERS if "added_tokens_decoder" in config else (*_OTHERS, *_LEGACY)
    return (
        config.get("tokenizer_class") in _CLASSES
        and config.get("backend", "tokenizers") == "tokenizers"
        and not config.get("split_special_tokens")
        and config.keys() <= _READ | _WITHOUT_EFFECT
        and model.get("model_type", MODEL_TYPES[0]) in MODEL_TYPES
        and not any((folder / name).exists() for name in others)
    )


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """That of a file of its own, or else of the configuration.

    Raises:
        TypeError: The configuration has several.
    """
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
    if source is None or isinstance(source, str):
        return source
    raise TypeError("chat_template: expected a text")


def _backend(file: Path) -> Any:
    """A `tokenizers.Tokenizer`.

    Raises:
        Exception: It cannot be read.
    """
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))


def _is_complete(backend: Any, config: Mapping[str, Any], special: Iterable[str]) -> bool:
    """Whether transformers would take the backend as it is, with no token to be added."""
    added = backend.get_added_tokens_decoder()
    own = {token.content for token in added.values() if token.special}
    more = (_content(token) for name in _MORE for token in config.get(name) or ())
    listed = config.get("added_tokens_decoder", {}).items()
    is_clean = type(backend.model).__name__ == "BPE"  # others have spaces removed on demand
    return (
        own.issuperset(special)
        and own.issuperset(more)
        and all(_properties(added[int(token_id)]) == token for token_id, token in listed)
        and (is_clean or not config.get("clean_up_tokenization_spaces"))
        and backend.truncation is None
        and backend.padding is None
    )


def _content(token: str | Mapping[str, Any]) -> str:
    """The spelling of a special token, which may be written with its properties."""
    return str(token["content"]) if isinstance(token, Mapping) else token


def _properties(token: Any) -> dict[str, Any]:
    return {name: getattr(token, name) for name in _PROPERTIES}
