"""What a pool does when one of its replicas comes to serve, is lost or is taken down."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import anyio

from rollout.engine.driver.recovery import record_death
from rollout.errors import ChannelError, EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.engine.core import EngineInfo, EngineLoad
    from rollout.engine.driver.channel import Channel
    from rollout.engine.driver.load_windows import LoadWindows
    from rollout.engine.driver.memory_manager import MemoryManager
    from rollout.engine.driver.replica import Replica
    from rollout.engine.driver.request_runner import RequestRunner
    from rollout.engine.driver.wait_queue import Notifier, WaitQueue
    from rollout.engine.driver.weight_updater import WeightUpdater
    from rollout.engine.routing import Router
    from rollout.observe.event_stream import EventStream


class ReplicaTransitions:
    """What the supervisor of the replicas asks for.

    Args:
        wait_s: How long requests wait for a replica once none serves.
        events, load_windows: Take what the engines say that they do.

    Attributes:
        info: The facts that all replicas share; None before the first one serves.
    """

    def __init__(
        self,
        router: Router,
        replicas: Mapping[str, Replica],
        requests: RequestRunner,
        weight_updater: WeightUpdater,
        memory_manager: MemoryManager,
        wait_queue: WaitQueue,
        changes: Notifier,
        *,
        wait_s: float,
        events: EventStream,
        load_windows: LoadWindows,
    ) -> None:
        self._events, self._load_windows = events, load_windows
        self.info: EngineInfo | None = None
        self._router = router
        self._replicas = replicas
        self._requests = requests
        self._weight_updater = weight_updater
        self._memory_manager = memory_manager
        self._wait_queue = wait_queue
        self._changes = changes
        self._wait_s = wait_s

    async def bring_up(self, replica: Replica, channel: Channel) -> None:
        """Let a connected replica serve, once it has the current weights.

        Raises:
            EngineError: It serves another model, or cannot load the weights.
        """
        if self.info is None:
            self.info = channel.info
        elif channel.info.fingerprint != self.info.fingerprint:
            raise EngineError(
                f"{replica.name} serves model {channel.info.fingerprint}, the other engines "
                f"{self.info.fingerprint}"
            )
        self._check_modalities(replica.name, channel.info, self.info)
        await self._weight_updater.bring_up(replica, channel)
        await self._memory_manager.bring_up(channel)
        if channel.lost.is_set():
            raise ChannelError(channel.lost_reason)
        routed = self._router.add(
            replica.name,
            channel.info.max_requests,
            weight=replica.load_share,
            weight_version=channel.info.weight_version,
            now=anyio.current_time(),
        )
        replica.serve(channel, routed)
        self._changes.notify()
        if replica.is_drained:
            self._router.drain(replica.name)
        # At once, so that no request is sent to a replica that is known to be lost.
        channel.on_lost = partial(self._lost, replica)
        channel.on_load = partial(self._loaded, replica)
        self._wait_queue.close_at(math.inf)
        self._wait_queue.wake_next()

    def _loaded(self, replica: Replica, load: EngineLoad) -> None:
        self._router.report(replica.name, load, now=anyio.current_time())
        sample = replica.sample(load)
        self._load_windows.take(sample, len(self._wait_queue))
        if self._events.is_on:
            self._events.emit(sample)

    def _check_modalities(self, name: str, found: EngineInfo, shared: EngineInfo) -> None:
        """All replicas take the same kinds of media: any of them may get a request."""
        if set(found.capabilities.modalities) != set(shared.capabilities.modalities):
            raise EngineError(
                f"{name} takes {_shown(found)}, the other engines {_shown(shared)}; expected the "
                "same of all"
            )

    def _lost(self, replica: Replica) -> None:
        self._router.remove(replica.name)
        replica.lose(self._requests.running_on(replica))
        if not any(other.is_serving for other in self._replicas.values()):
            self._wait_queue.close_at(anyio.current_time() + self._wait_s)

    def classify_loss(self, replica: Replica, channel: Channel, is_death: bool) -> None:
        """A replica was lost, and it is known now whether that was a death of its own."""
        attempts, in_flight = replica.classify_loss()
        is_own = is_death and not (replica.is_closed_by_driver or channel.is_broken_by_command)
        if is_own and self._requests.is_open:
            record_death(attempts, channel.lost_reason, in_flight=in_flight)

    def taken_down(self, replica: Replica, why: str) -> None:
        """A replica does not serve, and why; empty where that is known or it was removed."""
        if why:
            replica.note_error(why)
        self._changes.notify()


def _shown(info: EngineInfo) -> str:
    kinds = " and ".join(("text", *(f"{kind}s" for kind in sorted(info.capabilities.modalities))))
    why = info.capabilities.no_media
    return f"{kinds} ({why})" if why else kinds
