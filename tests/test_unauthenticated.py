"""Unauthenticated connections to an engine's port: few, short, and harmless."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from array import array
from collections.abc import Iterator
from typing import Any

import anyio
import psutil
import pytest
from trio.testing import MockClock

from fake_core import CountingCore
from rollout.engine.core import SamplingParams
from rollout.engine.channel.channel import connect_channel
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.engine.placement.local_process import LocalProcess
from rollout.engine.placement.memory import memory_stream_pair
from rollout.engine.placement.placement import CoreSpec
from rollout.engine.process import unauthenticated
from rollout.engine.process.listening import PAUSE_S, accept_forever
from rollout.engine.channel.server import EngineServer
from rollout.engine.process.unauthenticated import (
    AUTHENTICATION_S,
    YOUNG_S,
    UnauthenticatedConnections,
    max_unauthenticated,
)
from rollout.engine.routing import Router
from rollout.engine.channel.sockets import TlsFiles
from test_tls import files  # noqa: F401  (a fixture)
from wires import SECRET, Asker, Wire

pytestmark = [pytest.mark.anyio, pytest.mark.process]
DESCRIPTORS = 60


@pytest.fixture
def anyio_backend() -> object:
    """Virtual time, unless a test asks for something else."""
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


async def is_closed(stream: Any) -> bool:
    """Whether the server has closed it; what it had said is read."""
    with anyio.move_on_after(0.001):
        try:
            while True:
                await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return True
    return False


async def test_stranger_that_says_nothing_is_sent_away() -> None:
    wire = Wire(CountingCore())
    async with wire.channel():
        stranger = await wire.connect()
        await anyio.sleep(AUTHENTICATION_S - 0.1)
        assert (len(wire.server.unauthenticated), await is_closed(stranger)) == (1, False)
        await anyio.sleep(0.2)
        assert (len(wire.server.unauthenticated), await is_closed(stranger)) == (0, True)


async def test_client_that_has_proved_itself_is_no_stranger() -> None:
    wire = Wire(CountingCore(token_s=1.0))
    async with wire.channel() as channel:
        assert len(wire.server.unauthenticated) == 0
        generation, pending = Asker(channel).submit([1], 20)
        await pending.done.wait()
        assert list(generation.ids) == list(range(2, 22))


async def test_strangers_beyond_the_most_the_oldest_leaves_once_it_has_had_time() -> None:
    present = UnauthenticatedConnections(2)
    left: list[str] = []

    async def stay(name: str) -> None:
        with present.admitted():
            await anyio.sleep_forever()
        left.append(f"{name} at {anyio.current_time() - began:g}")

    async with anyio.create_task_group() as tasks:
        began = anyio.current_time()
        for name in ("a", "b"):
            await present.make_room()
            tasks.start_soon(stay, name)
            await anyio.sleep(0.01)
        await present.make_room()
        assert anyio.current_time() - began == pytest.approx(YOUNG_S)
        tasks.start_soon(stay, "c")
        await anyio.sleep(20)
    assert left == [f"a at {YOUNG_S:g}", "b at 5.01", "c at 5.05"]


async def test_strangers_room_is_made_by_one_that_leaves() -> None:
    present = UnauthenticatedConnections(1)

    async def stay() -> None:
        with present.admitted():
            await anyio.sleep(0.01)

    async with anyio.create_task_group() as tasks:
        began = anyio.current_time()
        tasks.start_soon(stay)
        while not present:
            await anyio.lowlevel.checkpoint()
        await present.make_room()
        assert anyio.current_time() - began == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("limit", "expected"), [(60, 7), (20, 4), (1024, 64), (resource.RLIM_INFINITY, 64)]
)
def test_most_strangers_leave_descriptors_for_the_work(
    limit: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unauthenticated.resource, "getrlimit", lambda _: (limit, limit))
    assert max_unauthenticated() == expected


class FullListener:
    """Has streams to accept, and errors in between."""

    def __init__(self, *come: Any) -> None:
        self._come = list(come)

    async def accept(self) -> Any:
        await anyio.sleep(0.001)
        if not self._come:
            await anyio.sleep_forever()
        comes = self._come.pop(0)
        if isinstance(comes, int):
            raise OSError(comes, "no more")
        return comes


@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
async def test_accept_without_descriptors_is_tried_again() -> None:
    server, began = EngineServer(CountingCore(), SECRET), anyio.current_time()
    _, theirs = memory_stream_pair()
    listener: Any = FullListener(errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, theirs)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(accept_forever, [listener], server)
        while not server.unauthenticated:
            await anyio.sleep(0.01)
        assert anyio.current_time() - began >= 3 * PAUSE_S
        tasks.cancel_scope.cancel()


async def test_accept_without_descriptors_the_oldest_stranger_gives_its_own() -> None:
    server = EngineServer(CountingCore(), SECRET)
    (first, one), (second, other), (third, another) = (memory_stream_pair() for _ in range(3))
    listener: Any = FullListener(one, other, errno.EMFILE, another)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(accept_forever, [listener], server)
        await anyio.sleep(2 * PAUSE_S)
        assert [await is_closed(each) for each in (first, second, third)] == [True, False, False]
        assert len(server.unauthenticated) == 2
        tasks.cancel_scope.cancel()


async def test_accept_on_a_listener_that_is_broken_is_an_error() -> None:
    listener: Any = FullListener(errno.EBADF)
    with pytest.raises(BaseExceptionGroup) as caught:
        await accept_forever([listener], EngineServer(CountingCore(), SECRET))
    assert isinstance(caught.value.exceptions[0], OSError)


# --- a real engine that may open few descriptors


class TightCore(CountingCore):
    """An engine in a process that may have `DESCRIPTORS` of them open."""

    async def start(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


def attack(port: int, count: int, words: bytes) -> list[socket.socket]:
    """Connections that say so much and then nothing."""
    found = []
    for _ in range(count):
        each = socket.socket()
        each.setblocking(False)
        each.connect_ex(("127.0.0.1", port))
        found.append(each)
    for each in found:
        with contextlib.suppress(OSError):
            each.send(words)
    return found


@contextlib.contextmanager
def attacked(count: int, words: bytes) -> Iterator[list[socket.socket]]:
    """Connections to the one port that an engine of this process listens at."""
    (engine,) = (
        child
        for child in psutil.Process().children()
        if "rollout.engine.channel.child" in child.as_dict(["cmdline"], ad_value=[])["cmdline"]
    )
    (port,) = {c.laddr.port for c in engine.net_connections() if c.status == psutil.CONN_LISTEN}
    sockets = attack(port, count, words)
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()


def pool_of(tls: TlsFiles | None = None) -> EnginePool:
    return EnginePool(
        placement=LocalProcess(),
        specs=[CoreSpec("test_unauthenticated:TightCore", {"token_s": 0.01}, tls=tls)],
        router=Router(),
        start_timeout_s=60,
    )


async def ask(pool: EnginePool, last: int, count: int) -> list[int]:
    generation = Generation()
    await pool.generate(
        generation,
        session_id=str(last),
        prompt_ids=array("i", [last]).tobytes(),
        sampling=SamplingParams(max_new_tokens=count),
    )
    return list(generation.ids)


WORDS = {"nothing": b"", "half a frame": b"\x10\0\0\0ab", "nonsense": os.urandom(3000)}


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_attack_by_idle_connections_costs_no_engine_and_no_token(
    words: str,
    is_encrypted: bool,
    files: TlsFiles,  # noqa: F811
) -> None:
    async with pool_of(files if is_encrypted else None).serving() as pool:
        with attacked(150, WORDS[words]), anyio.fail_after(60):
            assert await ask(pool, 1, 200) == list(range(2, 202))
            replica = pool._replicas["engine-0"]
            assert replica.channel is not None
            for role in ("control", "data"):  # connections that break are replaced meanwhile
                await replica.channel._frames[role].aclose()  # type: ignore[index]
            assert await ask(pool, 5, 200) == list(range(6, 206))
            async with another_channel(pool) as channel:
                generation, pending = Asker(channel).submit([7], 10)
                await pending.done.wait()
                assert list(generation.ids) == list(range(8, 18))
        (statistics,) = pool.statistics()
        assert (statistics.starts, statistics.state) == (1, "serving")


@contextlib.asynccontextmanager
async def another_channel(pool: EnginePool) -> Any:
    """A further driver of the same engine."""
    channel = pool._replicas["engine-0"].channel
    assert channel is not None
    greeter = channel._greeter
    async with (
        connect_channel("again", greeter._connect, greeter._secret) as another,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(another.run)
        yield another
        tasks.cancel_scope.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_attack_connections_are_closed_soon() -> None:
    async with pool_of().serving() as pool:
        with attacked(100, b"") as sockets:
            await anyio.sleep(AUTHENTICATION_S + 5)
            assert await ask(pool, 1, 10) == list(range(2, 12))
            for each in sockets:
                each.setblocking(False)
                with contextlib.suppress(OSError):
                    while each.recv(4096):
                        pass
                assert is_over(each)


def is_over(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
