"""What a runtime says of itself."""

from __future__ import annotations

import attrs

from rollout.engine.driver.recovery import RecoveryCounts
from rollout.engine.driver.replica_statistics import ReplicaStatistics


@attrs.frozen(kw_only=True)
class RuntimeStatistics:
    """A runtime now; admitted = finished + in flight.

    Attributes:
        admitted: Trajectories accepted since the start.
        running: Started, and not delivered yet.
        finished: With an outcome.
        outcomes: How many ended in which way.
        generated_tokens: Sampled tokens that have arrived.
        tool_calls: Calls answered, errors included.
        replicas: The engines.
        zombies: Cancelled requests whose end no engine has confirmed, over all of them.
        recoveries: What was done about requests whose replica was lost.
        unresponsive: Agents, tools, users and rewards that did not end within `limits.cleanup_s` of
            their cancellation and were given up; the log names each.
        abandoned_threads: Threads left behind at a deadline and still running, by the name of
            their tool, or ``rollout.chat`` where they work on a long text.
        max_running: Trajectories that may run at once now; 0 while admission is paused.
        loop_lag_s: Longest delay of the event loop by what this process did, since the start.
        loop_starved_s: Longest delay because the machine did not run the loop's thread.
    """

    admitted: int
    running: int
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
