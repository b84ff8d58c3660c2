"""The tokens of one row of a trajectory.

Invariants, by construction:

* spans are only ever appended; they tile the ids without gaps, the prompt first and once;
* the mask is 1 exactly on ids that an engine returned here, and not in a row that this one was
  forked from;
* log-probs and weight versions exist for each generated id and for no other, and so do the most
  likely ids where a request wants them;
* ids and log-probs stay packed from the wire to the tensor;
* images and videos stand as all the placeholder ids that the model's processor gives them, in
  prompts and observations only, each recorded once with its place.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from rollout.medium import PlacedMedia
from rollout.token_prefix import TokenPrefix

SpanKind = Literal["prompt", "generated", "observation"]
#: Ids as numbers, or packed as int32.
Ids = Sequence[int] | npt.NDArray[np.int32] | bytes
#: Numbers, or packed as float32.
Floats = Sequence[float] | npt.NDArray[np.float32] | bytes

#: What stands in `Transcript.weight_versions` where no engine sampled.
NO_VERSION = -1
#: What stands in `Transcript.top_ids` where no request wanted any.
NO_ID = -1
#: What stands in `Transcript.routed_experts` where nobody knows.
NO_EXPERT = -1


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of one author, which begin at `start` in their transcript.

    Attributes:
        ids: Packed int32.
        log_probs: Of a generated span: packed float32, one for each id.
        finish_reason: Of a generated span: "stop", or what cut it: "length", "deadline", "abort"
            or "error".
        versions: Of a generated span: runs ``(weight version, number of ids)`` in order.
        top: Of a generated span whose k most likely ids are known: k, and (T, k) ids and their
            log-probs, packed int32 and float32.
    """

    kind: SpanKind
    start: int
    ids: bytes
    log_probs: bytes = b""
    finish_reason: str | None = None
    versions: tuple[tuple[int, int], ...] = ()
    top: tuple[int, bytes, bytes] | None = None

    def __len__(self) -> int:
        return len(self.ids) // 4

    @property
    def stop(self) -> int:
        """Where the next span begins."""
        return self.start + len(self.ids) // 4


class Transcript(msgspec.Struct, eq=False, gc=False):
    """What the model read and what it sampled, token by token.

    Append with `append_prompt` (once, first), `append_generated` and `append_observation`; nothing
    can be changed or removed.

    Attributes:
        prefix: Every id in order, in the form that requests have.
        media: Its images and videos with their places, in order.
    """

    prefix: TokenPrefix = msgspec.field(default_factory=TokenPrefix)
    media: tuple[PlacedMedia, ...] = ()
    _spans: list[Span] = []
    _experts: tuple[npt.NDArray[np.int16], ...] = ()  # of the first tokens, as they came

    @classmethod
    def from_spans(
        cls, spans: Sequence[Span], *, media: tuple[PlacedMedia, ...] = ()
    ) -> Transcript:
        """The transcript that has these `spans` and `media`, which were another one's."""
        transcript = cls(media=media)
        for span in spans:
            transcript._append(span)
        return transcript

    def __len__(self) -> int:
        return self.prefix.length

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
        return len(self) - self.prompt_length

    @property
    def generated_length(self) -> int:
        """Tokens that engines returned."""
        return sum(map(len, self.generated_spans()))

    @property
    def trailing_observation_length(self) -> int:
        """Tokens observed after the last generated one: nothing answers them."""
        length = 0
        for span in reversed(self._spans):
            if span.kind == "prompt" or (span.kind == "generated" and len(span)):
                break
            length += len(span)
        return length

    @property
    def turns(self) -> int:
        """How many generated spans there are."""
        return sum(1 for _ in self.generated_spans())

    @property
    def versions(self) -> set[int]:
        """Those of the weights that sampled it."""
        return {version for span in self._spans for version, _ in span.versions}

    def generated_spans(self) -> Iterator[Span]:
        """The spans that engines returned, in order."""
        return (span for span in self._spans if span.kind == "generated")

    def append_prompt(self, ids: Ids, *, media: Sequence[PlacedMedia] = ()) -> None:
        """Append the prompt; a ValueError unless the transcript is empty and `ids` is not.

        Args:
            ids: The prompt's.
            media: Images and videos among them; `start` counts from the first of `ids`.
        """
        if self._spans:
            raise ValueError("append_prompt: the transcript has a prompt already")
        if len(ids) == 0:
            raise ValueError("append_prompt: the prompt has no tokens")
        self._append_read("prompt", ids, media)

    def append_observation(self, ids: Ids, *, media: Sequence[PlacedMedia] = ()) -> None:
        """Append tokens that the model reads and did not sample; nothing where `ids` is empty.

        Args:
            ids: The tokens.
            media: Images and videos among them; `start` counts from the first of `ids`.
        """
        self._require_prompt("append_observation")
        if len(ids) or media:
            self._append_read("observation", ids, media)

    def append_generated(
        self,
        ids: Ids,
        log_probs: Floats,
        *,
        versions: Sequence[Sequence[int]],
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
        packed, floats = _pack("i", ids), _pack("f", log_probs)
        length, covered = len(packed) // 4, sum(count for _, count in versions)
        if not len(floats) // 4 == covered == length:
            raise ValueError(
                f"append_generated: {length} ids, {len(floats) // 4} log-probs and versions of "
                f"{covered} ids; expected the same number of each"
            )
        if any(count < 0 for _, count in versions):
            raise ValueError(f"append_generated: a run of versions is negative: {list(versions)}")
        runs = tuple((int(version), int(count)) for version, count in versions if count)
        likely = _pack_top(top, length) if top is not None and length else None
        self._append(Span("generated", len(self), packed, floats, finish_reason, runs, likely))

    def fork(self, position: int) -> Transcript:
        """A transcript that begins with the first `position` tokens of this one, as context.

        Of the prompt they stay the prompt; after it they are an observation, generated ones too:
        those are trained where they were generated, and nowhere else.

        Raises:
            ValueError: There are not so many tokens, or `position` is 0.
        """
        if not 1 <= position <= len(self):
            raise ValueError(f"fork: position = {position}: expected 1 to {len(self)}")
        forked = Transcript()
        media = [each for each in self.media if each.start + each.count <= position]
        append_split(forked, self.prefix.slice(0, position), media, self.prompt_length)
        experts = self.routed_experts()
        if experts is not None:
            forked.append_routed_experts(experts[: min(position, self.routed_length)])
        return forked

    def ids(self) -> npt.NDArray[np.int32]:
        """(T,) int32, a copy: every id in order."""
        return np.frombuffer(bytearray(self.prefix.packed()), dtype=np.int32)

    def ids_bytes(self) -> bytes:
        """Every id as packed int32, as a request carries them."""
        return self.prefix.packed()

    def span_ids(self, span: Span) -> array[int]:
        """The ids of one span, packed."""
        return array("i", span.ids)

    def mask(self) -> npt.NDArray[np.bool_]:
        """(T,) bool: True exactly on generated ids."""
        mask = np.zeros(len(self), dtype=np.bool_)
        for span in self.generated_spans():
            mask[span.start : span.stop] = True
        return mask

    def log_probs(self) -> npt.NDArray[np.float32]:
        """(T,) float32: of each generated id; 0.0 off the mask."""
        values = np.zeros(len(self), dtype=np.float32)
        for span in self.generated_spans():
            values[span.start : span.stop] = np.frombuffer(span.log_probs, dtype=np.float32)
        return values

    def weight_versions(self) -> npt.NDArray[np.int32]:
        """(T,) int32: the version that sampled each generated id; -1 off the mask."""
        values = np.full(len(self), NO_VERSION, dtype=np.int32)
        for span in self.generated_spans():
            start = span.start
            for version, count in span.versions:
                values[start : start + count] = version
                start += count
        return values

    def top_ids(self) -> npt.NDArray[np.int32]:
        """(T, K) int32: the K most likely ids at the place of each generated id, likeliest first.

        K is the largest `sampling.top_log_probs` of its requests, 0 of none. -1 off the
        mask, and where a request wanted fewer.
        """
        return self._fill_top(0, NO_ID, np.int32)

    def top_log_probs(self) -> npt.NDArray[np.float32]:
        """(T, K) float32: one for each of `top_ids`; 0.0 where those are -1."""
        return self._fill_top(1, 0.0, np.float32)

    def _fill_top(self, part: int, filler: float, dtype: type[Any]) -> npt.NDArray[Any]:
        known = [(span, *span.top) for span in self._spans if span.top is not None]
        widest = max((width for _, width, *_ in known), default=0)
        values = np.full((len(self), widest), filler, dtype=dtype)
        for span, width, *packed in known:
            own = np.frombuffer(packed[part], dtype=dtype)
            values[span.start : span.stop, :width] = own.reshape(len(span), width)
        return values

    @property
    def expert_shape(self) -> tuple[int, int] | None:
        """(layers, top_k) of the routed experts; None where none are known."""
        return self._experts[0].shape[1:] if self._experts else None

    @property
    def routed_length(self) -> int:
        """Tokens at the beginning whose routed experts are known."""
        return sum(map(len, self._experts))

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
        if self.routed_length + count > len(self):
            raise ValueError(
                f"append_routed_experts: {count} tokens after {self.routed_length}; expected at "
                f"most {len(self)} in all"
            )
        self._experts += (np.array(experts, dtype=np.int16),)

    def routed_experts(self) -> npt.NDArray[np.int16] | None:
        """(T, layers, top_k) int16: the experts that each token was routed to; -1 unknown.

        None where no engine reported any. Of the last token nothing has been computed yet.
        """
        if not self._experts:
            return None
        values = np.full((len(self), *self._experts[0].shape[1:]), NO_EXPERT, dtype=np.int16)
        np.concatenate(self._experts, out=values[: self.routed_length])
        return values

    def _require_prompt(self, what: str) -> None:
        if not self._spans:
            raise ValueError(f"{what}: append the prompt first")

    def _append_read(self, kind: SpanKind, ids: Ids, media: Sequence[PlacedMedia]) -> None:
        span, end = Span(kind, len(self), _pack("i", ids)), 0
        for each in media:
            if each.start < end or each.count < 1 or each.start + each.count > len(span):
                raise ValueError(
                    f"append_{kind}: {each.medium!r} at {each.start} + {each.count}: expected "
                    f"places in order among {len(span)} ids"
                )
            end = each.start + each.count
        if media:
            placed = (PlacedMedia(m.medium, span.start + m.start, m.count) for m in media)
            self.media = (*self.media, *placed)
        self._append(span)

    def _append(self, span: Span) -> None:
        self._spans.append(span)
        self.prefix.extend(span.ids)


def append_split(
    transcript: Transcript, ids: Sequence[int], media: Sequence[PlacedMedia], prompt: int
) -> None:
    """Append ids to an empty transcript, the first `prompt` of them as its prompt.

    No image or video is cut in two: one that would be belongs to the observation, and so does what
    follows it; to the prompt where it stands at its beginning.
    """
    cut = next((m for m in media if m.start < prompt < m.start + m.count), None)
    if cut is not None:
        prompt = cut.start or cut.count
    after = [PlacedMedia(m.medium, m.start - prompt, m.count) for m in media if m.start >= prompt]
    transcript.append_prompt(ids[:prompt], media=[m for m in media if m.start < prompt])
    transcript.append_observation(ids[prompt:], media=after)


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many tokens two rows, or letters two texts, have in common at their beginning."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return min(len(one), len(other))


def _pack(code: Literal["i", "f"], values: Ids | Floats) -> bytes:
    """Int32 or float32; a TypeError or OverflowError where a value is none."""
    return values if isinstance(values, bytes) else array(code, values).tobytes()


def _pack_top(top: tuple[npt.ArrayLike, npt.ArrayLike], length: int) -> tuple[int, bytes, bytes]:
    ids, log_probs = np.array(top[0], dtype=np.int32), np.array(top[1], dtype=np.float32)
    if ids.ndim != 2 or len(ids) != length or ids.shape != log_probs.shape:
        raise ValueError(
            f"append_generated: {length} ids, most likely ones of shape {ids.shape} with log-probs "
            f"of shape {log_probs.shape}; expected ({length}, k) twice"
        )
    return ids.shape[1], ids.tobytes(), log_probs.tobytes()
