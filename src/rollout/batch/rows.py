"""The rows of a batch: which tokens of which transcripts go into its tensors.

Shapes: B rows; of a row T tokens, N of them in the response.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rollout.chat.transcript import NO_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollout.batch.multi_modal import RowPositions
    from rollout.chat.trajectory import Segment, Trajectory
    from rollout.chat.transcript import Transcript

#: Tokens that are laid out at once: a few milliseconds of work.
CHUNK = 1 << 21


class Lengths(Protocol):
    """The widths of the tensors in tokens; `rollout.LengthsConfig` has them."""

    @property
    def prompt(self) -> int:
        """P."""

    @property
    def response(self) -> int:
        """R."""


class Place(NamedTuple):
    """A segment of a trajectory, and which: one row."""

    trajectory: Trajectory
    at: int
    segment: Segment

    @property
    def transcript(self) -> Transcript:
        return self.segment.transcript


class Rows:
    """Where the rows of a batch begin and end, checked.

    Attributes:
        places: What each row is made of.
        prompts: (B,) tokens of each prompt.
        responses: (B,) tokens of each response, up to the last generated one.
        expert_shape: (layers, top_k) of the routed experts; None where none are known.
        has_token_rewards: Whether any row has rewards of tokens.
        positions: Those of an M-RoPE family; None of all others.

    Raises:
        ValueError: A prompt or response is longer than `lengths` allow, or what is told of its
            tokens does not fit; names the uid.
    """

    def __init__(self, trajectories: Sequence[Trajectory], lengths: Lengths) -> None:
        self.places = [
            Place(each, at, segment)
            for each in trajectories
            for at, segment in enumerate(each.segments)
        ]
        prompts, responses = [], []
        for place in self.places:
            transcript = place.transcript
            prompts.append(transcript.prompt_length)
            whole = transcript.response_length
            responses.append(whole - transcript.trailing_observation_length)
            _check_length(place, "prompt", prompts[-1], lengths.prompt)
            _check_length(place, "response", responses[-1], lengths.response)
            _check_token_rewards(place, whole)
        self.prompts = np.array(prompts, dtype=np.int64)
        self.responses = np.array(responses, dtype=np.int64)
        self.expert_shape = _expert_shape(self.places)
        self.positions: RowPositions | None = None
        self.has_token_rewards = any(p.segment.token_rewards is not None for p in self.places)

    def __len__(self) -> int:
        return len(self.places)

    def chunks(self, sizes: npt.NDArray[np.int64]) -> Iterator[slice]:
        """All rows, in runs of those of at most `CHUNK` tokens by their (B,) sizes, or of one."""
        start, room = 0, CHUNK
        for row, size in enumerate(sizes.tolist()):
            if row > start and size > room:
                yield slice(start, row)
                start, room = row, CHUNK
            room -= size
        if len(self):
            yield slice(start, len(self))

    def tokens(self, at: slice) -> Tokens:
        """Those of some rows."""
        return Tokens(self, at)

    def experts(self, row: int) -> npt.NDArray[np.int16] | None:
        """(T, layers, top_k) of one row; None where they are not known."""
        count = int(self.prompts[row] + self.responses[row])
        experts = self.places[row].transcript.routed_experts()
        return None if experts is None else experts[:count]


class Tokens:
    """The tokens of some rows, one row after the other.

    Shapes: B rows, T tokens and N response tokens of all of them.

    Attributes:
        rows: Which they are of.
        prompts, responses: (B,) tokens of each prompt and response.
        ids: (T,) int32.
        sampled: (N,) bool, whether an engine sampled it.
        versions: (N,) int32, of the weights that did; `NO_VERSION` where none did.
        log_probs: float32, one for each sampled id.
        token_rewards: (N,) float32, NaN where nobody gave any; None where no row of the batch has.
    """

    def __init__(self, rows: Rows, at: slice) -> None:
        self.rows = at
        self.prompts, self.responses = rows.prompts[at], rows.responses[at]
        places = rows.places[at]
        # Joined as bytes: that lets other threads run, and copies of arrays would not.
        stops = (self.prompts + self.responses) * np.dtype(np.int32).itemsize
        ids = [
            place.transcript.ids_bytes()[:stop]
            for place, stop in zip(places, stops.tolist(), strict=True)
        ]
        self.ids = np.frombuffer(b"".join(ids), dtype=np.int32)
        log_probs = [place.transcript.log_probs_bytes() for place in places]
        self.log_probs = np.frombuffer(b"".join(log_probs), dtype=np.float32)
        self.sampled, self.versions = _authors(places, self.responses)
        self.token_rewards = (
            _token_rewards(places, self.responses) if rows.has_token_rewards else None
        )

    def by_row(self, rows: Rows) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
        """The index of each row in the batch, and its ids."""
        stops = np.cumsum(self.prompts + self.responses)
        yield from zip(range(len(rows))[self.rows], np.split(self.ids, stops[:-1]), strict=True)


def _authors(
    places: Sequence[Place], responses: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int32]]:
    """(N,) whether each response token was sampled, and by which weights."""
    counts: list[int] = []
    versions: list[int | None] = []
    for place, length in zip(places, responses.tolist(), strict=True):
        left = length
        for count, version in place.transcript.runs():
            if not left:  # what follows was observed, and nothing answers it
                break
            counts.append(count)
            versions.append(version)
            left -= count
    sampled = np.array([version is not None for version in versions], dtype=np.bool_)
    numbers = [NO_VERSION if version is None else version for version in versions]
    repeats = np.array(counts, dtype=np.int64)
    return np.repeat(sampled, repeats), np.repeat(np.array(numbers, dtype=np.int32), repeats)


def _token_rewards(
    places: Sequence[Place], responses: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """(N,) the rewards of response tokens; NaN where nobody gave any."""
    pieces = [
        np.full(count, np.nan, dtype=np.float32)
        if place.segment.token_rewards is None
        else np.array(place.segment.token_rewards, dtype=np.float32)[:count]
        for place, count in zip(places, responses.tolist(), strict=True)
    ]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.float32)


def _check_length(place: Place, what: str, length: int, longest: int) -> None:
    if length > longest:
        trajectory = place.trajectory
        raise ValueError(
            f"{trajectory.uid!r} member {trajectory.member}: its {what} has {length} tokens, "
            f"lengths.{what} = {longest}"
        )


def _check_token_rewards(place: Place, expected: int) -> None:
    values = place.segment.token_rewards
    if values is not None and len(values) != expected:
        trajectory = place.trajectory
        raise ValueError(
            f"{trajectory.uid!r} member {trajectory.member}: segments[{place.at}] has "
            f"{len(values)} token_rewards; expected {expected}"
        )


def _expert_shape(places: Sequence[Place]) -> tuple[int, int] | None:
    """(layers, top_k) of the rows whose routed experts are known; None where none are.

    Raises:
        ValueError: Not all have the same.
    """
    found: tuple[int, int] | None = None
    for place in places:
        trajectory, shape = place.trajectory, place.transcript.expert_shape
        if shape is not None and shape != (found or shape):
            raise ValueError(
                f"{trajectory.uid!r} member {trajectory.member}: routed experts of shape {shape}, "
                f"other rows have {found}"
            )
        found = found or shape
    return found
