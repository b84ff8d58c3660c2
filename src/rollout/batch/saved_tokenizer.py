"""Which tokenizer wrote a batch, so that its tokens can be read where it is loaded."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.engine.model_tokenizer import load_model_tokenizer, make_decoder
from rollout.errors import RolloutError
from rollout.types import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rollout.chat import ChatTemplate
    from rollout.chat.trajectory import Trajectory


class TokenizerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a saved batch says of its tokenizer.

    Attributes:
        path, revision: Of its model, as `model.path` and `model.revision`; a directory absolute.
        fingerprint: 16 hex digits of its vocabulary.
        chat_template: 16 hex digits of the template that rendered the messages.
    """

    path: str
    revision: str | None = None
    fingerprint: str = ""
    chat_template: str = ""


class BatchTokenizer:
    """The tokenizer of a batch: the runtime's, or one that is loaded when somebody decodes.

    Args:
        known: What a loaded batch says of it; of the runtime's own, path and revision.
        template: The runtime's; None in a batch that was loaded.
    """

    def __init__(self, known: TokenizerRecord, template: ChatTemplate | None = None) -> None:
        path = str(Path(known.path).resolve()) if Path(known.path).is_dir() else known.path
        self._known = msgspec.structs.replace(known, path=path)
        self._template = template

    @cached_property
    def record(self) -> TokenizerRecord:
        """What `RolloutBatch.save` writes of it."""
        if self._template is None:
            return self._known
        return msgspec.structs.replace(
            self._known,
            fingerprint=_digest_vocabulary(self._template.tokenizer),
            chat_template=_digest(self._template.source),
        )

    @cached_property
    def decode(self) -> Callable[[Sequence[int]], str]:
        """Ids to text, special tokens spelled out; loads the tokenizer where it is not at hand.

        Raises:
            RolloutError: It cannot be loaded, or is another one than that of the batch.
        """
        if self._template is not None:
            return self._template.decode
        known = self._known
        name = f"{known.path} (revision {known.revision})" if known.revision else known.path
        instead = "give RolloutBatch.load(..., tokenizer=) where it is now"
        try:
            tokenizer = load_model_tokenizer(known.path, known.revision)
        except RolloutError as error:
            raise RolloutError(
                f"the batch's tokenizer, that of {name}, cannot be loaded: {error}; {instead}"
            ) from error
        found = _digest_vocabulary(tokenizer)
        if known.fingerprint and found != known.fingerprint:
            raise RolloutError(
                f"the tokenizer of {name} is not the batch's: its vocabulary has the "
                f"fingerprint {found}, the batch was written with {known.fingerprint}; {instead}"
            )
        return make_decoder(tokenizer)

    def decode_ids(self, ids: Sequence[int]) -> str:
        """As `decode`, which is looked up when it is called."""
        return self.decode(ids)


class DecodableMessages(list[Message]):
    """Messages of a loaded trajectory, with what decodes its tokens."""

    decode: Callable[[Sequence[int]], str]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # who gets it elsewhere has no tokenizer


def make_decodable(trajectories: Iterable[Trajectory], tokenizer: BatchTokenizer) -> None:
    """Let loaded trajectories be printed with their tokens."""
    for trajectory in trajectories:
        before, messages = trajectory.messages, DecodableMessages(trajectory.messages)
        messages.decode = tokenizer.decode_ids
        trajectory.messages = messages
        for segment in trajectory.segments:
            if segment.messages is before:
                segment.messages = messages


def _digest_vocabulary(tokenizer: Any) -> str:
    return _digest(json.dumps(sorted(tokenizer.get_vocab().items())))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
