"""Which tokenizer wrote a batch, so that its tokens can be read where it is loaded."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.engine.model_tokenizer import load_decoder
from rollout.errors import RolloutError
from rollout.types import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rollout.chat.trajectory import Trajectory


class BatchTokenizer(msgspec.Struct, kw_only=True, dict=True):
    """The tokenizer of a batch, as ``meta.json`` names it; it is loaded when somebody decodes.

    Attributes:
        path, revision: Of its model, as `model.path` and `model.revision`; a directory absolute.
    """

    path: str
    revision: str | None = None

    def __post_init__(self) -> None:
        if Path(self.path).is_dir():
            self.path = str(Path(self.path).resolve())

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, special tokens spelled out.

        Raises:
            RolloutError: The tokenizer cannot be loaded.
        """
        return self._decoder(ids)

    @cached_property
    def _decoder(self) -> Callable[[Sequence[int]], str]:
        try:
            return load_decoder(self.path, self.revision)
        except RolloutError as error:
            name = f"{self.path} (revision {self.revision})" if self.revision else self.path
            raise RolloutError(
                f"the batch's tokenizer, that of {name}, cannot be loaded: {error}; give "
                "RolloutBatch.load(..., tokenizer=) where it is now"
            ) from error


class DecodableMessages(list[Message]):
    """Messages of a loaded trajectory, with what decodes its tokens."""

    decode: Callable[[Sequence[int]], str]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # who gets it elsewhere has no tokenizer


def make_decodable(trajectories: Iterable[Trajectory], tokenizer: BatchTokenizer) -> None:
    """Let loaded trajectories be printed with their tokens."""
    for trajectory in trajectories:
        before, messages = trajectory.messages, DecodableMessages(trajectory.messages)
        messages.decode = tokenizer.decode
        trajectory.messages = messages
        for segment in trajectory.segments:
            if segment.messages is before:
                segment.messages = messages
