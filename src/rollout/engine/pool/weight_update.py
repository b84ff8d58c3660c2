"""Which weights the replicas of a pool are to have, and how they get them."""

from __future__ import annotations

import logging
from contextlib import suppress
from numbers import Integral
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.engine.channel.framing import Notifier
from rollout.engine.channel.messages import DropWeights, LoadWeights, ReceiveWeights
from rollout.engine.pool.replica import Replica, SentWeights, describe_errors
from rollout.engine.weights import (
    UPDATE_MODES,
    DiskWeights,
    DistributedWeights,
    TensorWeights,
    WeightSource,
    stage,
    unstage,
)
from rollout.errors import EngineError
from rollout.limits import cleanup_scope
from rollout.worker_threads import run_in_thread

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rollout.engine.channel.channel import Channel
    from rollout.engine.pool.request_runner import RequestRunner
    from rollout.engine.routing import Router
    from rollout.engine.weights import UpdateMode

logger = logging.getLogger("rollout.engine")

#: Why a replica that started waits.
UNREACHED = "the current ones were sent once, or are in the memory of the driver's machine"
#: What the router takes a replica's version for while it gets other weights: none is ever required.
NO_WEIGHTS = -1
#: To remove the files that engines have loaded.
DROP_S = 10.0


class WeightUpdater:
    """The current weights of a pool, and their changes, one after the other.

    All replicas that serve have the current weights, or none of them has: one about which that is
    not certain is restarted, and does not serve before it has them.

    Args:
        limit_s: How long a replica may take to start, and to cut its requests off and load.
        changes: Notified when a replica comes to serve, or failed to.

    Attributes:
        version: Of the last update that was completed; None before the first one.
        current: What replicas are to have; None: what they start with.
    """

    def __init__(
        self,
        router: Router,
        requests: RequestRunner,
        replicas: Collection[Replica],
        *,
        limit_s: float,
        changes: Notifier,
    ) -> None:
        self.version: int | None = None
        self._router = router
        self._requests = requests
        self._replicas = replicas
        self._limit_s = limit_s
        self._changes = changes
        self.current: SentWeights | None = None
        self._staged: list[SentWeights] = []  # whose files are still there
        self._errors: dict[Replica, EngineError] = {}  # of those that did not load the current ones
        self._updates = Notifier()

    async def bring_up(self, replica: Replica, channel: Channel) -> None:
        """Give a replica that does not serve yet the current weights."""
        has = replica.weights  # of an engine that lives on after its connection broke
        if has is not None and channel.info.weight_version != has.version:
            raise EngineError(
                f"{replica.name} has weights of version {channel.info.weight_version}; "
                f"expected {has.version}"
            )
        while self.current is not replica.weights:  # they may change meanwhile
            wanted = self.current
            if wanted is None:
                raise EngineError(f"{replica.name}: the weights that it has were taken back")
            is_reached = replica.is_here or not wanted.is_staged
            try:
                if isinstance(wanted.source, DistributedWeights) or not is_reached:
                    why = f"{replica.name} waits for the next weights: {UNREACHED}"
                    if replica.last_error != why:
                        logger.warning(why)
                    replica.note_error(why)
                    replica.waiting = channel
                    while wanted is self.current is not replica.weights:
                        await self._updates.wait()
                else:
                    await self._load(replica, channel, wanted, wanted.source)
            except EngineError as error:
                if wanted is self.current:
                    self._errors[replica] = error
                    raise
                if channel.lost.is_set():
                    raise
            finally:
                replica.waiting = None

    async def update(self, version: int, source: WeightSource, mode: UpdateMode) -> None:
        """Have the replicas that serve load new weights, side by side.

        A replica gets new requests when it has them. Where none serves, the first one that comes
        to serve has them.
        """
        self._check_reach(source, mode)
        if isinstance(source, TensorWeights):  # put where every engine of this machine finds them
            path = await run_in_thread(stage, source)
            weights = SentWeights(version, DiskWeights(path), is_staged=True)
        else:
            weights = SentWeights(version, source)
        self._requests.pause_deadlines(running=mode != "wait")
        try:
            await self._change(weights, mode)
            self.version = version
        finally:
            self._requests.resume_deadlines()

    def _check_reach(self, source: WeightSource, mode: UpdateMode) -> None:
        """Raise an `EngineError` where a replica that is to load them could not."""
        reached = self._find_reached(source)
        if isinstance(source, DistributedWeights):
            check_broadcast(source, reached)
        for replica, channel in reached.items():
            if fault := channel.info.weights_fault(source.kind, mode):
                raise EngineError(f"{replica.name}: {fault}")
            if mode == "wait" and replica.released and replica.in_flight:
                why = "sleeps with requests under way, which end after wake_up only"
                raise EngineError(f"mode = 'wait': {replica.name} {why}; expected another mode")
            if isinstance(source, TensorWeights) and not replica.is_here:
                raise EngineError(
                    f"{replica.name} is on another machine than the driver, where TensorWeights do "
                    "not reach; expected DiskWeights in a directory that every machine sees"
                )

    def _find_reached(self, source: WeightSource) -> dict[Replica, Channel]:
        """Those that serve and, as a broadcast is sent once, those that wait for weights."""
        is_sent_once = isinstance(source, DistributedWeights)
        found = {
            each: each.channel or (each.waiting if is_sent_once else None)
            for each in self._replicas
        }
        return {replica: channel for replica, channel in found.items() if channel is not None}

    async def _change(self, weights: SentWeights, mode: UpdateMode) -> None:
        self._staged.append(weights)
        before, self.current, self._errors = self.current, weights, {}
        self._router.require_weights(weights.version)
        reached = self._find_reached(weights.source)
        serving = [replica for replica in reached if replica.is_serving]
        broadcast = WeightBroadcast(list(reached))
        self._updates.notify()
        for replica in serving:
            self._router.set_weights(replica.name, NO_WEIGHTS)
        try:
            async with anyio.create_task_group() as tasks:
                for replica, channel in reached.items():
                    tasks.start_soon(self._update_one, replica, channel, weights, mode, broadcast)
        finally:
            await broadcast.discard()
        self._updates.notify()  # those that waited serve with what they have received
        awaited: Collection[Replica] = [] if serving else self._replicas
        if isinstance(weights.source, DistributedWeights):  # no other comes to serve with them
            awaited = [each for each in reached if each not in serving and each.weights is weights]
        await self._wait_for_first(weights, awaited)
        is_any_left = any(not each.gone.is_set() for each in self._replicas)
        if not self._is_served(weights) and (self._errors or is_any_left):
            why = self._describe_failure(weights)
            self._restore(before)
            await self._discard_others()
            raise EngineError(why)
        for replica, error in self._errors.items():
            if replica.weights is not weights:  # it has not come back yet
                session = replica.channel or replica.waiting
                replica.restart(session, f"other weights are needed: {error}")
        await self._discard_others()

    async def _update_one(
        self,
        replica: Replica,
        channel: Channel,
        weights: SentWeights,
        mode: UpdateMode,
        broadcast: WeightBroadcast,
    ) -> None:
        """Empty a replica and have it load; its refusal or loss is noted.

        One that is lost gets the current weights when it comes back.
        """
        try:
            if mode == "wait":
                await replica.wait_empty()
            source, interrupts = weights.source, mode == "abort_and_resume"
            if isinstance(source, DistributedWeights):
                source = await broadcast.receive(source, replica, channel)
            await self._load(replica, channel, weights, source, interrupts=interrupts)
            if replica.channel is channel:
                self._router.set_weights(replica.name, weights.version)
                self._requests.queue.call_next()
            for request in replica.requests:
                if not self._requests.is_admission_blocked:  # else they wait, asleep
                    request.resume()
                if interrupts:
                    self._router.renew(request.parts[-1], request.prompt_tokens)
        except EngineError as error:
            self._errors[replica] = error

    async def _load(
        self,
        replica: Replica,
        channel: Channel,
        weights: SentWeights,
        source: DiskWeights,
        *,
        interrupts: bool = False,
    ) -> None:
        load = LoadWeights(weights.version, source)
        await replica.command(channel, load, interrupts=interrupts)
        channel.info = msgspec.structs.replace(channel.info, weight_version=weights.version)
        replica.weights = weights

    async def _wait_for_first(self, weights: SentWeights, awaited: Collection[Replica]) -> None:
        """Return when a replica serves with them, or when none of those that are awaited will."""
        with anyio.move_on_after(2 * self._limit_s):  # to start, and to load them
            while not self._is_served(weights):
                if all(each.gone.is_set() or each in self._errors for each in awaited):
                    return
                await self._changes.wait()

    def _is_served(self, weights: SentWeights) -> bool:
        """Whether a replica serves with these weights."""
        return any(each.is_serving and each.weights is weights for each in self._replicas)

    def _describe_failure(self, weights: SentWeights) -> str:
        """Why no replica has these weights, by each replica."""
        if not self._errors:
            errors = describe_errors(self._replicas)
            return f"no engine serves with the weights of version {weights.version}: {errors}"
        found = {each: str(self._errors.get(each) or each.last_error) for each in self._replicas}
        return "; ".join(each.add_name(error) for each, error in found.items() if error)

    def _restore(self, before: SentWeights | None) -> None:
        """No replica could load the new weights: those with the old ones serve with them again."""
        self.current = before
        self._updates.notify()
        self._router.require_weights(before.version if before else None)
        for replica in self._replicas:
            channel = replica.channel
            if channel is not None and replica.weights is before:
                self._router.set_weights(replica.name, channel.info.weight_version)
            else:
                replica.restart(channel, "its weights were taken back")
        self._requests.queue.call_next()

    async def aclose(self) -> None:
        """Remove staged files; the engines are gone."""
        self.current = None
        await self._discard_others()

    async def _discard_others(self) -> None:
        """Remove the files of weights that are not the current ones."""
        others = [each for each in self._staged if each is not self.current]
        self._staged = [each for each in self._staged if each is self.current]
        for weights in others:
            if weights.is_staged and isinstance(weights.source, DiskWeights):
                with anyio.CancelScope(shield=True):  # gigabytes take a second, and no more
                    await run_in_thread(unstage, weights.source.path)


def check_update(version: Any, source: Any, mode: Any) -> int:
    """Check the arguments of an update; returns the version."""
    if not isinstance(mode, str) or mode not in UPDATE_MODES:
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
            msgspec.convert(msgspec.to_builtins(source, builtin_types=(bytes,)), type(source))
        except (TypeError, msgspec.ValidationError) as error:
            raise EngineError(f"source = {source!r:.80}; {error}") from error
    return int(version)


def check_broadcast(source: DistributedWeights, replicas: Mapping[Replica, Channel]) -> None:
    """Check that a broadcast reaches these replicas."""
    count = len(replicas)
    if not count:
        raise EngineError("DistributedWeights: no replica serves, or waits for weights, yet")
    if source.world_size != count + 1:
        raise EngineError(
            f"world_size = {source.world_size}; expected {count + 1}: the sender and "
            f"{count} replicas that serve or wait for weights"
        )
    seen: dict[tuple[str, str], str] = {}
    for replica, channel in replicas.items():
        if replica.machines > 1:
            raise EngineError(
                f"{replica.name} is spread over {replica.machines} machines, where "
                "DistributedWeights do not reach; expected DiskWeights in a directory that every "
                "machine sees"
            )
        if source.backend != "nccl":
            continue
        gpu = channel.info.gpu
        other = seen.setdefault((replica.machine, gpu), replica.name)
        if gpu and other != replica.name:
            raise EngineError(
                f"{other} and {replica.name} are both on GPU {gpu} of one machine, and NCCL wants "
                "one for each; expected backend = 'gloo'"
            )


class _Machine:
    """The replicas of one machine: the first one keeps what it receives, and all load that.

    Attributes:
        channels: To its replicas.
        path: Where the files are, once `settled` has fired; empty where `error` says why not.
    """

    def __init__(self, owner: Replica) -> None:
        self.owner = owner
        self.channels: list[Channel] = []
        self.path, self.error = "", "it was given up"
        self.settled = anyio.Event()

    async def discard(self) -> None:
        """Have any replica that lives remove the files.

        Where none does, the next weights that a process writes down there find that it is gone.
        """
        for channel in self.channels if self.path else ():
            with suppress(EngineError):
                await channel.command(DropWeights(self.path))
                return


class WeightBroadcast:
    """One broadcast to the replicas that serve, or wait for weights, when it begins."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._ranks = {replica: rank for rank, replica in enumerate(replicas, start=1)}
        self._machines: dict[str, _Machine] = {}
        for replica in replicas:
            self._machines.setdefault(replica.machine, _Machine(replica))

    async def receive(
        self, source: DistributedWeights, replica: Replica, channel: Channel
    ) -> DiskWeights:
        """Have a replica receive them; returns where it finds them then."""
        machine = self._machines[replica.machine]
        machine.channels.append(channel)
        is_owner = machine.owner is replica
        source = msgspec.structs.replace(source, rank=self._ranks[replica], is_kept=is_owner)
        try:
            path = await replica.command(channel, ReceiveWeights(source))
            if is_owner:
                machine.path = path
        except Exception as error:
            if is_owner:
                machine.error = str(error)
            raise
        finally:
            if is_owner:
                machine.settled.set()
        await machine.settled.wait()
        if not machine.path:
            raise EngineError(f"{machine.owner.name} did not pass the weights on: {machine.error}")
        return DiskWeights(machine.path)

    async def discard(self) -> None:
        """Remove what was received; all have loaded it, or will not."""
        with cleanup_scope(DROP_S):
            async with anyio.create_task_group() as tasks:
                for machine in self._machines.values():
                    tasks.start_soon(machine.discard)
