"""The slots that trajectories run in, and what changes their number."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from rollout.scheduling.pressure import AdmissionController

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rollout.engine.core import EngineLoad
    from rollout.scheduling.pressure import Progress

#: Seconds between two looks at the engines' load; they report it once a heartbeat.
OBSERVE_S = 1.0


class Admission:
    """Bounds the trajectories in flight; may be paused, and yields to pressure.

    Attributes:
        limiter: Members take their slot from it; its total is the number allowed now.
    """

    def __init__(self, most: int, *, is_adaptive: bool) -> None:
        self.limiter = anyio.CapacityLimiter(most)
        self._controller = AdmissionController(most)
        self._is_adaptive = is_adaptive
        self._pauses = 0

    @property
    def allowed(self) -> int:
        """Trajectories that may run at once now; 0 while paused."""
        return int(self.limiter.total_tokens)

    def pause(self) -> None:
        """Start no further trajectory until `resume`; those that run continue. Pauses nest."""
        self._pauses += 1
        self._apply()

    def resume(self) -> None:
        """Undo one `pause`."""
        if self._pauses == 0:
            raise ValueError("resume: admission is not paused")
        self._pauses -= 1
        self._apply()

    async def adapt(
        self, loads: Callable[[], Mapping[str, EngineLoad]], progress: Callable[[], Progress]
    ) -> None:
        """Follow the engines' load until cancelled."""
        if not self._is_adaptive:
            return
        while True:
            await anyio.sleep(OBSERVE_S)
            self._controller.observe(loads(), self.limiter.borrowed_tokens, progress())
            self._apply()

    def _apply(self) -> None:
        self.limiter.total_tokens = 0 if self._pauses else self._controller.allowed
