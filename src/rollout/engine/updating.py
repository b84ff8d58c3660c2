"""Which weights the replicas of a pool are to have, and how they get them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from rollout.errors import ChannelError, EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from rollout.engine.channel import Channel
    from rollout.engine.keeping import Replica
    from rollout.engine.routing import Router
    from rollout.engine.weights import WeightSource


class Update:
    """One change of weights: `done` fires when it is over, `error` then says why it was not made.

    Args:
        version: What the tokens sampled with the weights are stamped with.
    """

    def __init__(self, version: int, source: WeightSource) -> None:
        self.version = version
        self.source = source
        self.done = anyio.Event()
        self.error: EngineError | None = None


class Updating:
    """The current weights of a pool, and their changes, one after the other.

    Args:
        limit_s: How long a replica may load.
        changed: Called when replicas may get requests again.
    """

    def __init__(self, router: Router, *, limit_s: float, changed: Callable[[], None]) -> None:
        self._router = router
        self._limit_s = limit_s
        self._changed = changed
        self._current: Update | None = None
        self._one_at_a_time = anyio.Lock()

    async def bring_up(self, channel: Channel) -> None:
        """Give a replica that does not serve yet the current weights.

        Raises:
            EngineError: It cannot load them.
            ChannelError: It was lost.
        """
        loaded = None
        while self._current is not loaded:  # they may change meanwhile
            loaded = self._current
            assert loaded is not None
            await self._load(channel, loaded)

    async def run(self, update: Update, replicas: Collection[Replica]) -> None:
        """Have the replicas that serve load new weights, side by side, and note what came of it.

        A replica gets new requests when it has them. One that cannot load them is started again,
        unless none can: then all keep what they have.
        """
        try:
            async with self._one_at_a_time:
                update.error = await self._run(update, replicas)
        except BaseException:
            update.error = EngineError("the engines were closed while they loaded weights")
            raise
        finally:
            update.done.set()

    async def _run(self, update: Update, replicas: Collection[Replica]) -> EngineError | None:
        before, self._current = self._current, update
        self._router.require_weights(update.version)
        serving = [replica for replica in replicas if replica.channel is not None]
        errors: dict[Replica, EngineError] = {}
        async with anyio.create_task_group() as tasks:
            for replica in serving:
                tasks.start_soon(self._load_one, replica, update, errors)
        if errors and len(errors) == len(serving):
            self._current = before
            self._router.require_weights(before.version if before else None)
            self._changed()
            return next(iter(errors.values()))
        for replica, error in errors.items():
            replica.is_excused = True
            if replica.channel is not None:
                replica.channel.close(f"other weights are needed: {error}")
        return None

    async def _load_one(
        self, replica: Replica, update: Update, errors: dict[Replica, EngineError]
    ) -> None:
        channel = replica.channel
        if channel is None:
            return  # lost meanwhile; it gets them when it comes back
        try:
            await self._load(channel, update)
        except ChannelError:
            return
        except EngineError as error:
            errors[replica] = error
            return
        if replica.channel is channel and not channel.lost.is_set():
            self._router.set_weights(replica.name, update.version)
            self._changed()

    async def _load(self, channel: Channel, update: Update) -> None:
        try:
            with anyio.fail_after(self._limit_s):
                await channel.update_weights(update.version, update.source)
        except TimeoutError:
            raise EngineError(
                f"{channel.name}: the weights of version {update.version} are not loaded after "
                f"engine.start_timeout_s = {self._limit_s:g} s"
            ) from None
