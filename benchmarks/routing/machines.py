"""What a workload's replicas run on; no policy is told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from rollout.engine.cores.simulated.options import Capacity

if TYPE_CHECKING:
    from collections.abc import Callable


@attrs.frozen
class Machine:
    """One replica's hardware.

    Attributes:
        slowness: Times of everything, in multiples of the simulated engine's own.
        max_running: Requests that it decodes together; others wait in its queue.
    """

    slowness: float = 1.0
    max_running: int = Capacity().max_running


def one_at_half_speed(replicas: int) -> tuple[Machine, ...]:
    """All alike, but for the first, which takes twice the time for everything."""
    return (Machine(slowness=2.0), *[Machine()] * (replicas - 1))


def one_at_double_speed(replicas: int) -> tuple[Machine, ...]:
    """The first takes half the time for everything; all decode 32 requests together."""
    return (Machine(slowness=0.5, max_running=32), *[Machine(max_running=32)] * (replicas - 1))


def mix_of(*machines: Machine) -> Callable[[int], tuple[Machine, ...]]:
    """These, again and again until there are as many as are asked for."""

    def fleet(replicas: int) -> tuple[Machine, ...]:
        return tuple(machines[number % len(machines)] for number in range(replicas))

    return fleet
