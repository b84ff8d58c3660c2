"""When a server that somebody else runs is lost, and when it is only busy; in virtual time."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import anyio
import httpcore
import pytest

from pools import generate
from recorded_server import HEAD, RecordedServer
from rollout.config import HttpEngine, InProcessPlacement, ModelConfig, RolloutConfig
from rollout.engine import open_engines
from rollout.engine.placement.memory import MemoryByteStream, memory_stream_pair
from rollout.engine.pool.generation import Generation
from rollout.errors import EngineError
from test_trainer_settings import save_model

if TYPE_CHECKING:
    from pathlib import Path

    from anyio.abc import SocketStream, TaskGroup

    from rollout.engine.pool.pool import EnginePool

pytestmark = pytest.mark.anyio
Api = Literal["sglang", "vllm"]
Send = Callable[[str], Awaitable[None]]
GENERATE = {"sglang": "/generate", "vllm": "/v1/completions"}


class Stream(httpcore.AsyncNetworkStream):
    """The client's end of a connection in memory."""

    def __init__(self, stream: MemoryByteStream, network: Network) -> None:
        self._stream = stream
        self._network = network

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            with anyio.fail_after(timeout):
                try:
                    return await self._stream.receive(max_bytes)
                except anyio.EndOfStream:
                    while self._network.state == "silent":
                        await anyio.sleep(1)
                    return b""
        except anyio.BrokenResourceError as error:
            raise httpcore.ReadError("connection reset") from error
        except TimeoutError as error:
            raise httpcore.ReadTimeout("") from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.send(buffer)

    async def aclose(self) -> None:
        await self._stream.aclose()


class Network(httpcore.AsyncNetworkBackend):
    """Connects clients to the server, as long as it is up."""

    def __init__(self, server: RecordedServer, tasks: TaskGroup) -> None:
        self.state: Literal["up", "refuses", "silent"] = "up"
        self._server = server
        self._tasks = tasks
        self._ends: list[MemoryByteStream] = []

    def die(self) -> None:
        """The server's process is gone."""
        self.state = "refuses"
        for stream in self._ends:
            stream.cut()

    def cut(self) -> None:
        """All connections break, and the server lives."""
        self.die()
        self.state = "up"

    def fall_silent(self) -> None:
        """The server's machine is gone: packets go nowhere."""
        self.state = "silent"
        for stream in self._ends:
            stream.stall()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: object = None,
    ) -> Stream:
        if self.state == "refuses":
            raise httpcore.ConnectError("connection refused")
        if self.state == "silent":
            with anyio.move_on_after(timeout):
                await anyio.sleep_forever()
            raise httpcore.ConnectTimeout("")
        ours, theirs = memory_stream_pair()
        self._ends += [ours, theirs]
        self._tasks.start_soon(self._server.serve, cast("SocketStream", theirs))
        return Stream(ours, self)


class Server(RecordedServer):
    """Streams a token at once, and the second and last one after `seconds`.

    Attributes:
        came_at: Path and time of each request that was posted.
        busy_until: Until then nothing but generations is answered.
        failing_until: Until then everything but generations is answered 503.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.came_at: list[tuple[str, float]] = []
        self.busy_until = self.failing_until = 0.0
        self.aborted: set[str] = set()
        facts = {"max_req_input_len": 2042, "weight_version": "3"}
        models = {"data": [{"id": "m", "max_model_len": 2042}]}
        for path in ("/health", "/model_info", "/v1/models", "/server_info"):
            self.on_control(f"GET {path}", json.dumps(facts | models))
        self.on_control("POST /abort_request", "")
        self.on_stream("POST /generate", self._sglang)
        self.on_stream("POST /v1/completions", self._vllm)

    def on_control(self, route: str, text: str) -> None:
        async def answer(body: dict[str, Any], send: Send) -> None:
            path = route.partition(" ")[2]
            self.came_at.append((path, anyio.current_time()))
            if "rid" in body:
                self.aborted.add(body["rid"])
            await anyio.sleep_until(self.busy_until)
            status = 503 if anyio.current_time() < self.failing_until else 200
            await send(HEAD.format(status=status, kind="application/json") + text)

        self._routes[route] = answer

    def posts(self, path: str) -> list[float]:
        """When requests came there."""
        return [time for each, time in self.came_at if each == path]

    async def _sglang(self, body: dict[str, Any], send: Send) -> None:
        self.came_at.append(("/generate", anyio.current_time()))
        start = len(body["input_ids"])  # one that resumes has its first token in the prompt
        await send(self._event(start, 1, None))
        until = anyio.current_time() + self.seconds
        while anyio.current_time() < until and body["rid"] not in self.aborted:
            await anyio.sleep(0.5)
        if body["rid"] in self.aborted:
            await send(self._event(start, 1, {"type": "abort", "message": ""}))
        else:
            await send(self._event(start, 2, {"type": "stop", "matched": 0}))

    def on_refusal(self, route: str, status: int, until: float) -> None:
        """Refuse what is posted there until then."""
        generate = self._routes[f"POST {route}"]

        async def answer(body: dict[str, Any], send: Send) -> None:
            if anyio.current_time() < until:
                self.came_at.append((route, anyio.current_time()))
                await send(HEAD.format(status=status, kind="text/plain") + "later")
            else:
                await generate(body, send)

        self._routes[f"POST {route}"] = answer

    def speak_ssh(self, route: str) -> None:
        """Answer what is posted there with what is no HTTP."""

        async def answer(_: dict[str, Any], send: Send) -> None:
            self.came_at.append((route, anyio.current_time()))
            await send("SSH-2.0-OpenSSH\r\n\r\n")

        self._routes[f"POST {route}"] = answer

    @staticmethod
    def _event(start: int, count: int, finish: dict[str, Any] | None) -> str:
        ids = [start + i for i in range(count)]
        meta = {
            "finish_reason": finish,
            "weight_version": "3",
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "completion_tokens": count,
        }
        return f"data: {json.dumps({'output_ids': ids, 'meta_info': meta})}\n\n"

    async def _vllm(self, body: dict[str, Any], send: Send) -> None:
        self.came_at.append(("/v1/completions", anyio.current_time()))
        start = len(body["prompt"])
        for offset, finish in enumerate((None, "stop")):
            scored = {"token_logprobs": [-0.5]}
            choice = {"token_ids": [start + offset], "logprobs": scored, "finish_reason": finish}
            await send(f"data: {json.dumps({'choices': [choice]})}\n\n")
            await anyio.sleep(self.seconds)


async def run_at_once(function: Callable[..., object], *args: object, **_: object) -> object:
    """In the place of threads, which virtual time does not wait for."""
    return function(*args)


@asynccontextmanager
async def serving(
    server: Server,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    api: Api = "sglang",
    max_requests: int = 4,
) -> AsyncIterator[tuple[EnginePool, Network]]:
    save_model(directory)
    async with anyio.create_task_group() as tasks:
        network = Network(server, tasks)
        pool_type = partial(httpcore.AsyncConnectionPool, network_backend=network)
        monkeypatch.setattr(httpcore, "AsyncConnectionPool", pool_type)
        monkeypatch.setattr("anyio.to_thread.run_sync", run_at_once)
        config = RolloutConfig(
            model=ModelConfig(path=str(directory)),
            engine=HttpEngine(urls=("http://theirs",), api=api, max_requests=max_requests),
            placement=InProcessPlacement(),
        )
        async with open_engines(config) as pool:
            yield pool, network
        tasks.cancel_scope.cancel()


async def ask(pool: EnginePool, generation: Generation | None = None) -> list[int]:
    return (await generate(pool, [5, 6, 7], 10, generation)).ids.tolist()


async def test_http_abort_leaves_at_once_where_all_places_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(seconds=60)
    async with serving(server, tmp_path, monkeypatch) as (pool, _):
        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask, pool)
            generation = Generation()
            with anyio.move_on_after(2):
                await ask(pool, generation)
            assert anyio.current_time() - began < 3
    assert [time - began < 2.5 for time in server.posts("/abort_request")] == [True]
    assert (generation.finish_reason, generation.ids.tolist()) == ("abort", [3])
    assert len(server.posts("/generate")) == 4


@pytest.mark.parametrize(("kind", "api"), [("busy", "sglang"), ("failing", "vllm")])
async def test_http_server_in_a_long_step_or_paused_is_not_lost(
    kind: str, api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is answered for 60 s, or all with 503, and no token comes."""
    server = Server(seconds=90)
    async with serving(server, tmp_path, monkeypatch, api) as (pool, _):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool)
            await anyio.sleep(5)
            until = anyio.current_time() + 60
            server.busy_until = until if kind == "busy" else 0.0
            server.failing_until = until if kind == "failing" else 0.0
    assert len(server.posts(GENERATE[api])) == 1


async def test_http_sglang_is_never_asked_for_its_health(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the schedulers sample a token for that, and wait for it."""
    server = Server(seconds=30)
    async with serving(server, tmp_path, monkeypatch) as (pool, _):
        await ask(pool)
    assert server.posts("/health") == []
    assert len(server.posts("/model_info")) >= 25


@pytest.mark.parametrize(
    ("api", "loss", "lasts_s"),  # a machine that is silent is waited for longer than a step takes
    [("vllm", "die", 30), ("sglang", "fall_silent", 400)],
)
async def test_http_server_that_is_gone_is_lost_and_its_requests_resume(
    api: Api, loss: str, lasts_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(seconds=10)
    async with serving(server, tmp_path, monkeypatch, api) as (pool, network):
        generation = Generation()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, generation)
            await anyio.sleep(5)
            getattr(network, loss)()
            await anyio.sleep(lasts_s)
            assert len(server.posts(GENERATE[api])) == 1
            network.state = "up"
        assert generation.ids.tolist() == [3, 4, 5]  # one, and two after it
        assert generation.resumes == 1
        assert len(server.posts(GENERATE[api])) == 2


async def test_http_answer_that_is_cut_by_a_server_that_lives_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(seconds=10)
    async with serving(server, tmp_path, monkeypatch) as (pool, network):
        generation = Generation()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, generation)
            await anyio.sleep(5)
            network.cut()
        assert generation.ids.tolist() == [3, 4, 5]
        assert (generation.resumes, len(server.posts("/generate"))) == (1, 2)
        assert [each.starts for each in pool.statistics()] == [1]


@pytest.mark.parametrize("status", [429, 503])
async def test_http_server_that_takes_no_request_now_is_asked_again(
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = Server(seconds=1)
    async with serving(server, tmp_path, monkeypatch) as (pool, _):
        server.on_refusal("/generate", status, anyio.current_time() + 30)
        assert await ask(pool) == [3, 4]
        assert 30 < len(server.posts("/generate")) < 40
        (line,) = [each for each in caplog.messages if "answered" in each]
        assert f"http://theirs/generate answered {status}: " in line


async def test_http_connections_that_break_before_any_token_fail_after_twenty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(seconds=1)
    server.speak_ssh("/generate")
    async with serving(server, tmp_path, monkeypatch) as (pool, _):
        with pytest.raises(EngineError, match=r"^20 connections were lost .* illegal status line"):
            with anyio.fail_after(60):
                await ask(pool)
    assert len(server.posts("/generate")) == 20


async def test_http_idle_server_that_refuses_connections_is_lost_in_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(seconds=1)
    async with serving(server, tmp_path, monkeypatch) as (pool, network):
        network.die()
        await anyio.sleep(10)
        assert [each.state for each in pool.statistics()] == ["restarting"]


async def test_http_request_that_finds_its_server_silent_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(seconds=1)
    async with serving(server, tmp_path, monkeypatch) as (pool, network):
        network.state = "silent"
        generation = Generation()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, generation)
            await anyio.sleep(60)
            network.state = "up"
        assert generation.ids.tolist() == [3, 4]
        assert generation.resumes == 0
