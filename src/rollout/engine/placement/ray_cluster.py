"""This process in a Ray cluster: the one module that imports Ray, and only when it is needed."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from rollout.bridge import wait_future
from rollout.errors import EngineError
from rollout.lazy import importing
from rollout.limits import cleanup_scope

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

#: Our actors are named within it: ``<run>/engine-0``.
NAMESPACE = "rollout"
#: Bound of each step that ends an actor or a connection to the cluster.
CLOSE_S = 10.0
#: Calls of Ray that block a thread at once.
RAY_THREADS = 8


class RayCalls:
    """Calls of Ray from the event loop: those that may block go to a few threads."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(RAY_THREADS)

    async def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call it in a thread; a cancelled wait leaves the thread to finish it."""
        call = partial(function, *args, **options)
        return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)

    async def ask(self, method: Any, *args: Any) -> Any:
        """The answer of an actor's method, which no thread waits for."""
        answer = await self.run(method.remote, *args)
        return await wait_future(answer.future())


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
