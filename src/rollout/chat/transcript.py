"""The token ledger of one trajectory.

Invariants, by construction:

* spans are only ever appended; they tile the ids without gaps, the prompt first and once;
* the mask is 1 exactly on ids that an engine returned;
* log-probs and weight versions exist for each generated id and for no other;
* ids stay packed (`array('i')`) from the wire to the tensor.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from rollout.token_prefix import TokenPrefix

SpanKind = Literal["prompt", "generated", "observation"]
Ids = Sequence[int] | npt.NDArray[np.int32]

#: What stands in `Transcript.weight_versions` where no engine sampled.
NO_VERSION = -1


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One piece of a transcript: ids ``[start, stop)`` from one author.

    Attributes:
        finish_reason: Of a generated span: "stop", or what cut it: "length", "deadline", "abort"
            or "error".
        versions: Of a generated span: runs ``(weight version, number of ids)`` in order.
    """

    kind: SpanKind
    start: int
    stop: int
    finish_reason: str | None = None
    versions: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return self.stop - self.start


class Transcript:
    """What the model saw and what it said, token by token.

    Append with `append_prompt` (once, first), `append_generated` and `append_observation`; nothing
    can be changed or removed.

    Attributes:
        prefix: Every id in order, in the form in which engines are asked with it.
    """

    __slots__ = ("_ids", "_log_probs", "_spans", "prefix")

    def __init__(self) -> None:
        self.prefix = TokenPrefix()
        self._ids = self.prefix.ids
        self._log_probs = array("f")
        self._spans: list[Span] = []

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        kinds = " ".join(f"{span.kind}:{len(span)}" for span in self._spans)
        return f"<Transcript {kinds or 'empty'}>"

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans so far, in order."""
        return tuple(self._spans)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self._spans[0]) if self._spans else 0

    @property
    def response_length(self) -> int:
        """Tokens after the prompt, generated and observed."""
        return len(self._ids) - self.prompt_length

    @property
    def generated_length(self) -> int:
        """Tokens that engines returned."""
        return len(self._log_probs)

    @property
    def trailing_observation_length(self) -> int:
        """Tokens observed after the last generated one: nothing answers them."""
        length = 0
        for span in reversed(self._spans[1:]):
            if span.kind == "generated" and len(span):
                break
            length += len(span)
        return length

    @property
    def ends_with_observation(self) -> bool:
        """Whether no token was generated after the last observation."""
        return self.trailing_observation_length > 0

    def append_prompt(self, ids: Ids) -> None:
        """Append the prompt; a ValueError unless the transcript is empty and `ids` is not."""
        if self._spans:
            raise ValueError("append_prompt: the transcript has a prompt already")
        if len(ids) == 0:
            raise ValueError("append_prompt: the prompt has no tokens")
        self._extend("prompt", ids)

    def append_observation(self, ids: Ids) -> None:
        """Append tokens that the model reads and did not sample; nothing where `ids` is empty."""
        self._require_prompt("append_observation")
        if len(ids):
            self._extend("observation", ids)

    def append_generated(
        self,
        ids: Ids,
        log_probs: Sequence[float] | npt.NDArray[np.float32],
        *,
        versions: Sequence[tuple[int, int]],
        finish_reason: str,
    ) -> None:
        """Append what an engine returned; an empty generation yields an empty span.

        Args:
            ids: (T,) sampled ids.
            log_probs: (T,) of the sampled ids.
            versions: Runs ``(weight version, number of ids)`` that add up to T.
            finish_reason: Why the engine stopped.

        Raises:
            ValueError: The lengths do not agree; the transcript is unchanged.
        """
        self._require_prompt("append_generated")
        covered = sum(count for _, count in versions)
        if len(log_probs) != len(ids) or covered != len(ids):
            raise ValueError(
                f"append_generated: {len(ids)} ids, {len(log_probs)} log-probs and versions of "
                f"{covered} ids; expected the same number of each"
            )
        if any(count < 0 for _, count in versions):
            raise ValueError(f"append_generated: a run of versions is negative: {list(versions)}")
        packed = _packed("f", np.float32, log_probs)  # first: it may fail, and then nothing changed
        self._extend("generated", ids, finish_reason, tuple((v, n) for v, n in versions if n))
        self._log_probs.extend(packed)

    def fork(self, position: int) -> Transcript:
        """A transcript that begins with the first `position` tokens of this one, as context.

        Of the prompt they stay the prompt; after it they are an observation, generated ones too:
        those are trained where they were generated, and nowhere else.

        Raises:
            ValueError: There are not so many tokens, or none is asked for.
        """
        if not 1 <= position <= len(self):
            raise ValueError(f"fork: position = {position}: expected 1 to {len(self)}")
        prompt = min(position, self.prompt_length)
        forked = Transcript()
        forked.append_prompt(self._ids[:prompt])
        forked.append_observation(self._ids[prompt:position])
        return forked

    def ids(self) -> npt.NDArray[np.int32]:
        """(T,) int32, a copy: every id in order."""
        return np.array(self._ids, dtype=np.int32)

    def ids_bytes(self) -> bytes:
        """Every id as packed int32, as a request carries them."""
        return self._ids.tobytes()

    def mask(self) -> npt.NDArray[np.bool_]:
        """(T,) bool: True exactly on generated ids."""
        mask = np.zeros(len(self._ids), dtype=np.bool_)
        for span in self.generated_spans():
            mask[span.start : span.stop] = True
        return mask

    def log_probs(self) -> npt.NDArray[np.float32]:
        """(T,) float32: of each generated id; 0.0 off the mask."""
        values = np.zeros(len(self._ids), dtype=np.float32)
        values[self.mask()] = self._log_probs
        return values

    def weight_versions(self) -> npt.NDArray[np.int32]:
        """(T,) int32: the version that sampled each generated id; -1 off the mask."""
        values = np.full(len(self._ids), NO_VERSION, dtype=np.int32)
        for span in self.generated_spans():
            at = span.start
            for version, count in span.versions:
                values[at : at + count] = version
                at += count
        return values

    def span_ids(self, span: Span) -> array[int]:
        """The ids of one span, packed."""
        return self._ids[span.start : span.stop]

    def generated_spans(self) -> Iterator[Span]:
        """The spans that engines returned, in order."""
        return (span for span in self._spans if span.kind == "generated")

    def _require_prompt(self, what: str) -> None:
        if not self._spans:
            raise ValueError(f"{what}: append the prompt first")

    def _extend(
        self,
        kind: SpanKind,
        ids: Ids,
        finish_reason: str | None = None,
        versions: tuple[tuple[int, int], ...] = (),
    ) -> None:
        start = len(self._ids)
        self.prefix.extend(_packed("i", np.int32, ids))
        self._spans.append(Span(kind, start, len(self._ids), finish_reason, versions))


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two rows have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _packed(code: Literal["i", "f"], dtype: type[np.generic], values: Any) -> array[Any]:
    """`values` as a packed array; of a packed one, bytes are copied and no object is made."""
    if isinstance(values, array) and values.typecode == code:
        return values
    if isinstance(values, np.ndarray) and values.dtype == dtype:
        return array(code, values.tobytes())
    return array(code, values.tolist() if isinstance(values, np.ndarray) else values)
