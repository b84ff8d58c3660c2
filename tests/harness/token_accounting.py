"""Accounts for every token that an engine gave out.

    given = taken + late + repeated + refused + lost

What a request's tokens became is worked out here from the chunks themselves and from what the
agent had in its hands at the end, by the rules of the protocol and not by the code that is
checked; then it is compared with what the channels counted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from rollout.engine.pool.generation import Generation, TokenCounts
from rollout.engine.routing import Dispatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from harness.call_records import GenerationRecord
    from harness.watched_core import WatchedCore
    from harness.watched_runtime import WatchedRuntime
    from rollout.engine.core import Chunk

KINDS = ("taken", "late", "repeated", "refused")


@dataclass(slots=True)
class Balance:
    """Where all tokens of a runtime went; `given` is the sum of the others.

    Attributes:
        given: What its engines gave out.
        transcripts: In trajectories that were delivered.
        discarded: Of attempts, or generations, that were made again after an engine had failed.
        undelivered: In trajectories that no caller received, because their call was cancelled or
            its stream left.
        late: Arrived after the request had been given up.
        repeated: Arrived twice, or after the end.
        refused: In faulty chunks.
        lost: On their way when a connection broke.
    """

    given: int = 0
    transcripts: int = 0
    discarded: int = 0
    undelivered: int = 0
    late: int = 0
    repeated: int = 0
    refused: int = 0
    lost: int = 0

    @property
    def is_even(self) -> bool:
        """Whether every token went somewhere, and none came from nowhere."""
        given, *parts = (getattr(self, field.name) for field in fields(self))
        return bool(given == sum(parts) and min(parts) >= 0)


def _is_failed(generation: Generation) -> bool:
    """Whether its last request failed, and was about to be made again."""
    return generation.resumes + len(generation.restarts) == len(generation.parts)


class _ExpectedCounts:
    """What became of one request's tokens if all of them arrived.

    Args:
        chunks: What the engine gave out.
        record: The generation that they were for; None where no caller waited in the end.
        part: What of them the agent has, or had and dropped.
        is_lossy: The connection broke, so that tokens at the end may be missing.

    Attributes:
        counts: What the channel should have counted.
        late_or_refused: Tokens of the faulty chunk, counted as late here, that came when the caller
            left: refused if it came just before.
        fault: What the agent should not have, or should have; empty if all is well.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        record: GenerationRecord | None,
        part: Dispatch | None,
        *,
        is_lossy: bool,
    ) -> None:
        self.counts = TokenCounts()
        self.late_or_refused = 0
        self.fault = ""
        self._is_lossy = is_lossy
        self._had = part.count if part is not None else 0
        self._is_cut = record is None or (
            record.generation.finish_reason is None
            and part is record.generation.parts[-1]
            and not _is_failed(record.generation)
        )
        self._ids, self._log_probs = bytearray(), bytearray()
        self._state = "live" if record is not None else "given up"
        for chunk in chunks:
            self._take(chunk)
        if record is not None and part is not None:
            self._compare(record, part)

    def _take(self, chunk: Chunk) -> None:
        count, ends = len(chunk.ids) // 4, chunk.finish_reason is not None
        have = len(self._ids) // 4
        is_faulty = len(chunk.log_probs) != len(chunk.ids) or chunk.offset > have
        if self._state == "live" and self._is_cut and have == self._had and (count or ends):
            self._state = "given up"  # its caller was gone by then
            self.late_or_refused = count if is_faulty else 0
        if self._state == "ended":
            self.counts.repeated += count
        elif self._state == "given up":
            self.counts.late += count
        elif is_faulty:
            self.counts.refused += count
            self._state = "given up"
        elif chunk.offset < have:
            self.counts.repeated += count
        else:
            self.counts.taken += count
            self._ids += chunk.ids
            self._log_probs += chunk.log_probs
        if ends:
            self._state = "ended"

    def _compare(self, record: GenerationRecord, part: Dispatch) -> None:
        generation, kept = record.generation, slice(part.start, part.start + part.count)
        ids, log_probs = generation.ids[kept].tobytes(), generation.log_probs[kept].tobytes()
        is_short = self._is_lossy and self._had < len(self._ids) // 4
        if self._had != len(self._ids) // 4 and not is_short:
            self.fault = (
                f"the agent has {self._had} tokens of it; the engine gave it {self.counts.taken}"
            )
        elif part.is_discarded:
            return  # nobody has them any more
        elif ids != self._ids[: len(ids)]:
            self.fault = "the agent's ids are not those that the engine gave out"
        elif log_probs != self._log_probs[: len(ids)]:
            self.fault = "the agent's log-probs are not those that the engine gave out"


def accounting_anomalies(watched: WatchedRuntime) -> Iterator[str]:
    """What does not balance, to the token; all requests must have come to their end."""
    records_by_id = {
        part.request_id: (record, part)
        for call in watched.calls
        for record in call.all_generations()
        for part in record.generation.parts
    }
    counts = _counts_by_replica(watched)
    for name, counted in counts.items():
        cores = [core for core in watched.cores if core.name == name]
        taken = sum(part.count for _, part in records_by_id.values() if part.replica.name == name)
        yield from _replica_anomalies(name, counted, cores, records_by_id, taken)


def balance_of(watched: WatchedRuntime) -> Balance:
    """Where the tokens of a settled runtime went, since its records begin."""
    balance = Balance()
    for core in watched.cores:
        for sent in core.requests.values():
            balance.given += sum(len(chunk.ids) // 4 for chunk in sent.chunks)
    for counted in _counts_by_replica(watched).values():
        balance.late += counted.late
        balance.repeated += counted.repeated
        balance.refused += counted.refused
        balance.lost -= counted.arrived
    balance.lost += balance.given
    taken = sum(
        part.count
        for call in watched.calls
        for record in call.all_generations()
        for part in record.generation.parts
    )
    for call in watched.calls:
        for trajectory in call.delivered:
            balance.transcripts += trajectory.generated_length
            balance.discarded += int(trajectory.metrics.get("discarded_tokens", 0))
    balance.undelivered = taken - balance.transcripts - balance.discarded
    return balance


def _counts_by_replica(watched: WatchedRuntime) -> Mapping[str, TokenCounts]:
    """What the channels counted since the records begin."""
    end, before = watched.statistics_at_end, watched.statistics_before
    earlier = {r.name: r.tokens for r in before.replicas} if before is not None else {}
    return {
        replica.name: _difference(replica.tokens, earlier.get(replica.name, TokenCounts()))
        for replica in (end.replicas if end is not None else ())
    }


def _difference(counts: TokenCounts, earlier: TokenCounts) -> TokenCounts:
    return TokenCounts(*(getattr(counts, kind) - getattr(earlier, kind) for kind in KINDS))


def _replica_anomalies(
    name: str,
    counted: TokenCounts,
    cores: Sequence[WatchedCore],
    records_by_id: Mapping[str, tuple[GenerationRecord, Dispatch]],
    taken: int,
) -> Iterator[str]:
    if counted.taken != taken:
        yield f"{name}: {counted.taken} tokens were counted as taken; agents have {taken} of it"
    sure, at_most = TokenCounts(), TokenCounts()
    for core in cores:
        for request_id, sent in core.requests.items():
            record, part = records_by_id.get(request_id, (None, None))
            expected_counts = _ExpectedCounts(
                sent.chunks, record, part, is_lossy=not core.is_serving
            )
            where = f"{sent.request.session_id}: request {request_id} to {name}"
            if expected_counts.fault:
                yield f"{where}: {expected_counts.fault}"
            if record is not None and part is not None and not part.is_discarded:
                before = record.generation.ids[: part.start].tobytes()
                if record.prompt_ids + before != sent.request.prompt_ids:
                    yield f"{where}: the engine got other prompt ids than the agent sent"
            for kind in KINDS:
                count = getattr(expected_counts.counts, kind)
                setattr(at_most, kind, getattr(at_most, kind) + count)
                if core.is_serving:
                    setattr(sure, kind, getattr(sure, kind) + count)
            at_most.refused += expected_counts.late_or_refused
            sure.late -= expected_counts.late_or_refused if core.is_serving else 0
    for kind in KINDS[1:]:
        low, number, high = getattr(sure, kind), getattr(counted, kind), getattr(at_most, kind)
        if not low <= number <= high:
            expected = f"{low}" if low == high else f"{low} to {high}"
            yield f"{name}: {number} tokens were counted as {kind}; expected {expected}"
