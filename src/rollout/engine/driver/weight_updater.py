"""Which weights the replicas of a pool are to have, and how they get them."""

from __future__ import annotations

import logging
from numbers import Integral
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.engine.channel.operations import LoadWeights
from rollout.engine.driver.replica import Weights, last_errors
from rollout.engine.driver.weight_broadcast import WeightBroadcast, check_gpus
from rollout.engine.weight_staging import stage
from rollout.engine.weights import (
    UPDATE_MODES,
    DiskWeights,
    DistributedWeights,
    TensorWeights,
    WeightSource,
)
from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from rollout.engine.channel.channel import Channel
    from rollout.engine.driver.replica import Replica
    from rollout.engine.driver.request_runner import RequestRunner
    from rollout.engine.driver.wait_queue import Notifier
    from rollout.engine.routing import Router
    from rollout.engine.weights import UpdateMode

logger = logging.getLogger("rollout.engine")

#: Why a replica that started waits.
UNREACHED = "the current ones were sent once, or are in the memory of the driver's machine"
#: What the router takes a replica's version for while it gets other weights: none is ever required.
NO_WEIGHTS = -1


class WeightUpdater:
    """The current weights of a pool, and their changes, one after the other.

    All replicas that serve have the current weights, or none of them has: one about which that is
    not certain is restarted, and does not serve before it has them.

    Args:
        limit_s: How long a replica may load, and how long it may take to end requests before.
        changed: Called when replicas may get requests again.
        changes: Notified when a replica comes to serve, or failed to.

    Attributes:
        version: Of the last update that was completed; None before the first one.
    """

    def __init__(
        self,
        router: Router,
        requests: RequestRunner,
        replicas: Collection[Replica],
        *,
        limit_s: float,
        changed: Callable[[], None],
        changes: Notifier,
    ) -> None:
        self._changes = changes
        self._router = router
        self._requests = requests
        self._replicas = replicas
        self._limit_s = limit_s
        self._changed = changed
        self.version: int | None = None
        self._current: Weights | None = None
        self._kept: list[Weights] = []
        self._errors: dict[Replica, EngineError] = {}  # of those that did not load the current ones
        self._changed_again = anyio.Event()
        #: How weights reach the replicas that are sent to them.
        self._broadcast: WeightBroadcast | None = None

    async def bring_up(self, replica: Replica, channel: Channel) -> None:
        """Give a replica that does not serve yet the current weights.

        Raises:
            EngineError: It cannot load them.
            ChannelError: It was lost.
        """
        while self._current is not replica.weights:  # they may change meanwhile
            wanted = self._current
            if wanted is None:
                raise EngineError(f"{replica.name}: the weights that it has were taken back")
            try:
                if not wanted.can_reach(is_here=replica.is_here):
                    why = f"{replica.name} waits for the next weights: {UNREACHED}"
                    logger.warning(why)
                    replica.note_error(why)
                    await self._changed_again.wait()
                else:
                    await self._load(replica, channel, wanted)
            except EngineError as error:
                if wanted is self._current:
                    self._errors[replica] = error
                    raise
                if channel.lost.is_set():
                    raise

    def version_after(self, first: int) -> int:
        """The version of the last update, or `first`, where there was none."""
        return first if self.version is None else self.version

    async def update(self, version: int, source: WeightSource, mode: UpdateMode) -> None:
        """Have the replicas that serve load new weights, side by side.

        A replica gets new requests when it has them. Where none serves, the first one that comes
        to serve has them.

        Raises:
            EngineError: None of them could; all have the weights that they had, those that broke
                after their restart.
        """
        self._check_reach(source)
        weights = await _staged(version, source)
        self._requests.pause_deadlines(running=mode != "wait")
        try:
            await self._change(weights, mode)
            self.version = version
        finally:
            self._requests.resume_deadlines()

    def _check_reach(self, source: WeightSource) -> None:
        """Raise an `EngineError` where a replica that serves could not load them."""
        serving = [replica for replica in self._replicas if replica.is_serving]
        count = len(serving)
        if isinstance(source, DistributedWeights) and source.world_size != count + 1:
            raise EngineError(
                f"world_size = {source.world_size}; expected {count + 1}: the sender and "
                f"{count} replicas that serve"
            )
        for replica in serving:
            place = None
            if isinstance(source, DistributedWeights) and replica.machines > 1:
                place = f"spread over {replica.machines} machines"
            elif isinstance(source, TensorWeights) and not replica.is_here:
                place = "on another machine than the driver"
            if place is not None:
                raise EngineError(
                    f"{replica.name} is {place}, where {type(source).__name__} do not reach; "
                    "expected DiskWeights in a directory that every machine sees"
                )
        if isinstance(source, DistributedWeights) and source.backend == "nccl":
            check_gpus(serving)

    async def _change(self, weights: Weights, mode: UpdateMode) -> None:
        self._kept.append(weights)
        before, self._current, self._errors = self._current, weights, {}
        self._router.require_weights(weights.version)
        serving = {
            replica: replica.channel
            for replica in self._replicas
            if replica.channel is not None and replica.is_serving
        }
        if isinstance(weights.source, DistributedWeights):
            self._broadcast = WeightBroadcast(weights.source, list(serving))
        self._note_change()
        for replica in serving:
            self._router.set_weights(replica.name, NO_WEIGHTS)
        async with anyio.create_task_group() as tasks:
            for replica, channel in serving.items():
                tasks.start_soon(self._load_one, replica, channel, weights, mode)
        if not serving:
            await self._wait_for_first(weights)
        if not self._has_replica_with(weights) and (self._errors or self._has_replicas()):
            why = self._describe_failure(weights)
            self._restore(before)
            await self._discard_others()
            raise EngineError(why)
        for replica, error in self._errors.items():
            if replica.is_serving and replica.weights is not weights:  # it has not come back yet
                _fence(replica, f"other weights are needed: {error}")
        await self._discard_others()

    async def _wait_for_first(self, weights: Weights) -> None:
        """Return when a replica that comes back serves with them, or when none of them will."""
        with anyio.move_on_after(2 * self._limit_s):  # to start, and to load them
            while not self._has_replica_with(weights) and self._has_replicas(without=self._errors):
                await self._changes.wait()

    def _has_replica_with(self, weights: Weights) -> bool:
        return any(each.is_serving and each.weights is weights for each in self._replicas)

    def _has_replicas(self, without: Collection[Replica] = ()) -> bool:
        """Whether there are others than these, serving or not."""
        return any(not each.gone.is_set() and each not in without for each in self._replicas)

    def _describe_failure(self, weights: Weights) -> str:
        """Why no replica has these weights, by each replica."""
        if not self._errors:
            errors = last_errors(self._replicas)
            return f"no engine serves with the weights of version {weights.version}: {errors}"
        found = {each: str(self._errors.get(each) or each.last_error) for each in self._replicas}
        return "; ".join(each.name_in(error) for each, error in found.items() if error)

    async def aclose(self) -> None:
        """The engines are gone."""
        self._current = None
        await self._discard_others()

    async def _discard_others(self) -> None:
        """Only the current weights are still needed."""
        others = [weights for weights in self._kept if weights is not self._current]
        self._kept = [weights for weights in self._kept if weights is self._current]
        for weights in others:
            await weights.discard()

    def _note_change(self) -> None:
        self._changed_again.set()
        self._changed_again = anyio.Event()

    def _restore(self, before: Weights | None) -> None:
        """No replica could load the new weights: those with the old ones serve with them again."""
        self._current = before
        self._note_change()
        self._router.require_weights(before.version if before else None)
        for replica in self._replicas:
            channel = replica.channel
            if channel is not None and replica.is_serving and replica.weights is before:
                version = channel.info.weight_version
                self._router.set_weights(replica.name, version)
            else:
                _fence(replica, "its weights were taken back")
        self._changed()

    async def _load_one(
        self,
        replica: Replica,
        channel: Channel,
        weights: Weights,
        mode: UpdateMode,
    ) -> None:
        """A refusal is noted, as is the loss of the replica.

        One that is lost gets the current weights when it comes back.

        `channel` is that by which it served: it may be removed before this task begins.
        """
        try:
            if mode != "in_place":
                await self._empty(replica, waits_for_requests=mode == "wait")
            await self._load(replica, channel, weights)
        except EngineError as error:
            self._errors[replica] = error
            return
        for attempt in self._requests.running_on(replica):  # those that paused in their place
            attempt.resume()
        if replica.channel is channel and replica.is_serving:
            self._router.set_weights(replica.name, weights.version)
            self._changed()

    async def _empty(self, replica: Replica, *, waits_for_requests: bool) -> None:
        """No request is left there afterwards."""
        if waits_for_requests:
            await self._requests.finish(replica)
            return
        with anyio.move_on_after(self._limit_s) as scope:
            await self._requests.interrupt(replica)
        if scope.cancelled_caught:
            _fence(replica, f"requests have not ended {self._limit_s:g} s after their aborts")

    async def _load(self, replica: Replica, channel: Channel, weights: Weights) -> None:
        try:
            with anyio.fail_after(self._limit_s):
                if isinstance(weights.source, DiskWeights):
                    await channel.command(LoadWeights(weights.version, weights.source))
                else:
                    assert self._broadcast is not None  # a later one waits for other weights
                    await self._broadcast.load(replica, channel, weights.version)
        except TimeoutError:
            error = EngineError(
                f"{channel.name}: the weights of version {weights.version} are not loaded after "
                f"engine.start_timeout_s = {self._limit_s:g} s"
            )
            replica.restart(channel, str(error))  # it may get them yet: nobody knows what it has
            raise error from None
        channel.info = msgspec.structs.replace(channel.info, weight_version=weights.version)
        replica.take_weights(weights)


def check_update(version: Any, source: Any, mode: Any) -> int:
    """Let the arguments of an update pass; the version.

    Raises:
        EngineError: One is none.
    """
    if mode not in UPDATE_MODES:
        raise EngineError(f"mode = {mode!r:.80}; expected {', '.join(UPDATE_MODES)}")
    is_integer = isinstance(version, Integral) and not isinstance(version, bool)
    if not is_integer or not 0 <= version < 2**31:
        raise EngineError(f"version = {version!r:.80}; expected 0 to 2**31 - 1")
    if not isinstance(source, WeightSource):
        raise EngineError(
            f"source = {source!r:.80}; expected DiskWeights, TensorWeights or DistributedWeights"
        )
    if isinstance(source, msgspec.Struct):  # it goes to the engines
        try:
            msgspec.convert(msgspec.to_builtins(source), type(source))
        except (TypeError, msgspec.ValidationError) as error:
            raise EngineError(f"source = {source!r:.80}; {error}") from error
    return int(version)


async def _staged(version: int, source: WeightSource) -> Weights:
    """The weights where every engine of this node finds them.

    Raises:
        EngineError: There is no room for them.
    """
    if not isinstance(source, TensorWeights):
        return Weights(version, source)
    path = await anyio.to_thread.run_sync(stage, source)
    return Weights(version, DiskWeights(path), is_staged=True)


def _fence(replica: Replica, why: str) -> None:
    """Have a replica restarted, its requests not suspected of killing it."""
    if replica.channel is not None:
        replica.restart(replica.channel, why)
