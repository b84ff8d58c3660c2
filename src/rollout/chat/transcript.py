"""The token ledger of one trajectory.

Invariants, by construction:

* spans are only ever appended; they tile the ids without gaps, the prompt first and once;
* the mask is 1 exactly on ids that an engine returned;
* log-probs and weight versions exist for each generated id and for no other, and so do the most
  likely ids where they were asked for;
* ids and log-probs stay packed from the wire to the tensor, in pieces that never move;
* images and videos stand as all the placeholder ids that the model's processor gives them, in
  prompts and observations only, each recorded once with its place.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollout.chat.likely_ids import Likely, likely_of, packed_top, unpacked_top
from rollout.chat.packed_transcript import (
    PackedTranscript,
    packed_values,
)
from rollout.chat.spans import Span, SpanKind, SpanTable
from rollout.medium import PlacedMedia
from rollout.token_prefix import TokenPrefix

Ids = Sequence[int] | npt.NDArray[np.int32]

#: What stands in `Transcript.weight_versions` where no engine sampled.
NO_VERSION = -1
#: What stands in `Transcript.top_ids` where nobody asked.
NO_ID = -1
#: What stands in `Transcript.routed_experts` where nobody knows.
NO_EXPERT = -1


class Transcript(msgspec.Struct, eq=False, gc=False):
    """What the model saw and what it said, token by token.

    Append with `append_prompt` (once, first), `append_generated` and `append_observation`; nothing
    can be changed or removed.

    Attributes:
        expert_shape: (layers, top_k) of the routed experts; None where none are known.
        prefix: Every id in order, in the form in which engines are asked with it.
        media: Its images and videos with their places, in order.
    """

    prefix: TokenPrefix = msgspec.field(default_factory=TokenPrefix)
    #: Of each generated span, float32.
    _log_probs: list[bytes] | tuple[()] = ()
    _spans: SpanTable = msgspec.field(default_factory=SpanTable)
    _experts: Any = None  # an array of int16, whose type cannot be looked up in Python 3.11
    expert_shape: tuple[int, int] | None = None
    media: tuple[PlacedMedia, ...] = ()
    #: Of spans by their start: the (T, k) most likely ids and their log-probs.
    _top: dict[int, Likely] | None = None

    def __len__(self) -> int:
        return self._spans.stop

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
        return self._spans.first_stop

    @property
    def response_length(self) -> int:
        """Tokens after the prompt, generated and observed."""
        return len(self) - self.prompt_length

    @property
    def generated_length(self) -> int:
        """Tokens that engines returned."""
        return sum(map(len, self._log_probs)) // 4

    @property
    def is_whole(self) -> bool:
        """Whether its spans cover its ids, and each generated one has its log-probs."""
        return self._spans.covers(len(self), self._log_probs)

    @property
    def trailing_observation_length(self) -> int:
        """Tokens observed after the last generated one: nothing answers them."""
        return len(self) - self._spans.last_answered

    @property
    def ends_with_observation(self) -> bool:
        """Whether no token was generated after the last observation."""
        return self.trailing_observation_length > 0

    def append_prompt(
        self, ids: Ids, *, pieces: Sequence[bytes] = (), media: Sequence[PlacedMedia] = ()
    ) -> None:
        """Append the prompt; a ValueError unless the transcript is empty and `ids` is not.

        Args:
            ids: The prompt's.
            pieces: The same ids, packed: held as they are, so that several prompts may share some.
            media: Images and videos among them; `start` counts from the first of `ids`.
        """
        if self._spans:
            raise ValueError("append_prompt: the transcript has a prompt already")
        if len(ids) == 0:
            raise ValueError("append_prompt: the prompt has no tokens")
        self._place("append_prompt", media, len(ids))
        self._extend("prompt", *(pieces or (packed_values("i", np.int32, ids),)))

    def append_observation(self, ids: Ids, *, media: Sequence[PlacedMedia] = ()) -> None:
        """Append tokens that the model reads and did not sample; nothing where `ids` is empty.

        Args:
            ids: The tokens.
            media: Images and videos among them; `start` counts from the first of `ids`.
        """
        self._require_prompt("append_observation")
        self._place("append_observation", media, len(ids))
        if len(ids):
            self._extend("observation", packed_values("i", np.int32, ids))

    def append_generated(
        self,
        ids: Ids,
        log_probs: Sequence[float] | npt.NDArray[np.float32],
        *,
        versions: Sequence[Sequence[int]],
        finish_reason: str,
        top: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
        packed: tuple[bytes, bytes] | None = None,
    ) -> None:
        """Append what an engine returned; an empty generation yields an empty span.

        Args:
            ids: (T,) sampled ids.
            log_probs: (T,) of the sampled ids.
            versions: Runs ``(weight version, number of ids)`` that add up to T.
            finish_reason: Why the engine stopped.
            top: (T, k) the most likely ids at the place of each, and (T, k) their log-probs.
            packed: The same ids and log-probs, packed: held as they are.

        Raises:
            ValueError: The lengths do not agree; the transcript is unchanged.
        """
        self._require_prompt("append_generated")
        counts = [count for _, count in versions]
        covered = sum(counts)
        if len(log_probs) != len(ids) or covered != len(ids):
            raise ValueError(
                f"append_generated: {len(ids)} ids, {len(log_probs)} log-probs and versions of "
                f"{covered} ids; expected the same number of each"
            )
        if min(counts, default=0) < 0:
            raise ValueError(f"append_generated: a run of versions is negative: {list(versions)}")
        likely = None if top is None else likely_of(top, len(ids))
        # First what may fail, so that then nothing has changed.
        if packed is None:
            packed = packed_values("i", np.int32, ids), packed_values("f", np.float32, log_probs)
        runs = array("i", chain.from_iterable([run for run in versions if run[1]])).tobytes()
        if likely is not None and len(ids):
            self._top = self._top or {}
            self._top[len(self)] = likely
        self.prefix.extend(packed[0])
        self._spans.append_generated(self.prefix.length, finish_reason, runs)
        if self._log_probs:
            self._log_probs.append(packed[1])
        else:
            self._log_probs = [packed[1]]

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
        forked._extend("prompt", self.prefix.packed(0, prompt))
        if prompt < position:
            forked._extend("observation", self.prefix.packed(prompt, position))
        forked.media = tuple(each for each in self.media if each.start + each.count <= position)
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

    def mask(self) -> npt.NDArray[np.bool_]:
        """(T,) bool: True exactly on generated ids."""
        mask = np.zeros(len(self), dtype=np.bool_)
        for start, stop in self._spans.generated():
            mask[start:stop] = True
        return mask

    def log_probs(self) -> npt.NDArray[np.float32]:
        """(T,) float32: of each generated id; 0.0 off the mask."""
        values = np.zeros(len(self), dtype=np.float32)
        for (start, stop), own in zip(self._spans.generated(), self._log_probs, strict=True):
            values[start:stop] = np.frombuffer(own, dtype=np.float32)
        return values

    def log_probs_bytes(self) -> bytes:
        """Those of the generated ids, in order, as packed float32."""
        return b"".join(self._log_probs)

    def packed(self, pieces: int = 0, turns: int = 0) -> PackedTranscript:
        """All of it.

        Args:
            pieces, turns: Of ids, and of log-probs, that its reader has already.
        """
        spans, top, experts = self._spans, None, None
        if self._top is not None:
            top = packed_top(self._top)
        if self.expert_shape is not None and self._experts is not None:
            experts = (*self.expert_shape, self._experts.tobytes())
        return PackedTranscript(
            self.prefix.pieces[pieces:],
            spans.places,
            spans.runs,
            spans.reasons,
            list(self._log_probs[turns:]),
            top,
            experts,
        )

    @classmethod
    def from_packed(cls, packed: PackedTranscript) -> Transcript:
        """The transcript of which this was `packed`, whole."""
        made = cls()
        for piece in packed.ids:
            made.prefix.extend(piece)
        made._spans = SpanTable(len(made.prefix), packed.spans, packed.runs, packed.reasons)
        made._log_probs = list(packed.log_probs)
        if packed.top is not None:
            made._top = unpacked_top(packed.top)
        if packed.experts is not None:
            made.expert_shape = packed.experts[:2]
            made._experts = array("h", packed.experts[2])
        return made

    def runs(self) -> Iterator[tuple[int, int | None]]:
        """What follows the prompt, in pieces: so many ids, and which weights sampled them.

        None stands for ids that no engine sampled.
        """
        for span in self.spans[1:]:
            if span.kind == "observation":
                yield len(span), None
            else:
                for version, count in span.versions:
                    yield count, version

    def weight_versions(self) -> npt.NDArray[np.int32]:
        """(T,) int32: the version that sampled each generated id; -1 off the mask."""
        values = np.full(len(self), NO_VERSION, dtype=np.int32)
        for span in self.generated_spans():
            ends = accumulate((count for _, count in span.versions), initial=span.start)
            for start, (version, count) in zip(ends, span.versions, strict=False):
                values[start : start + count] = version
        return values

    def top_ids(self) -> npt.NDArray[np.int32]:
        """(T, K) int32: the K most likely ids at the place of each generated id, likeliest first.

        K is the most that was asked for (`sampling.top_log_probs`), 0 where nothing was. -1 off the
        mask, and where fewer were asked for.
        """
        top = self._top or {}
        width = max((ids.shape[1] for ids, _ in top.values()), default=0)
        values = np.full((len(self), width), NO_ID, dtype=np.int32)
        for start, (ids, _) in top.items():
            values[start : start + len(ids), : ids.shape[1]] = ids
        return values

    def top_log_probs(self) -> npt.NDArray[np.float32]:
        """(T, K) float32: one for each of `top_ids`; 0.0 where those are -1."""
        values = np.zeros(self.top_ids().shape, dtype=np.float32)
        for start, (ids, log_probs) in (self._top or {}).items():
            values[start : start + len(ids), : ids.shape[1]] = log_probs
        return values

    @property
    def routed_length(self) -> int:
        """Tokens at the beginning whose routed experts are known."""
        if self.expert_shape is None or self._experts is None:
            return 0
        return len(self._experts) // math.prod(self.expert_shape)

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
        self.expert_shape = (layers, top_k)
        self._experts = array("h") if self._experts is None else self._experts
        self._experts.frombytes(np.ascontiguousarray(experts, dtype=np.int16).tobytes())

    def routed_experts(self) -> npt.NDArray[np.int16] | None:
        """(T, layers, top_k) int16: the experts that each token was routed to; -1 unknown.

        None where no engine told any. Of the last token nothing has been computed yet.
        """
        if self.expert_shape is None or self._experts is None:
            return None
        values = np.full((len(self), *self.expert_shape), NO_EXPERT, dtype=np.int16)
        known = np.array(self._experts, dtype=np.int16)
        values[: self.routed_length] = known.reshape(-1, *self.expert_shape)
        return values

    def span_ids(self, span: Span) -> array[int]:
        """The ids of one span, packed."""
        return self.prefix.slice(span.start, span.stop)

    @property
    def turns(self) -> int:
        """How many generated spans there are."""
        return sum(1 for _ in self._spans.generated())

    @property
    def versions(self) -> set[int]:
        """Those of the weights that sampled it."""
        return set(array("i", self._spans.runs)[::2])

    def generated_spans(self) -> Iterator[Span]:
        """The spans that engines returned, in order."""
        return (span for span in self._spans if span.kind == "generated")

    def _require_prompt(self, what: str) -> None:
        if not self._spans:
            raise ValueError(f"{what}: append the prompt first")

    def _place(self, what: str, media: Sequence[PlacedMedia], length: int) -> None:
        """Record media among `length` ids that are appended next."""
        if not media:
            return
        at, end = len(self), 0
        for each in media:
            if each.start < end or each.count < 1 or each.start + each.count > length:
                raise ValueError(
                    f"{what}: {each.medium!r} at {each.start} + {each.count}: expected places in "
                    f"order among {length} ids"
                )
            end = each.start + each.count
        placed = (PlacedMedia(each.medium, at + each.start, each.count) for each in media)
        self.media = (*self.media, *placed)

    def _extend(self, kind: SpanKind, *packed: bytes) -> None:
        if kind == "prompt":
            self.prefix.begin(packed)
        else:
            for piece in packed:
                self.prefix.extend(piece)
        self._spans.append(kind, self.prefix.length)
