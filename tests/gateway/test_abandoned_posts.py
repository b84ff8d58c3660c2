"""`POST /trajectories` whose client goes away leaves no trajectory behind."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import msgspec
import pytest

import rollout
from rollout import GatewayConfig, RolloutRuntime
from rollout.config import SchedulingConfig, SimulatedEngine
from rollout.gateway.gateway import Gateway
from rollout.gateway.served_trajectories import FinishBody, OpenBody, TrajectoryServer
from rollout.observe.events import TrajectoryEnded
from rollout.testing import Scenario

TOKEN = "secret"
BODY = json.dumps({"prompt": {"messages": [{"role": "user", "content": "-"}]}}).encode()
CHAT = Scenario(seed=3).reply("One", "First.")


class Trainer:
    """A client of the server, without sockets."""

    def __init__(self, runtime: RolloutRuntime, server: TrajectoryServer) -> None:
        self.runtime = runtime
        self.server = server

    async def open(self) -> str:
        """The id of a trajectory whose agent may begin; cancellation is a client that leaves."""
        body = msgspec.json.decode(BODY, type=OpenBody)
        return str((await self.server.open(self.server.make_id(), body))["id"])

    async def finish(self, opened: str) -> dict[str, Any]:
        return await self.server.finish(opened, FinishBody())

    def is_idle(self, *, cancelled: int) -> None:
        """Nothing runs, and every admitted trajectory has its outcome."""
        now = self.runtime.statistics()
        assert (now.running, now.admitted) == (0, now.finished)
        assert now.outcomes["cancelled"] == cancelled


@asynccontextmanager
async def trainer(scheduling: SchedulingConfig | None = None) -> AsyncIterator[Trainer]:
    config = CHAT.config(scheduling=scheduling or SchedulingConfig(max_in_flight=1))
    async with rollout.open_rollout(config) as runtime, anyio.create_task_group() as tasks:
        runtime.services.gateway = Gateway(GatewayConfig())
        yield Trainer(runtime, TrajectoryServer(runtime, tasks))


@pytest.mark.anyio
async def test_post_given_up_while_it_waits_for_a_place_holds_none() -> None:
    async with trainer() as client:
        first = await client.open()
        async with anyio.create_task_group() as posts:
            for _ in range(3):
                posts.start_soon(client.open)
            await anyio.wait_all_tasks_blocked()
            posts.cancel_scope.cancel()
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
        with anyio.CancelScope() as scope:
            scope.cancel()
            await client.open()
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(5):
            await client.finish(await client.open())
        now = client.runtime.statistics()
        assert (now.running, now.admitted) == (0, now.finished)


@pytest.mark.anyio
async def test_post_whose_reply_is_lost_tells_its_end_once() -> None:
    ended: list[TrajectoryEnded] = []
    async with trainer(SchedulingConfig(max_in_flight=2)) as client:
        client.runtime.services.events.attach(
            lambda event, _subject: ended.append(event), kinds={TrajectoryEnded}
        )
        first, lost = await client.open(), await client.open()
        client.server.abandon(lost)
        await anyio.wait_all_tasks_blocked()
        client.server.abandon(lost)
        await client.finish(first)
        await anyio.wait_all_tasks_blocked()
        client.is_idle(cancelled=1)
    told = [(event.outcome, event.reason) for event in ended]
    assert told[0] == ("cancelled", "client_left")
    assert len(told) == 2


@asynccontextmanager
async def served() -> AsyncIterator[tuple[RolloutRuntime, httpx.AsyncClient, Callable[[], Any]]]:
    """A server with real sockets; connections that have posted and read nothing."""
    from rollout.gateway.serving import open_trajectory_server

    config = CHAT.config(
        engine=SimulatedEngine(),
        gateway=GatewayConfig(),
        scheduling=SchedulingConfig(max_in_flight=1),
    )
    async with open_trajectory_server(config, TOKEN) as (runtime, gateway):
        url = urlsplit(gateway.url)

        def post() -> socket.socket:
            connection = socket.create_connection((url.hostname or "", url.port or 0))
            head = f"POST /trajectories HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n"
            connection.sendall(f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY)
            return connection

        headers = {"authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(
            base_url=gateway.url, headers=headers, trust_env=False, verify=False, timeout=10
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
