"""The tokenizer and chat format of the configured model, as the driver loads them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from rollout.chat import ChatTemplate, load_chat_template
from rollout.chat.template_loading import read_template
from rollout.config.engines import SIMULATED_MODEL
from rollout.engine.cores.simulated.vocabulary import simulated_tokenizer
from rollout.engine.model_files import resolve_model
from rollout.media.processor import load_media_processor

if TYPE_CHECKING:
    from rollout.config import RolloutConfig


def load_model_template(config: RolloutConfig) -> ChatTemplate:
    """The tokenizer and chat format of a configuration's model."""
    model = config.model
    if model.path == SIMULATED_MODEL:
        if model.chat_template is None and not model.chat_template_kwargs:
            return _simulated_template()
        tokenizer = simulated_tokenizer()
        source = read_template(model.chat_template, tokenizer)
        kwargs = model.chat_template_kwargs
        return ChatTemplate(tokenizer, chat_template=source, chat_template_kwargs=kwargs)
    path = resolve_model(model.path, model.revision, needs_weights=config.engine.loads_weights)
    processor = load_media_processor(
        path, revision=model.revision, trust_remote_code=model.trust_remote_code
    )
    return load_chat_template(
        path,
        processor=processor,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        chat_template_path=model.chat_template,
        chat_template_kwargs=model.chat_template_kwargs,
    )


@functools.cache
def _simulated_template() -> ChatTemplate:
    """One for all runtimes: harnesses open thousands of them."""
    return ChatTemplate(simulated_tokenizer())
