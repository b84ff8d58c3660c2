"""Loads the tokenizer and chat template of a model."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.chat.template import ChatTemplate
from rollout.errors import TemplateError
from rollout.lazy import importing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedTokenizerBase

    from rollout.media.processor import MediaProcessor

logger = logging.getLogger("rollout.chat")


def load_chat_template(
    model: str,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat_template_path: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    processor: MediaProcessor | None = None,
) -> ChatTemplate:
    """The chat template of a model directory or hub name.

    Args:
        model: A local directory or a hub name.
        revision: Hub revision; None takes the default branch.
        trust_remote_code: Lets code from the model's repository run on this machine.
        chat_template_path: A Jinja file that replaces the tokenizer's own template.
        chat_template_kwargs: What else the template can read, e.g. ``{"enable_thinking": False}``.
        processor: Puts images and videos into tokens; None where the model reads text only.

    Raises:
        TemplateError: The tokenizer or the file cannot be loaded, or there is no template.
    """
    tokenizer = load_tokenizer(model, revision=revision, trust_remote_code=trust_remote_code)
    source = read_template(chat_template_path, tokenizer)
    if source is None and processor is not None and not tokenizer.chat_template:
        source = processor.chat_template  # some have it beside the processor only
    return ChatTemplate(
        tokenizer,
        chat_template=source,
        chat_template_kwargs=chat_template_kwargs,
        processor=processor,
    )


def read_template(path: str | None, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The template in a file, None of none, which is tried on a tokenizer.

    Raises:
        TemplateError: The file cannot be read, or is not valid Jinja.
    """
    if path is None:
        return None
    from jinja2 import TemplateSyntaxError

    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a NUL in the path
        raise TemplateError(f"chat template {path} cannot be read: {error}") from error
    empty = [{"role": "user", "content": ""}]
    try:
        tokenizer.apply_chat_template(empty, chat_template=source, tokenize=False)
    except TemplateSyntaxError as error:
        where = f"chat template {path}, line {error.lineno}"
        raise TemplateError(f"{where}: not valid Jinja: {error.message}") from error
    except Exception as error:  # it may refuse this conversation and take others
        logger.debug("the chat template %s refuses an empty message: %r", path, error)
    return source


def load_tokenizer(
    model: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub name, of which only it is read.

    Raises:
        TemplateError: There is none, or it cannot be loaded.
    """
    folder = Path(model)
    if os.path.isdir(folder) and not holds_tokenizer(folder):
        raise TemplateError(
            f"the tokenizer of {model} cannot be loaded: the directory holds none "
            "(tokenizer.json, tokenizer_config.json)"
        )
    with importing:
        from transformers import AutoTokenizer
        from transformers.utils import logging as transformers_logging

    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        return AutoTokenizer.from_pretrained(model, **options)
    except Exception as error:  # the loaders of tokenizers raise almost anything
        raise TemplateError(f"the tokenizer of {model} cannot be loaded: {error}") from error
    finally:
        transformers_logging.set_verbosity(verbosity)


def holds_tokenizer(folder: Path) -> bool:
    """Whether a directory has files that are a tokenizer's by their names."""
    parts = ("token", "vocab", "merges", ".model", ".gguf")
    return any(part in file.name for file in folder.iterdir() for part in parts)
