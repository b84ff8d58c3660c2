"""Engines on the machines of a Ray cluster: the one module that imports Ray, when it is needed.

Ray places, names, watches and kills; tokens go over a socket of ours. Each replica has a placement
group of its own, kept over restarts, so that no other job takes its GPUs while it is restarted.
Ray restarts nothing (an actor that it restarts would be another engine under the old name): the
pool does.
"""

from __future__ import annotations

import logging
import secrets
import threading
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from rollout.bridge import wait_future
from rollout.engine.channel.sockets import connect_engine
from rollout.engine.placement.engine_process import EngineProcess, encode_spec
from rollout.engine.placement.placement import CoreSpec, ReplicaHandle
from rollout.errors import EngineError
from rollout.lazy import importing
from rollout.limits import cleanup_scope
from rollout.scopes import open_task_group, unwrap_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

logger = logging.getLogger("rollout.engine")

#: Where an engine on the driver's machine listens.
LOOPBACK = "127.0.0.1"
#: Seconds between two lines that say what a replica waits for.
PROGRESS_S = 10.0
#: A method that waits for the engine's end, one that starts or stops it, and one to spare.
CONCURRENT_METHODS = 3
#: Our actors are named within it: ``<run>/engine-0``.
NAMESPACE = "rollout"
#: Bound of each step that ends an actor or a connection to the cluster.
CLOSE_S = 10.0
#: To ask Ray for a placement group, not for its resources.
RESERVE_S = 30.0
#: Calls of Ray that block a thread at once.
RAY_THREADS = 8


class RayActors:
    """The placement `ray`; made by `open_ray_actors`.

    Attributes:
        groups: The placement groups that it holds, by replica.

    Args:
        python: Interpreter of the engines; None takes that of Ray's workers.
        resources: What each replica asks of its machine: ``{"GPU": 1.0, "CPU": 1.0}``.
        nodes: Addresses of machines; slot i is on the i-th, counted round. Empty: anywhere.
        colocate: ``node:0,1`` for each machine of each replica; nothing is then asked of Ray.
        machines: That each replica spreads over. Each has an actor with its share of `resources`;
            the first one's engine is connected to, and the cores learn their rank by the options
            ``nodes``, ``node_rank`` and ``rendezvous`` (an address on the first machine).
    """

    def __init__(
        self,
        *,
        python: str | None,
        resources: Mapping[str, float],
        nodes: Sequence[str] = (),
        colocate: Sequence[str] = (),
        machines: int = 1,
    ) -> None:
        self._ray = import_ray()
        self._threads = anyio.CapacityLimiter(RAY_THREADS)
        self._python = python
        self._machines = machines
        self._resources = {name: amount / machines for name, amount in resources.items() if amount}
        self._nodes = tuple(nodes)
        self._gpu_slots = [split_slot(text) for text in colocate]
        self._run = secrets.token_hex(4)
        self.groups: dict[str, Any] = {}
        self._own_address = self._ray.util.get_node_ip_address()

    @asynccontextmanager
    async def open_replica(
        self, name: str, spec: CoreSpec, start_timeout_s: float
    ) -> AsyncIterator[ReplicaHandle]:
        """See `Placement.open_replica`."""
        secret, died = secrets.token_bytes(32), anyio.Event()
        async with open_task_group() as tasks:
            actors: list[Any] = []
            try:
                try:
                    with anyio.fail_after(start_timeout_s):
                        node = await self._reserve(name, spec.slot)
                        while len(actors) < self._machines:
                            actors.append(await self._start_actor(name, spec.slot, len(actors)))
                        host, port = await self._start_engine(name, actors, spec, secret)
                except TimeoutError:
                    raise EngineError(await self._describe_delay(name, start_timeout_s)) from None
                except self._ray.exceptions.RayActorError as error:
                    raise EngineError(
                        f"{name}: its Ray actor died while starting: {error}"
                    ) from error
                except self._ray.exceptions.RayError as error:
                    if isinstance(error, self._ray.exceptions.TaskPlacementGroupRemoved):
                        self.groups.pop(name, None)  # by somebody else: the next start makes one
                    raise EngineError(f"{name}: {error}") from error
                logger.info("%s serves on %s:%d (Ray node %s)", name, host, port, node)
                for actor in actors:
                    tasks.start_soon(self._watch, actor, died)
                connect = partial(connect_engine, host, port, spec.tls)
                is_here = host == LOOPBACK and self._machines == 1
                yield ReplicaHandle(connect, secret, died, self._machines, is_here, node)
            finally:
                async with anyio.create_task_group() as stops:
                    for actor in actors:
                        stops.start_soon(self._stop_actor, actor)

    async def release(self, name: str) -> None:
        """See `Placement.release`."""
        group = self.groups.pop(name, None)
        if group is None:
            return
        try:
            await self._call(self._ray.util.remove_placement_group, group)
        except self._ray.exceptions.RayError as error:  # the cluster has ended, or soon will
            logger.warning("%s: Ray did not take its placement group back: %s", name, error)

    async def _call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call what may block in one of a few threads; a cancelled wait leaves it to finish."""
        call = partial(function, *args, **options)
        return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._threads)

    async def _ask(self, method: Any, *args: Any) -> Any:
        """The answer of an actor's method, which no thread waits for."""
        answer = await self._call(method.remote, *args)
        return await wait_future(answer.future())

    async def _reserve(self, name: str, slot: int) -> str:
        """Wait for the replica's resources; returns the node that has them."""
        if self._gpu_slots:
            return await self._find_node(self._find_gpu_slot(name, slot, 0)[0], "NodeID")
        if name not in self.groups:
            bundles = [await self._build_bundle(slot, rank) for rank in range(self._machines)]
            with anyio.fail_after(RESERVE_S, shield=True):  # or nobody gives back what Ray has made
                self.groups[name] = await self._call(
                    self._ray.util.placement_group,
                    bundles,
                    strategy="PACK" if self._machines == 1 else "STRICT_SPREAD",
                    name=f"{self._run}/{name}",
                )
        group = self.groups[name]
        async with open_task_group() as tasks:
            tasks.start_soon(self._log_waiting, name)
            ready = await self._call(group.ready)
            await wait_future(ready.future())
        table = await self._call(self._ray.util.placement_group_table, group)
        return str(table["bundles_to_node_id"][0])

    async def _build_bundle(self, slot: int, rank: int) -> dict[str, float]:
        bundle = dict(self._resources)
        if self._nodes:  # Ray gives each machine one unit of a resource with its address
            node = self._nodes[(slot * self._machines + rank) % len(self._nodes)]
            bundle[f"node:{await self._find_node(node, 'NodeManagerAddress')}"] = 0.001
        return bundle or {"CPU": 0.001}  # an empty one is refused

    def _find_gpu_slot(self, name: str, slot: int, rank: int) -> tuple[str, str]:
        """The node and the GPUs that a part of a replica shares."""
        number = slot * self._machines + rank
        if number >= len(self._gpu_slots):
            raise EngineError(
                f"{name}: placement.colocate names {len(self._gpu_slots)} places; none is left"
            )
        return self._gpu_slots[number]

    async def _find_node(self, name: str, key: str) -> str:
        """A node by its id or its address: its `key`."""
        alive = [node for node in await self._call(self._ray.nodes) if node["Alive"]]
        for node in alive:
            if name in (node["NodeID"], node["NodeManagerAddress"]):
                return str(node[key])
        known = ", ".join(f"{node['NodeManagerAddress']} ({node['NodeID']})" for node in alive)
        raise EngineError(f"placement: the cluster has no live node {name!r}; it has {known}")

    async def _start_actor(self, name: str, slot: int, rank: int) -> Any:
        """An actor on the replica's resources."""
        strategies = self._ray.util.scheduling_strategies
        if self._gpu_slots:
            node = await self._find_node(self._find_gpu_slot(name, slot, rank)[0], "NodeID")
            strategy = strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            amounts = {"num_cpus": 0.0, "num_gpus": 0.0}
        else:
            strategy = strategies.PlacementGroupSchedulingStrategy(
                self.groups[name],
                placement_group_bundle_index=rank,
                placement_group_capture_child_tasks=False,
            )
            kinds = ("CPU", "GPU")
            amounts = {f"num_{kind.lower()}s": self._resources.get(kind, 0) for kind in kinds}
        host = self._ray.remote(EngineProcess).options(
            **amounts,
            scheduling_strategy=strategy,
            name=f"{self._run}/{name}/{secrets.token_hex(2)}",
            namespace=NAMESPACE,
            max_restarts=0,
            max_concurrency=CONCURRENT_METHODS,
        )
        return await self._call(host.remote)

    async def _start_engine(
        self, name: str, actors: Sequence[Any], spec: CoreSpec, secret: bytes
    ) -> tuple[str, int]:
        """Start the engine in its actor, or its parts in theirs; returns where it listens."""
        if len(actors) == 1:
            return await self._start_rank(name, 0, actors[0], spec, secret)
        host = await self._ask(actors[0].__ray_call__, find_address)
        rendezvous = f"{host}:{await self._ask(actors[0].free_port)}"
        addresses: dict[int, tuple[str, int]] = {}

        async def start(rank: int) -> None:
            ranks = {"nodes": len(actors), "node_rank": rank, "rendezvous": rendezvous}
            part = attrs.evolve(spec, options={**spec.options, **ranks})
            addresses[rank] = await self._start_rank(name, rank, actors[rank], part, secret)

        try:
            async with anyio.create_task_group() as tasks:
                for rank in range(len(actors)):
                    tasks.start_soon(start, rank)
        except BaseExceptionGroup as group:
            raise unwrap_group(group) from None
        return addresses[0]

    async def _start_rank(
        self, name: str, rank: int, actor: Any, spec: CoreSpec, secret: bytes
    ) -> tuple[str, int]:
        address = await self._ask(actor.__ray_call__, find_address)
        is_here = address == self._own_address
        host = LOOPBACK if is_here else address
        # A module that only the driver's search path has is found on the driver's machine.
        with_path = is_here and not self._python
        line = encode_spec(spec, secret, with_sys_path=with_path, host=host, is_follower=rank > 0)
        if self._gpu_slots:
            devices = self._find_gpu_slot(name, spec.slot, rank)[1]
        else:
            devices = await self._ask(actor.__ray_call__, find_gpu_ids)
        # Ray does so only where it has not been told not to, as trainers do.
        environment = {"CUDA_VISIBLE_DEVICES": devices}
        ready = await self._ask(actor.start, line, self._python, environment)
        if ready.error:
            raise EngineError(f"{name}: {ready.error}")
        return host, ready.port

    async def _watch(self, actor: Any, died: anyio.Event) -> None:
        """Fire `died` when the engine's process, its actor or its machine has ended."""
        with suppress(self._ray.exceptions.RayError):
            await self._ask(actor.wait)
        died.set()

    async def _stop_actor(self, actor: Any) -> None:
        """End the engine, then its actor; the actor's death ends an engine that would not."""
        with cleanup_scope(CLOSE_S), suppress(self._ray.exceptions.RayError):
            await self._ask(actor.stop)
        with cleanup_scope(CLOSE_S):
            await self._call(self._ray.kill, actor, no_restart=True)

    async def _log_waiting(self, name: str) -> None:
        while True:
            await anyio.sleep(PROGRESS_S)
            logger.warning("%s waits for Ray: %s", name, await self._describe_shortage())

    async def _describe_delay(self, name: str, start_timeout_s: float) -> str:
        limit = f"engine.start_timeout_s = {start_timeout_s:g} s"
        group = self.groups.get(name)
        if group is None or await self._call(group.wait, 0):
            return f"{name}: not ready after {limit}"
        shortage = await self._describe_shortage()
        return f"{name}: Ray did not place it within {limit}: {shortage}"

    async def _describe_shortage(self) -> str:
        """What is wanted, what is free, and what the largest machine has."""
        free = await self._call(self._ray.available_resources)
        nodes = await self._call(self._ray.nodes)
        alive = [node["Resources"] for node in nodes if node["Alive"]]
        kinds = sorted({"CPU", "GPU", *self._resources}, reverse=True)
        wanted = _list_amounts(self._resources, [kind for kind in kinds if kind in self._resources])
        if self._machines > 1:
            wanted = f"{wanted} on each of {self._machines} machines"
        alive.sort(key=lambda has: [has.get(kind, 0) for kind in kinds], reverse=True)
        machines = "; ".join(f"one with {_list_amounts(each, kinds)}" for each in alive)
        where = f" on one of {', '.join(self._nodes)}" if self._nodes else ""
        return (
            f"asked for {wanted}{where}; free in the cluster: {_list_amounts(free, kinds)}; "
            f"its machines: {machines}"
        )


@asynccontextmanager
async def join_cluster(ray: Any, address: str | None) -> AsyncIterator[None]:
    """Have this process in a cluster while the block lasts, unless it is in one already."""
    if ray.is_initialized():
        yield
        return
    joined: Future[None] = Future()
    left: Future[None] = Future()
    leave = threading.Event()

    def live() -> None:
        # In a thread that lives as long: what Ray starts ends with the thread that started it
        # (PR_SET_PDEATHSIG), and the loops' own worker threads end when they are idle.
        try:
            theirs = logging.getLogger("ray")
            if theirs.level == logging.NOTSET:  # it warns of every thread that is not the main one
                theirs.setLevel(logging.ERROR)
            ray.init(
                address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False
            )
        except BaseException as error:
            joined.set_exception(error)
        else:
            joined.set_result(None)
            leave.wait()
            ray.shutdown()
        left.set_result(None)

    threading.Thread(target=live, name="rollout-ray", daemon=True).start()
    try:
        try:
            await wait_future(joined)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            what = "start a Ray cluster here" if address is None else f"join Ray at {address!r}"
            raise EngineError(f"placement.address: cannot {what}: {error}") from error
        yield
    finally:
        leave.set()
        with cleanup_scope(CLOSE_S):
            await wait_future(left)


@asynccontextmanager
async def open_ray_actors(
    *, address: str | None, python: str | None, resources: Mapping[str, float], **options: Any
) -> AsyncIterator[RayActors]:
    """Join a Ray cluster, or start one here; it is left as it was found.

    Args:
        address: The cluster to join. None: the one that this process has joined already, the one
            that ``RAY_ADDRESS`` names or that runs on this machine, else a new one that ends with
            the block.
        python, resources, options: As for `RayActors`.
    """
    ray = await anyio.to_thread.run_sync(import_ray)  # which takes a second
    async with join_cluster(ray, address):
        actors = RayActors(python=python, resources=resources, **options)
        try:
            yield actors
        finally:
            with cleanup_scope(CLOSE_S):
                for name in [*actors.groups]:
                    await actors.release(name)


def _list_amounts(resources: Mapping[str, float], kinds: Sequence[str]) -> str:
    return ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in kinds) or "nothing"


def import_ray() -> Any:
    """The package Ray."""
    try:
        with importing:
            import ray
            import ray.util.scheduling_strategies
    except ImportError as error:
        raise EngineError(
            f'placement.kind = "ray" needs Ray: pip install "rollout-rl[ray]" ({error})'
        ) from error
    return ray


def find_address(_: object) -> str:
    """The address of the machine that this runs on: called in an actor."""
    return str(import_ray().util.get_node_ip_address())


def find_gpu_ids(_: object) -> str:
    """The GPUs that Ray gave to the actor that this runs in; empty where it gave none."""
    return ",".join(sorted(map(str, import_ray().get_gpu_ids()), key=lambda gpu: (len(gpu), gpu)))


def split_slot(text: str) -> tuple[str, str]:
    """The node, by its Ray id or its address, and the GPUs of an entry of `placement.colocate`."""
    node, _, gpu_ids = text.rpartition(":")
    return node, gpu_ids


def gpu_slots_of(workers: Sequence[Any], gpus_per_replica: int = 1) -> tuple[str, ...]:
    """The GPUs of a trainer's workers, for `RayPlacement(colocate=...)`, in their order.

    Args:
        workers: Handles of Ray actors with one GPU each. Blocks until each has answered.
        gpus_per_replica: So many workers next to each other make the GPUs of one replica, or of
            its part on one machine: `engine.tensor_parallel`, as a rule.

    Raises:
        EngineError: The workers do not divide into replicas, or a replica's are on several
            machines.
    """
    if len(workers) % gpus_per_replica:
        raise EngineError(
            f"{len(workers)} workers; expected a multiple of gpus_per_replica = {gpus_per_replica}"
        )
    ray = import_ray()

    def locate(worker: object) -> str:
        return f"{ray.get_runtime_context().get_node_id()}:{find_gpu_ids(worker)}"

    slots = ray.get([worker.__ray_call__.remote(locate) for worker in workers])
    found = []
    for start in range(0, len(slots), gpus_per_replica):
        nodes, gpu_ids = zip(*map(split_slot, slots[start : start + gpus_per_replica]), strict=True)
        if len(set(nodes)) > 1:
            last = start + gpus_per_replica - 1
            raise EngineError(f"workers {start} to {last} are on several machines; expected one")
        found.append(f"{nodes[0]}:{','.join(gpu_ids)}")
    return tuple(found)
