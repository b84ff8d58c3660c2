"""Parts of a runtime for callers outside its loop: its engines, and trajectories as they end."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import anyio

from rollout.chat.trajectory import Trajectory
from rollout.errors import RolloutError

if TYPE_CHECKING:
    from rollout.engine.core import EngineInfo, EngineLoad
    from rollout.engine.driver.pool import EnginePool
    from rollout.engine.driver.replica_statistics import ReplicaStatistics
    from rollout.engine.routing import Router
    from rollout.scheduling.streamed_run import TrajectoryStream

T = TypeVar("T")


class Wait(Protocol):
    """Performs a call on the runtime's loop and waits for it in this thread."""

    def __call__(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What `function` returns there."""


class BlockingEngines:
    """The `EnginePool` of a runtime on another thread; its methods may be called from any."""

    def __init__(self, pool: EnginePool, wait: Wait) -> None:
        self._pool = pool
        self._wait = wait

    @property
    def info(self) -> EngineInfo:
        """The facts that all replicas share."""
        return self._pool.info

    @property
    def router(self) -> Router:
        """Decides where requests go; its `statistics` say why."""
        return self._pool.router

    def statistics(self) -> tuple[ReplicaStatistics, ...]:
        """`EnginePool.statistics`."""
        return self._now(self._pool.statistics)

    def loads(self) -> dict[str, EngineLoad]:
        """`EnginePool.loads`."""
        return self._now(self._pool.loads)

    def drain(self, name: str) -> None:
        """`EnginePool.drain`."""
        self._now(lambda: self._pool.drain(name))

    def resume(self, name: str) -> None:
        """`EnginePool.resume`."""
        self._now(lambda: self._pool.resume(name))

    def add_replica(self, *, load_share: float = 1.0) -> str:
        """`EnginePool.add_replica`, waited for in this thread."""
        return self._wait(lambda: self._pool.add_replica(load_share=load_share))

    def remove_replica(self, name: str, *, drain_s: float | None = None) -> None:
        """`EnginePool.remove_replica`, waited for in this thread."""
        self._wait(lambda: self._pool.remove_replica(name, drain_s=drain_s))

    def _now(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return self._wait(call)


class BlockingTrajectories(Iterator[Trajectory]):
    """Trajectories of `BlockingRollout.stream`, in the order in which they end."""

    def __init__(
        self,
        receive: TrajectoryStream,
        wait: Wait,
        end: Callable[[], None],
    ) -> None:
        self._receive = receive
        self._wait = wait
        self._end = end

    def __next__(self) -> Trajectory:
        """The next one, once it has ended; a RolloutError where the stream is over."""
        try:
            return self._wait(self._receive.receive)
        except anyio.EndOfStream:
            raise StopIteration from None
        except (anyio.ClosedResourceError, RolloutError):
            self._end()  # the runtime may have been closed, and says so
            raise RolloutError("the stream has been left") from None
