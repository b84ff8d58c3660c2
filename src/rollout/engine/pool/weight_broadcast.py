"""Weights on their way to the replicas of a pool: sent to all, kept once on each machine."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import msgspec

from rollout.engine.channel.messages import DropWeights, LoadWeights, ReceiveWeights
from rollout.engine.weights import DiskWeights, DistributedWeights
from rollout.errors import EngineError
from rollout.limits import cleanup_scope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.engine.channel.channel import Channel
    from rollout.engine.pool.replica import Replica

#: To remove the files that engines have loaded.
DROP_S = 10.0


def check_broadcast(source: DistributedWeights, replicas: Sequence[Replica]) -> None:
    """Check that a broadcast reaches these replicas."""
    count = len(replicas)
    if source.world_size != count + 1:
        raise EngineError(
            f"world_size = {source.world_size}; expected {count + 1}: the sender and "
            f"{count} replicas that serve"
        )
    seen: dict[tuple[str, str], str] = {}
    for replica in replicas:
        if replica.machines > 1:
            raise EngineError(
                f"{replica.name} is spread over {replica.machines} machines, where "
                "DistributedWeights do not reach; expected DiskWeights in a directory that every "
                "machine sees"
            )
        if source.backend != "nccl":
            continue
        gpu = replica.channel.info.gpu if replica.channel is not None else ""
        other = seen.setdefault((replica.machine, gpu), replica.name)
        if gpu and other != replica.name:
            raise EngineError(
                f"{other} and {replica.name} are both on GPU {gpu} of one machine, and NCCL wants "
                "one for each; expected backend = 'gloo'"
            )


class _Machine:
    """The replicas of one machine: the first one keeps what it receives, and all load that.

    Attributes:
        loading: Replicas that have not loaded yet.
        channels: To those that have, or will not.
    """

    def __init__(self, owner: Replica) -> None:
        self.owner = owner
        self.loading = 0
        self.channels: list[Channel] = []
        self._path = ""
        self._error: Exception | None = None
        self._settled = anyio.Event()

    def settle(self, path: str, error: Exception | None = None) -> None:
        """The owner has them, or never will."""
        self._path, self._error = path, error
        self._settled.set()

    async def path(self) -> str:
        """Where they are."""
        await self._settled.wait()
        if self._error is not None:
            raise EngineError(f"{self.owner.name} did not pass the weights on: {self._error}")
        return self._path

    async def leave(self, channel: Channel) -> None:
        """One replica has loaded them, or will not; after the last one any that lives removes them.

        Where none does, the next weights that a process writes down there find that it is gone.
        """
        self.channels.append(channel)
        self.loading -= 1
        if self.loading or not self._path:
            return
        with cleanup_scope(DROP_S):
            for each in self.channels:
                with suppress(EngineError):
                    await each.command(DropWeights(self._path))
                    return


class WeightBroadcast:
    """One broadcast to the replicas that serve when it begins."""

    def __init__(self, source: DistributedWeights, replicas: Sequence[Replica]) -> None:
        self._source = source
        self._ranks = {replica: rank for rank, replica in enumerate(replicas, start=1)}
        self._machines: dict[str, _Machine] = {}
        for replica in replicas:
            machine = self._machines.setdefault(replica.machine, _Machine(replica))
            machine.loading += 1

    async def load(
        self, replica: Replica, channel: Channel, version: int, *, interrupts: bool = False
    ) -> None:
        """Have a replica receive and load them; `interrupts`: see `Command`."""
        machine = self._machines[replica.machine]
        is_owner = machine.owner is replica
        source = msgspec.structs.replace(self._source, rank=self._ranks[replica], is_kept=is_owner)
        try:
            path, error = "", None
            try:
                path = await replica.command(channel, ReceiveWeights(source))
            except BaseException as failure:
                error = (
                    failure if isinstance(failure, Exception) else EngineError("it was given up")
                )
                raise
            finally:
                if is_owner:
                    machine.settle(path, error)
            received = DiskWeights(await machine.path())
            await replica.command(channel, LoadWeights(version, received), interrupts=interrupts)
        finally:
            await machine.leave(channel)
