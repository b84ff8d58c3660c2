"""How many trajectories may run at once, given what the engines say of themselves.

Additive increase, multiplicative decrease (Chiu and Jain 1989), as TCP does it: the number shrinks
at once when engines preempt or are nearly full, and grows by small steps while they are not.
A pure state machine: it owns no task and no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.engine.core import EngineLoad

#: KV use past which one more trajectory would soon push another out.
HIGH_KV = 0.95
#: KV use below which there is room for more.
LOW_KV = 0.80
#: Queued requests for each running one past which more trajectories only wait.
HIGH_QUEUE = 2.0
DECREASE = 0.75
#: Share of the maximum by which the number grows at each observation without pressure.
INCREASE = 0.05
#: Observations between two decreases: the first must be able to take effect.
SETTLE = 5


@attrs.define
class AdmissionController:
    """The number of trajectories in flight, adapted to pressure.

    Attributes:
        most: Never more than this; also the start.
        least: Never fewer than this, so that a batch always goes on.
        allowed: The number now.
    """

    most: int
    least: int = 1
    allowed: int = attrs.field(init=False)
    _preemptions: dict[str, int] = attrs.field(init=False, factory=dict)
    _settling: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.allowed = self.most

    def observe(self, loads: Mapping[str, EngineLoad], in_flight: int) -> int:
        """Take one round of loads, by replica; the number allowed from now on.

        Args:
            loads: What each live engine last said.
            in_flight: Trajectories running now: a decrease starts from no more than these.
        """
        self._settling = max(0, self._settling - 1)
        has_preempted = self._count_preemptions(loads)
        if not loads:
            return self.allowed
        kv_used = max(load.kv_used for load in loads.values())
        running = sum(load.running for load in loads.values())
        queued = sum(load.queued for load in loads.values())
        is_high = has_preempted or kv_used > HIGH_KV or queued > HIGH_QUEUE * max(1, running)
        is_low = kv_used < LOW_KV and queued <= running
        if is_high and self._settling == 0:
            self._settling = SETTLE
            base = min(self.allowed, max(in_flight, self.least))
            self.allowed = max(self.least, int(base * DECREASE))
        elif is_low and not is_high:
            step = max(1, int(self.most * INCREASE))
            self.allowed = min(self.most, self.allowed + step)
        return self.allowed

    def _count_preemptions(self, loads: Mapping[str, EngineLoad]) -> bool:
        """Whether any engine has preempted since the last round; a restarted one counts anew."""
        before, self._preemptions = (
            self._preemptions,
            {name: load.preemptions for name, load in loads.items()},
        )
        return any(count > before.get(name, count) for name, count in self._preemptions.items())
