"""What a server does not say about its model, read from the model's files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from rollout.chat.template_loading import load_tokenizer
from rollout.engine.model_files import resolve_model
from rollout.errors import EngineError


class ModelFacts(NamedTuple):
    """See `EngineInfo`."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    context_length: int | None
    fingerprint: str


def read_model_facts(model: str, revision: str | None, trust_remote_code: bool) -> ModelFacts:
    """The facts about a model from its configuration files; blocks.

    Of a directory with a tokenizer alone they are the tokenizer's.

    Raises:
        EngineError: There is no such model, or its configuration cannot be read.
        TemplateError: There is neither a configuration nor a tokenizer.
    """
    path = resolve_model(model, revision, needs_weights=False)
    if Path(path).is_dir() and not Path(path, "config.json").exists():
        return _read_tokenizer_facts(path)
    from transformers import AutoConfig, GenerationConfig

    where: dict[str, Any] = {"revision": revision or "main"}
    try:
        loaded = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **where)
    except (OSError, ValueError) as error:
        raise EngineError(f"model.path = {model!r}: no configuration: {error}") from error
    try:
        eos = GenerationConfig.from_pretrained(path, **where).eos_token_id
    except OSError:  # many models have no file for it
        eos = None
    config = loaded.get_text_config()
    eos = config.eos_token_id if eos is None else eos
    eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return ModelFacts(
        vocab_size=config.vocab_size,
        eos_ids=eos_ids,
        context_length=getattr(config, "max_position_embeddings", None),
        fingerprint=_hash_facts(model, revision, config.vocab_size, eos_ids),
    )


def _read_tokenizer_facts(path: str) -> ModelFacts:
    tokenizer = load_tokenizer(path)
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    eos = tokenizer.eos_token_id
    eos_ids = (eos,) if isinstance(eos, int) else ()
    return ModelFacts(
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        context_length=None,
        fingerprint=_hash_facts(path, None, vocab_size, eos_ids),
    )


def _hash_facts(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
