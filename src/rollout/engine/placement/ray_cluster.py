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
    from collections.abc import AsyncIterator, Callable

#: Our actors are named within it: ``<run>/engine-0``.
NAMESPACE = "rollout"
#: Bound of each step that ends an actor or a connection to the cluster.
CLOSE_S = 10.0


@asynccontextmanager
async def member_of(ray: Any, address: str | None) -> AsyncIterator[None]:
    """This process in a cluster, unless it is in one already.

    In a thread that lives as long: what Ray starts here ends with the thread that started it
    (``PR_SET_PDEATHSIG``), and the loops' own worker threads end when they are idle.
    """
    if ray.is_initialized():
        yield
        return
    joined: Future[None] = Future()
    left: Future[None] = Future()
    leave = threading.Event()

    def live() -> None:
        try:
            _join(ray, address)
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
            place = "start a Ray cluster here" if address is None else f"join Ray at {address!r}"
            raise EngineError(f"placement.address: cannot {place}: {error}") from error
        yield
    finally:
        leave.set()
        with cleanup_scope(CLOSE_S):
            await wait_future(left)


def _join(ray: Any, address: str | None) -> None:
    theirs = logging.getLogger("ray")
    if theirs.level == logging.NOTSET:  # it warns of every thread that is not the main one
        theirs.setLevel(logging.ERROR)
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)


def import_ray() -> Any:
    try:
        with importing:
            import ray
            import ray.util.scheduling_strategies
    except ImportError as error:
        raise EngineError(
            f'placement.kind = "ray" needs Ray: pip install "rollout-rl[ray]" ({error})'
        ) from error
    return ray


def address_of(_: object) -> str:
    """Of the machine that this runs on: the actor's."""
    return str(import_ray().util.get_node_ip_address())


def gpu_ids_of(_: object) -> str:
    """What Ray gave to the actor that this runs in; empty where it was given none."""
    return ",".join(sorted(map(str, import_ray().get_gpu_ids()), key=lambda gpu: (len(gpu), gpu)))


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """A call of Ray's that may block; a cancelled wait leaves the thread to finish it."""
    return await anyio.to_thread.run_sync(partial(function, *args), abandon_on_cancel=True)


async def answer_of(method: Any, *args: Any) -> Any:
    return await wait_future(method.remote(*args).future())
