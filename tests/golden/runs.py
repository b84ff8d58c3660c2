"""The golden runs: 100 rollouts on the simulated engine, of every kind of work that it can show."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio

from golden import calls, conversations
from golden.stage import JumpingLoop
from rollout.testing import run_virtual

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Kind(NamedTuple):
    """A function of a seed that makes a run, and how many seeds are recorded."""

    run: Callable[[int], Awaitable[list[dict[str, Any]]]]
    seeds: int


KINDS = {
    "tools": Kind(conversations.tools, 8),
    "lengths": Kind(conversations.lengths, 6),
    "turn_limits": Kind(conversations.turn_limits, 6),
    "segments": Kind(conversations.segments, 7),
    "compaction": Kind(conversations.compaction, 4),
    "sampling": Kind(conversations.sampling, 6),
    "users": Kind(conversations.users, 4),
    "rewards": Kind(conversations.rewards, 8),
    "failures": Kind(conversations.failures, 2),
    "groups": Kind(calls.groups, 8),
    "carried": Kind(calls.carried, 8),
    "streamed_groups": Kind(calls.streamed_groups, 6),
    "deadlines": Kind(calls.deadlines, 8),
    "cancelled": Kind(calls.cancelled, 7),
    "streamed": Kind(calls.streamed, 4),
    "weights": Kind(calls.weights, 5),
    "lost_replicas": Kind(calls.lost_replicas, 3),
}


def play(name: str, backend: str, schedule_seed: int = 0) -> dict[str, Any]:
    """Play a run, ``KIND-SEED``, as plain data.

    Args:
        name: Of the run.
        backend: "trio" in virtual time, or "asyncio" in real time.
        schedule_seed: Of trio's order of tasks; it makes no difference.
    """
    kind, _, seed = name.rpartition("-")
    function, number = KINDS[kind].run, int(seed)
    if backend == "trio":
        called = run_virtual(function, number, seed=schedule_seed)
    else:
        options = {"loop_factory": JumpingLoop}
        called = anyio.run(function, number, backend="asyncio", backend_options=options)
    played: dict[str, Any] = json.loads(json.dumps({"calls": called}))
    return played
