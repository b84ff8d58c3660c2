"""This project's router as a policy to be measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rollout.engine.routing import STRATEGIES, Router

if TYPE_CHECKING:
    from rollout.engine.core import EngineLoad
    from rollout.engine.routing import Dispatch

    from .workloads import Session

__all__ = ["STRATEGIES", "Ours"]

#: What a request may generate at most, as `lengths` would say it.
MAX_NEW_TOKENS = 4096


class Ours:
    """A new router, which knows neither the workload nor which replica is slow."""

    def __init__(self, strategy: str, replicas: int, seed: int) -> None:
        self._router = Router(strategy=strategy)
        self._names = [f"engine-{number}" for number in range(replicas)]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._seed = seed
        self._open: dict[str, Dispatch] = {}
        for name in self._names:
            self._router.add(name, 4096)

    def assign(self, now: float, session: Session, prompt_tokens: int, turn: int) -> int:
        """See `rollout.engine.Router.assign`."""
        dispatch = self._router.assign(
            f"{self._seed}/{session.name}",
            group_id=session.group,
            prompt_tokens=prompt_tokens,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        assert dispatch is not None
        self._open[session.name] = dispatch
        return self._numbers[dispatch.replica.name]

    def release(self, now: float, replica: int, session: Session, turn: int, cached: int) -> None:
        """See `rollout.engine.Router.release`."""
        generated = session.turns[turn].generated
        self._router.release(self._open.pop(session.name), generated=generated)

    def report(self, now: float, loads: list[EngineLoad]) -> None:
        """See `rollout.engine.Router.report`."""
        for name, load in zip(self._names, loads, strict=True):
            timed = msgspec.structs.replace(load, measured_at_s=now)
            self._router.report(name, timed, now=now)

    def forget(self, session: Session) -> None:
        """See `rollout.engine.Router.forget`."""
        self._router.forget(f"{self._seed}/{session.name}")
