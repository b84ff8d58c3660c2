"""Checks of calls that take groups: whole, in order, none twice, and with their engines' tokens."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.call_records import CallRecord, GenerationRecord
    from harness.watched_runtime import WatchedRuntime
    from rollout.chat.trajectory import Trajectory


def group_anomalies(watched: WatchedRuntime) -> Iterator[str]:
    """What is wrong with the groups that were delivered."""
    calls = [call for call in watched.calls if call.is_of_groups]
    delivered = [t for call in calls for t in call.delivered]
    transcripts = Counter(id(t.transcript) for t in delivered if t.transcript)
    if any(count > 1 for count in transcripts.values()):
        yield "a trajectory of a group was delivered twice"
    for call in calls:
        yield from _shape_anomalies(call)
    records = [record for call in watched.calls for record in call.all_generations()]
    for trajectory in delivered:
        yield from _token_anomalies(trajectory, records)


def _shape_anomalies(call: CallRecord) -> Iterator[str]:
    found = [(uid, [t.member for t in rows]) for uid, rows in groupby(call.delivered, _uid)]
    names = Counter(uid for uid, _ in found)
    for uid, count in names.items():
        if count > 1:
            yield f"{call.kind}: the group {uid} was delivered {count} times, or is not adjacent"
    for uid, members in found:
        if call.wanted_members and len(members) != call.wanted_members:
            yield f"{call.kind}: the group {uid} has {len(members)} members"
        if members != sorted(set(members)):
            yield f"{call.kind}: the members of {uid} are {members}"
    if call.groups and len(found) > call.groups:
        yield f"collect: {len(found)} groups; {call.groups} were wanted"


def _uid(trajectory: Trajectory) -> str:
    return trajectory.uid


def _token_anomalies(trajectory: Trajectory, records: list[GenerationRecord]) -> Iterator[str]:
    """Each turn is what one of its generations brought, with the versions of that one."""
    for segment in trajectory.segments:
        whole = segment.transcript.ids_bytes()
        for span in segment.transcript.generated_spans():
            ids = whole[4 * span.start : 4 * span.stop]
            versions = [list(run) for run in span.versions]
            if not any(_brought(record, ids, versions) for record in records):
                name = f"{trajectory.uid}/{trajectory.member}"
                yield f"{name}: a turn of {len(span)} tokens that no engine gave like that"


def _brought(record: GenerationRecord, ids: bytes, versions: list[list[int]]) -> bool:
    generation = record.generation
    if generation.ids.tobytes() == ids:
        return [list(run) for run in generation.versions] == versions or not ids
    return bool(ids) and generation.ids.tobytes().startswith(ids)
