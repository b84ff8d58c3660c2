"""What a runtime says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from rollout.engine.driver.recovery import RecoveryCounts
from rollout.engine.driver.replica_statistics import ReplicaStatistics
from rollout.sandbox.pool import PoolStatistics
from rollout.scheduling.journal.open_journal import JournalStatistics

if TYPE_CHECKING:
    from rollout.engine.driver.pool import EnginePool
    from rollout.observe.loop_lag import LagWindow
    from rollout.observe.tally import Tally


@attrs.frozen(kw_only=True)
class RuntimeStatistics:
    """A runtime now; admitted = finished + in flight.

    Attributes:
        admitted: Trajectories accepted since the start.
        running: Started, and not delivered yet; without those that wait for others of their group.
        carried: Started, and kept for the next call of `collect` or `stream_groups`.
        finished: With an outcome.
        outcomes: How many ended in which way.
        generated_tokens: Sampled tokens that have arrived.
        tool_calls: Calls answered, errors included.
        replicas: The engines.
        zombies: Cancelled requests whose end no engine has confirmed, over all of them.
        recoveries: What was done about requests whose replica was lost.
        unresponsive: Agents, tools, users, rewards and async sources that did not end within
            `limits.cleanup_s` of their cancellation and were given up; the log names each.
        abandoned_threads: Threads left behind at a deadline and still running, by the name of
            their tool, or ``rollout.chat`` where they work on a long text.
        max_running: Trajectories that may run at once now; 0 while admission is paused.
        journal: What became of the journal and of what it held; None where there is none.
        sandboxes: Those of trajectories; None where none was ever asked for.
        loop_lag_s: Longest delay of the event loop by what this process did, since the start.
        loop_starved_s: Longest delay because the machine did not run the loop's thread.
    """

    admitted: int
    running: int
    carried: int
    finished: int
    outcomes: dict[str, int]
    generated_tokens: int
    tool_calls: int
    replicas: tuple[ReplicaStatistics, ...]
    zombies: int
    recoveries: RecoveryCounts
    unresponsive: int
    abandoned_threads: dict[str, int]
    max_running: int
    loop_lag_s: float
    loop_starved_s: float
    journal: JournalStatistics | None = None
    sandboxes: PoolStatistics | None = None


def statistics_of(
    tally: Tally,
    engines: EnginePool,
    lag: LagWindow,
    *,
    abandoned_threads: dict[str, int],
    max_running: int,
    journal: JournalStatistics | None = None,
    sandboxes: PoolStatistics | None = None,
) -> RuntimeStatistics:
    """A snapshot of a runtime."""
    replicas = engines.statistics()
    return RuntimeStatistics(
        admitted=tally.admitted,
        running=tally.running,
        carried=tally.carried,
        finished=tally.finished,
        outcomes={outcome.value: n for outcome, n in tally.outcomes.items() if n},
        generated_tokens=tally.generated_tokens + engines.tokens_under_way,
        tool_calls=tally.tool_calls,
        replicas=replicas,
        zombies=sum(replica.zombies for replica in replicas),
        recoveries=attrs.evolve(engines.recoveries),
        unresponsive=tally.unresponsive,
        abandoned_threads=abandoned_threads,
        max_running=max_running,
        loop_lag_s=lag.blocked_s or 0.0,
        loop_starved_s=lag.starved_s or 0.0,
        journal=journal,
        sandboxes=sandboxes,
    )
