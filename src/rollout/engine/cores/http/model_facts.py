"""What a server does not say about its model, read from the model's files."""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

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

    Raises:
        EngineError: There is no such model, or its configuration cannot be read.
    """
    path = resolve_model(model, revision)
    from transformers import AutoConfig, GenerationConfig

    where: dict[str, Any] = {"revision": revision or "main"}
    try:
        whole = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, **where)
    except (OSError, ValueError) as error:
        raise EngineError(f"model.path = {model!r}: no configuration: {error}") from error
    try:
        eos = GenerationConfig.from_pretrained(path, **where).eos_token_id
    except OSError:  # many models have no file for it
        eos = None
    config = whole.get_text_config()
    eos = config.eos_token_id if eos is None else eos
    eos_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    text = json.dumps([model, revision, config.vocab_size, eos_ids])
    return ModelFacts(
        vocab_size=config.vocab_size,
        eos_ids=eos_ids,
        context_length=getattr(config, "max_position_embeddings", None),
        fingerprint=hashlib.sha256(text.encode()).hexdigest()[:16],
    )
