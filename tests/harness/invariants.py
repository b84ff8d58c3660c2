"""Checks a finished run against what was seen from outside.

The invariants, each with the check that guards it:

* every accepted trajectory ends in exactly one outcome: `_delivery_anomalies`, `_count_anomalies`;
* a transcript is what its engines said, token by token: `transcript_checks`;
* the tensors say what the transcripts say: `tensor_checks`;
* each request is sampled as its caller asked: `sampling_checks`;
* every token is accounted for: `token_accounting`;
* groups are whole, none comes twice, with their engines' tokens: `_group_anomalies`;
* nothing is left: `_leftover_anomalies`;
* no limit is exceeded, and a cancellation arrives: `_time_anomalies`.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from harness.sampling_checks import sampling_anomalies
from harness.tensor_checks import batch_anomalies
from harness.token_accounting import accounting_anomalies
from harness.transcript_checks import (
    EPSILON_S,
    Facts,
    is_session_of,
    trajectory_anomalies,
)
from rollout.engine.core import CORE_CLOSE_S
from rollout.engine.pool.request_runner import limit_last_answer
from rollout.scheduling.endings import CLOSED
from rollout.seeds import session_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.call_records import CallRecord, GenerationRecord
    from harness.watched_runtime import WatchedRuntime
    from harness.watched_tools import Use
    from rollout.chat.trajectory import Trajectory
    from rollout.config import LimitsConfig


def anomalies_of(watched: WatchedRuntime) -> list[str]:
    """Everything that contradicts an invariant, in words; empty if all is well."""
    return list(_anomalies(watched))


def _anomalies(watched: WatchedRuntime) -> Iterator[str]:
    facts = _facts(watched)
    yield from _group_anomalies(watched)
    for call in watched.calls:
        yield from _time_anomalies(call, watched.config.limits, EPSILON_S)
        if call.is_of_groups:
            continue
        yield from _delivery_anomalies(call)
        yield from sampling_anomalies(call, watched.cores, facts, watched.run_seed)
        for trajectory in call.delivered:
            session = call.session_of(trajectory)
            for text in trajectory_anomalies(trajectory, call, facts):
                yield f"{session}: {text}"
        if call.batch is not None:
            pad_id = watched.template.pad_token_id
            yield from batch_anomalies(call.batch, call, watched.config.lengths, pad_id)
    yield from _reward_anomalies(watched)
    yield from _leftover_anomalies(watched)
    if watched.statistics_at_end is not None:
        yield from _count_anomalies(watched)
        yield from accounting_anomalies(watched)


def _facts(watched: WatchedRuntime) -> Facts:
    info = watched.cores[0].info if watched.cores else None
    is_closed = watched.closed_in_s is not None
    return Facts(
        config=watched.config,
        context_length=info.context_length if info else 0,
        is_simulated=info is not None and info.fingerprint == "simulated",
        reasons={*watched.reasons, CLOSED} if is_closed else watched.reasons,
        has_reward=watched.has_reward,
    )


def _delivery_anomalies(call: CallRecord) -> Iterator[str]:
    """Each member at most once; each exactly once, in the order of rows, where all came."""
    expected = [
        (f"prompt-{group}" if prompt.uid is None else prompt.uid, group, member)
        for group, prompt in enumerate(call.prompts if call.members else ())
        for member in range(call.samples)
    ]
    found = [(t.uid, t.group, t.member) for t in call.delivered]
    for name, count in (Counter(found) - Counter(expected)).items():
        yield f"{call.kind}: {name[0]}/{name[2]} was delivered {count} times too often"
    if call.is_complete or call.failure == "LimitExceeded":
        for name in Counter(expected) - Counter(found):
            yield f"{call.kind}: {name[0]}/{name[2]} was not delivered"
    known = set(found)
    if call.kind == "generate" and found != [name for name in expected if name in known]:
        yield "generate: the rows are not in the order of the prompts"


def _time_anomalies(call: CallRecord, limits: LimitsConfig, slack_s: float) -> Iterator[str]:
    assert call.ended is not None
    slack = 4 * limits.cleanup_s + slack_s
    took = call.ended - call.started
    if call.kind == "generate" and limits.batch_s is not None and took > limits.batch_s + slack:
        yield f"generate took {took:g} s; limits.batch_s = {limits.batch_s:g}"
    if call.cancelled_at is not None and call.ended > call.cancelled_at + EPSILON_S:
        late_s = call.ended - call.cancelled_at
        if not call.failure:
            yield f"{call.kind} ran for {late_s:g} s after its caller was cancelled"
        elif late_s > slack:
            yield f"{call.kind} took {late_s:g} s to end after its caller was cancelled"
    if call.kind == "generate" and call.stopped_at is not None:
        late_s = call.ended - call.stopped_at
        if late_s > slack:
            yield f"generate took {late_s:g} s to return after everything was cancelled"
    if call.may_carry:
        return  # what is carried has its limits afresh, which nobody can see from outside
    for session, records in call.generations.items():
        for each in records:
            yield from _request_anomalies(session, each, limits, slack_s)
    for (uid, member), uses in call.uses.items():
        main = session_name(call.step, uid, member)
        asked = [
            a for s, several in call.generations.items() if is_session_of(s, main) for a in several
        ]
        asked.sort(key=lambda each: each.started)
        for use in uses:
            yield from _use_anomalies(main, use, asked, limits, slack_s)


def _request_anomalies(
    session: str, record: GenerationRecord, limits: LimitsConfig, slack_s: float
) -> Iterator[str]:
    if record.ended is None:
        yield f"{session}: a generation is still under way"
        return
    if not record.failure and record.generation.finish_reason is None:
        yield f"{session}: a generation returned before its engine had finished"
    if limits.generation_s is not None:
        took = record.ended - record.started - record.generation.held_s
        # One that is cut off waits a moment for what has been sampled already.
        slack = limit_last_answer(limits.cleanup_s) + slack_s
        if took > limits.generation_s + slack:
            yield f"{session}: a generation took {took:g} s; limits.generation_s = " + (
                f"{limits.generation_s:g}"
            )


def _use_anomalies(
    session: str, use: Use, records: list[GenerationRecord], limits: LimitsConfig, slack_s: float
) -> Iterator[str]:
    if use.closes != 1:
        yield f"{session}: {use.name!r} was closed {use.closes} times; expected once"
    for start, end in use.runs:
        if start is None or end is None:
            yield f"{session}: {use.name!r} is still answering"
            continue
        if use.is_tool and limits.tool_s is not None and end - start > limits.tool_s + slack_s:
            yield f"{session}: {use.name!r} ran for {end - start:g} s; limits.tool_s = " + (
                f"{limits.tool_s:g}"
            )
        turns = [each.started for each in records if each.ended is not None and each.ended <= start]
        if turns and limits.turn_s is not None and end - turns[-1] > limits.turn_s + slack_s:
            yield f"{session}: a turn with {use.name!r} took {end - turns[-1]:g} s; " + (
                f"limits.turn_s = {limits.turn_s:g}"
            )


def _reward_anomalies(watched: WatchedRuntime) -> Iterator[str]:
    # A reward function gets a copy of each trajectory, with the same transcript.
    times_asked: Counter[int] = Counter()
    calls = 1 + watched.config.rewards.retries
    for rewarded in (watched.rewarded, watched.rewarded_in_groups):
        times = Counter(id(trajectory.transcript) for trajectory in rewarded)
        times_asked += times
        for trajectory in rewarded:
            if times[id(trajectory.transcript)] > calls:
                yield f"{trajectory.uid}/{trajectory.member}: its reward was asked for too often"
    for call in watched.calls if watched.has_reward else ():  # agents may give one themselves
        for trajectory in call.delivered:
            if trajectory.reward is not None and not times_asked[id(trajectory.transcript)]:
                yield f"{call.session_of(trajectory)}: a reward that nobody was asked for"


def _leftover_anomalies(watched: WatchedRuntime) -> Iterator[str]:
    is_closed = watched.closed_in_s is not None
    end = watched.statistics_at_end
    unresponsive = 0 if end is None else end.unresponsive  # closing waits for code that shields
    took = watched.closed_in_s
    if took is not None and took > 2 * CORE_CLOSE_S + EPSILON_S and not unresponsive:
        yield f"closing took {took:g} s"
    for core in watched.cores:
        for request_id in core.reused_ids:
            yield f"{core.name}: request id {request_id} was used twice"
        for request_id, sent in core.requests.items():
            if sent.is_open and (is_closed or watched.is_settled):
                session = sent.request.session_id
                yield f"{session}: {core.name} still works on its request {request_id}"
        if is_closed and not core.is_gone:
            yield f"{core.name} was not closed"
    ids = {rid for core in watched.cores for rid in core.requests}
    if len({len(request_id) for request_id in ids}) > 1:
        yield "request ids differ in length: one may be a prefix of another"
    for call in watched.calls:
        for session in call.generations.keys() - watched.forgotten:
            yield f"{session}: the router was not told that it has ended"


def _count_anomalies(watched: WatchedRuntime) -> Iterator[str]:
    end, before = watched.statistics_at_end, watched.statistics_before
    assert end is not None
    accepted = sum(call.members for call in watched.calls)
    has_groups = any(call.is_of_groups for call in watched.calls)
    if has_groups and end.admitted != end.finished + end.carried + end.running:
        yield (
            f"statistics: {end.admitted} admitted, {end.finished} finished, {end.carried} "
            f"carried, {end.running} running"
        )
    for name in () if has_groups else ("admitted", "finished"):
        count = getattr(end, name) - (getattr(before, name) if before else 0)
        if count != accepted:
            yield f"statistics: {name} = {count}; {accepted} trajectories were accepted"
    outcomes = Counter(end.outcomes)
    outcomes.subtract(before.outcomes if before else {})
    for name, count in Counter(t.outcome.value for c in watched.calls for t in c.delivered).items():
        if count > outcomes[name]:
            yield f"statistics: {outcomes[name]} {name}; {count} such were delivered"
    generated = end.generated_tokens - (before.generated_tokens if before else 0)
    taken = sum(len(a.generation.ids) for call in watched.calls for a in call.all_generations())
    if generated != taken:
        yield f"statistics: {generated} generated tokens; agents have {taken}"
    if end.running or watched.places_held:
        yield f"{end.running} trajectories run and {watched.places_held} places are held"
    for replica in end.replicas:
        if replica.in_flight or replica.zombies:
            yield f"{replica.name}: {replica.in_flight} in flight, {replica.zombies} zombies"


def _group_anomalies(watched: WatchedRuntime) -> Iterator[str]:
    """What is wrong with the groups that were delivered."""
    calls = [call for call in watched.calls if call.is_of_groups]
    delivered = [t for call in calls for t in call.delivered]
    transcripts = Counter(id(t.transcript) for t in delivered if t.transcript)
    if any(count > 1 for count in transcripts.values()):
        yield "a trajectory of a group was delivered twice"
    for call in calls:
        yield from _group_shape_anomalies(call)
    records = [record for call in watched.calls for record in call.all_generations()]
    for trajectory in delivered:
        yield from _group_token_anomalies(trajectory, records)


def _group_shape_anomalies(call: CallRecord) -> Iterator[str]:
    found = [
        (uid, [t.member for t in rows]) for uid, rows in groupby(call.delivered, attrgetter("uid"))
    ]
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


def _group_token_anomalies(
    trajectory: Trajectory, records: list[GenerationRecord]
) -> Iterator[str]:
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
