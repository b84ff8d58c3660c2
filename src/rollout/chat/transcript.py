"""The token ledger of one trajectory.

Invariants, by construction:

* spans are only ever appended; they tile the ids without gaps, the prompt first and once;
* the mask is 1 exactly on ids that an engine returned;
* log-probs and weight versions exist for each generated id and for no other, and so do the most
  likely ids where they were asked for;
* ids stay packed (`array('i')`) from the wire to the tensor.
"""

from __future__ import annotations

import math
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
#: What stands in `Transcript.top_ids` where nobody asked.
NO_ID = -1
#: What stands in `Transcript.routed_experts` where nobody knows.
NO_EXPERT = -1


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
        expert_shape: (layers, top_k) of the routed experts; None where none are known.
        prefix: Every id in order, in the form in which engines are asked with it.
    """

    __slots__ = (
        "_experts",
        "_ids",
        "_log_probs",
        "_spans",
        "_top",
        "expert_shape",
        "prefix",
    )

    def __init__(self) -> None:
        self.prefix = TokenPrefix()
        self._ids = self.prefix.ids
        self._log_probs = array("f")
        self._spans: list[Span] = []
        self._experts = array("h")
        self.expert_shape: tuple[int, int] | None = None
        #: Of spans by their start: the (T, k) most likely ids and their log-probs.
        self._top: dict[int, tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] = {}

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
        top: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
    ) -> None:
        """Append what an engine returned; an empty generation yields an empty span.

        Args:
            ids: (T,) sampled ids.
            log_probs: (T,) of the sampled ids.
            versions: Runs ``(weight version, number of ids)`` that add up to T.
            finish_reason: Why the engine stopped.
            top: (T, k) the most likely ids at the place of each, and (T, k) their log-probs.

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
        likely = None if top is None else _top_of(top, len(ids))
        packed = _packed("f", np.float32, log_probs)  # first: it may fail, and then nothing changed
        if likely is not None and len(ids):
            self._top[len(self._ids)] = likely
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
        experts = self.routed_experts()
        if experts is not None:
            forked.append_routed_experts(experts[: min(position, self.routed_length)])
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

    def log_probs_bytes(self) -> bytes:
        """Those of the generated ids, in order, as packed float32."""
        return self._log_probs.tobytes()

    def runs(self) -> Iterator[tuple[int, int | None]]:
        """What follows the prompt, in pieces: so many ids, and which weights sampled them.

        None stands for ids that no engine sampled.
        """
        for span in self._spans[1:]:
            if span.kind == "observation":
                yield len(span), None
            else:
                for version, count in span.versions:
                    yield count, version

    def weight_versions(self) -> npt.NDArray[np.int32]:
        """(T,) int32: the version that sampled each generated id; -1 off the mask."""
        values = np.full(len(self._ids), NO_VERSION, dtype=np.int32)
        for span in self.generated_spans():
            at = span.start
            for version, count in span.versions:
                values[at : at + count] = version
                at += count
        return values

    def top_ids(self) -> npt.NDArray[np.int32]:
        """(T, K) int32: the K most likely ids at the place of each generated id, likeliest first.

        K is the most that was asked for (`sampling.top_log_probs`), 0 where nothing was. -1 off the
        mask, and where fewer were asked for.
        """
        width = max((ids.shape[1] for ids, _ in self._top.values()), default=0)
        values = np.full((len(self._ids), width), NO_ID, dtype=np.int32)
        for start, (ids, _) in self._top.items():
            values[start : start + len(ids), : ids.shape[1]] = ids
        return values

    def top_log_probs(self) -> npt.NDArray[np.float32]:
        """(T, K) float32: one for each of `top_ids`; 0.0 where those are -1."""
        values = np.zeros(self.top_ids().shape, dtype=np.float32)
        for start, (ids, log_probs) in self._top.items():
            values[start : start + len(ids), : ids.shape[1]] = log_probs
        return values

    @property
    def routed_length(self) -> int:
        """Tokens at the beginning whose routed experts are known."""
        return len(self._experts) // math.prod(self.expert_shape) if self.expert_shape else 0

    def append_routed_experts(self, experts: npt.NDArray[np.int16]) -> None:
        """Say which experts further tokens were routed to, from `routed_length` on.

        Args:
            experts: (N, layers, top_k) of the next N tokens.

        Raises:
            ValueError: The transcript has not so many tokens, or had others of another shape;
                nothing has changed.
        """
        count, layers, top_k = experts.shape
        if self.expert_shape not in (None, (layers, top_k)):
            raise ValueError(
                f"append_routed_experts: a shape of {(layers, top_k)} after {self.expert_shape}"
            )
        if self.routed_length + count > len(self._ids):
            raise ValueError(
                f"append_routed_experts: {count} tokens after {self.routed_length}; expected at "
                f"most {len(self._ids)} in all"
            )
        self.expert_shape = (layers, top_k)
        self._experts.frombytes(np.ascontiguousarray(experts, dtype=np.int16).tobytes())

    def routed_experts(self) -> npt.NDArray[np.int16] | None:
        """(T, layers, top_k) int16: the experts that each token was routed to; -1 unknown.

        None where no engine told any. Of the last token nothing has been computed yet.
        """
        if self.expert_shape is None:
            return None
        values = np.full((len(self._ids), *self.expert_shape), NO_EXPERT, dtype=np.int16)
        known = np.array(self._experts, dtype=np.int16)
        values[: self.routed_length] = known.reshape(-1, *self.expert_shape)
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


def _top_of(
    top: tuple[npt.ArrayLike, npt.ArrayLike], count: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    ids, log_probs = np.array(top[0], dtype=np.int32), np.array(top[1], dtype=np.float32)
    if count and (ids.ndim != 2 or len(ids) != count or ids.shape != log_probs.shape):
        raise ValueError(
            f"append_generated: {count} ids, most likely ones of shape {ids.shape} with log-probs "
            f"of shape {log_probs.shape}; expected ({count}, k) twice"
        )
    return ids, log_probs
