"""The tokenizer of a model, for who only reads texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.config.sections import SIMULATED_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def load_decoder(model: str, revision: str | None = None) -> Callable[[Sequence[int]], str]:
    """Ids to text, special tokens spelled out; code of a model's repository is never run."""
    from rollout.chat.template_loading import load_tokenizer
    from rollout.engine.cores.simulated.vocabulary import simulated_tokenizer
    from rollout.engine.model_files import resolve_model

    tokenizer: Any
    if model == SIMULATED_MODEL:
        tokenizer = simulated_tokenizer()
    else:
        path = resolve_model(model, revision, needs_weights=False)
        tokenizer = load_tokenizer(path, revision=revision)

    def decode(ids: Sequence[int]) -> str:
        return str(
            tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    return decode
