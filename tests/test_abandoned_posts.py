"""`POST /trajectories` whose client goes away leaves no trajectory behind."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import pytest

import rollout
from rollout import GatewayConfig, RolloutRuntime
from rollout.config import SchedulingConfig, SimulatedEngine
from rollout.gateway.asgi import ExchangeLimits
from rollout.gateway.gateway import Gateway
from rollout.gateway.runtime_loop import open_runtime_loop
from rollout.gateway.served_trajectories import Desk
from rollout.gateway.sessions import GatewaySettings, Sessions
from rollout.gateway.trajectory_routes import TrajectoryRoutes
from rollout.observe.events import TrajectoryEnded
from rollout.testing import Scenario

TOKEN = "secret"
BODY = json.dumps({"prompt": {"messages": [{"role": "user", "content": "-"}]}}).encode()
CHAT = Scenario(seed=3).reply("One", "First.")
LIMITS = ExchangeLimits(max_body_bytes=2**20, body_s=10, write_s=10)


class FakeConnection:
    """The connection of a request: when its client leaves is the test's to say."""

    has_whole_request = True

    def __init__(self, *, leaves_before_the_reply: bool = False) -> None:
        self.loop = SimpleNamespace(time=anyio.current_time)
        self.has_left = False
        self._leaves_before_the_reply = leaves_before_the_reply
        self._on_leave: Callable[[], object] = lambda: None
        self.tell_unread: Callable[[], object] = lambda: None

    def on_leave(self, callback: Callable[[], object]) -> None:
        self._on_leave = callback

    def leave(self) -> None:
        self.has_left = True
        self._on_leave()

    async def flush(self, _seconds: float) -> bool:
        if self._leaves_before_the_reply:
            self.leave()
        return not self.has_left

    def leave_unanswered(self) -> None:
        """Nobody misses the rest."""

    def if_unread(self, callback: Callable[[], object]) -> None:
        self.tell_unread = callback


class Trainer:
    """A client of the routes, without sockets."""

    def __init__(self, runtime: RolloutRuntime, routes: TrajectoryRoutes) -> None:
        self.runtime = runtime
        self._routes = dict(routes.table())

    async def post(
        self, path: str, body: bytes, connection: FakeConnection | None = None, **parameters: str
    ) -> dict[str, Any]:
        """What is sent back; {} where the client left before."""
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "method": "POST",
            "headers": [(b"authorization", f"Bearer {TOKEN}".encode())],
            "path_params": parameters,
            "rollout.connection": connection or FakeConnection(),
        }
        await self._routes[path](scope, receive, send)
        text = b"".join(message.get("body", b"") for message in sent)
        told: dict[str, Any] = json.loads(text) if text else {}
        return told

    async def open(self, connection: FakeConnection | None = None) -> dict[str, Any]:
        return await self.post("/trajectories", BODY, connection)

    async def finish(self, opened: dict[str, Any]) -> dict[str, Any]:
        return await self.post("/trajectories/{id}/finish", b"{}", id=opened["id"])

    def is_idle(self, *, cancelled: int) -> None:
        """Nothing runs, and every admitted trajectory has its outcome."""
        now = self.runtime.statistics()
        assert (now.running, now.admitted) == (0, now.finished)
        assert now.outcomes["cancelled"] == cancelled


@asynccontextmanager
async def trainer(scheduling: SchedulingConfig | None = None) -> AsyncIterator[Trainer]:
    config = CHAT.config(scheduling=scheduling or SchedulingConfig(max_in_flight=1))
    async with (
        rollout.open_rollout(config) as runtime,
        anyio.create_task_group() as tasks,
        open_runtime_loop() as loop,
    ):
        settings = GatewaySettings()
        runtime.services.gateway.door = Gateway("http://door", Sessions(settings), settings)
        routes = TrajectoryRoutes(Desk(runtime, tasks), loop, LIMITS, TOKEN)
        yield Trainer(runtime, routes)


@pytest.mark.anyio
async def test_post_given_up_while_it_waits_for_a_place_holds_none() -> None:
    async with trainer() as client:
        first = await client.open()
        gone = [FakeConnection() for _ in range(3)]
        async with anyio.create_task_group() as posts:
            for connection in gone:
                posts.start_soon(client.open, connection)
            await anyio.wait_all_tasks_blocked()
            for connection in gone:
                connection.leave()
        await anyio.wait_all_tasks_blocked()
        now = client.runtime.statistics()
        assert (now.admitted, now.running, now.outcomes) == (4, 1, {"cancelled": 3})
        await client.finish(first)
        with anyio.fail_after(5):
            await client.finish(await client.open())
        client.is_idle(cancelled=3)


@pytest.mark.anyio
async def test_post_given_up_as_soon_as_it_came_begins_nothing_that_stays() -> None:
    async with trainer() as client:
        connection = FakeConnection()
        connection.on_leave = lambda callback: callback()  # type: ignore[method-assign]
        assert await client.open(connection) == {}
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(5):
            await client.finish(await client.open())
        now = client.runtime.statistics()
        assert (now.running, now.admitted) == (0, now.finished)


@pytest.mark.anyio
async def test_post_whose_client_left_before_its_reply_is_cancelled() -> None:
    async with trainer() as client:
        await client.open(FakeConnection(leaves_before_the_reply=True))
        await anyio.wait_all_tasks_blocked()
        client.is_idle(cancelled=1)
        with anyio.fail_after(5):
            await client.finish(await client.open())


@pytest.mark.anyio
async def test_post_whose_reply_turns_out_to_be_unread_is_cancelled() -> None:
    async with trainer() as client:
        connection = FakeConnection()
        opened = await client.open(connection)
        connection.tell_unread()
        await anyio.wait_all_tasks_blocked()
        client.is_idle(cancelled=1)
        assert (await client.finish(opened))["error"]["code"] == "not_found"


@pytest.mark.anyio
async def test_connection_that_breaks_long_after_its_reply_cancels_nothing() -> None:
    async with trainer() as client:
        connection = FakeConnection()
        opened = await client.open(connection)
        await anyio.sleep(60)
        connection.tell_unread()
        await anyio.wait_all_tasks_blocked()
        assert client.runtime.statistics().running == 1
        assert (await client.finish(opened))["state"] == "ended"


@pytest.mark.anyio
async def test_given_up_posts_tell_their_end_once() -> None:
    ended: list[TrajectoryEnded] = []
    async with trainer(SchedulingConfig(max_in_flight=2)) as client:
        client.runtime.services.events.attach(
            lambda event, _subject: ended.append(event), kinds={TrajectoryEnded}
        )
        first = await client.open()
        await client.open(FakeConnection(leaves_before_the_reply=True))
        waiting = FakeConnection()
        second = await client.open()
        async with anyio.create_task_group() as posts:
            posts.start_soon(client.open, waiting)
            await anyio.wait_all_tasks_blocked()
            waiting.leave()
        for opened in (first, second):
            await client.finish(opened)
        await anyio.wait_all_tasks_blocked()
    told = [(event.outcome, event.reason) for event in ended]
    assert told[:2] == [("cancelled", "client_left")] * 2
    assert len(told) == 4


@asynccontextmanager
async def served() -> AsyncIterator[tuple[RolloutRuntime, httpx.AsyncClient, Callable[[], Any]]]:
    """A server with real sockets; connections that have posted and read nothing."""
    from rollout.gateway.serving import own_config, serve_runtime

    config = own_config(
        CHAT.config(
            engine=SimulatedEngine(),
            gateway=GatewayConfig(),
            scheduling=SchedulingConfig(max_in_flight=1),
        )
    )
    async with rollout.open_rollout(config) as runtime, serve_runtime(runtime, TOKEN) as gateway:
        url = urlsplit(gateway.url)

        def post() -> socket.socket:
            connection = socket.create_connection((url.hostname or "", url.port or 0))
            head = f"POST /trajectories HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n"
            connection.sendall(f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY)
            return connection

        headers = {"authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(
            base_url=gateway.url, headers=headers, trust_env=False, timeout=10
        ) as client:
            yield runtime, client, post


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.005)


def finishing(client: httpx.AsyncClient) -> Callable[[], Awaitable[None]]:
    async def open_and_finish() -> None:
        opened = (await client.post("/trajectories", content=BODY)).json()
        await client.post(f"/trajectories/{opened['id']}/finish")

    return open_and_finish


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_sockets_that_close_without_reading_leave_no_trajectory(backend: str) -> None:
    async def main() -> None:
        async with served() as (runtime, client, post):
            unread = post()
            await until(lambda: runtime.statistics().running == 1)
            waiting = post()
            await until(lambda: runtime.statistics().admitted == 2)
            waiting.close()
            await until(lambda: runtime.statistics().outcomes.get("cancelled") == 1)
            assert unread.recv(1, socket.MSG_PEEK)  # its reply is there
            unread.close()
            await until(lambda: runtime.statistics().outcomes.get("cancelled") == 2)
            await finishing(client)()
            now = runtime.statistics()
            assert (now.running, now.admitted, now.finished) == (0, 3, 3)

    anyio.run(main, backend=backend)
