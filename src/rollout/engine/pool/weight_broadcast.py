"""Weights on their way to the replicas of a pool: sent to all, kept once on each machine."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import msgspec

from rollout.engine.channel.messages import DropWeights, ReceiveWeights
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
    """One broadcast to the replicas that serve when it begins."""

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
