"""Engines behind HTTP servers, against what real ones answered."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from recorded_server import RecordedServer, recorded_server
from rollout.engine import GenerationRequest, SamplingParams
from rollout.engine.core import Chunk, pack_ids
from rollout.engine.cores.http import HttpCore
from rollout.engine.pool.generation import Generation
from rollout.errors import EngineError
from rollout.medium import Media, PlacedMedia
from rollout.testing import simulated_tokenizer
from slow_cases import slow_but

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

pytestmark = pytest.mark.anyio
RECORDED = Path(__file__).parents[1] / "recorded"
SERVER_INFO = {"max_req_input_len": 2042, "weight_version": "3"}
MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 512}]}
CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 600,
    "eos_token_id": 2,
    "max_position_embeddings": 2048,
}


@pytest.fixture(params=slow_but(["trio", "asyncio"], "trio"))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real sockets, so real time."""
    return str(request.param)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def recorded(name: str) -> Any:
    async def stream(_: dict[str, Any], send: Callable[[str], Awaitable[None]]) -> None:
        await send((RECORDED / name).read_text())

    return stream


def asked(**sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id="0123456789abcdef0123456789abcdef",
        prompt_ids=pack_ids([5, 6, 7]),
        sampling=SamplingParams(**{"max_new_tokens": 10, "temperature": 0.0, **sampling}),
    )


@asynccontextmanager
async def opened(
    server: RecordedServer, model: str, api: str = "sglang", facts: dict[str, Any] | None = None
) -> AsyncIterator[HttpCore]:
    server.on("GET /server_info", json.dumps(SERVER_INFO | (facts or {})))
    server.on("GET /v1/models", json.dumps(MODELS))
    server.on("GET /health", "")
    server.on("POST /abort_request", "")
    core = HttpCore(url=server.url, model=model, api=api)
    await core.start()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(core.watch)
            yield core
            tasks.cancel_scope.cancel()
    finally:
        await core.aclose()


async def collect(core: HttpCore, request: GenerationRequest) -> tuple[Generation, Chunk]:
    generation = Generation()
    async for chunk in core.generate(request):
        generation.append(chunk)
    return generation, chunk


async def test_http_sglang_recorded_answer_becomes_tokens(model: str) -> None:
    async with recorded_server() as server:
        server.on_stream("POST /generate", recorded("sglang_generate.txt"))
        async with opened(server, model) as core:
            generation, last = await collect(core, asked(stop_token_ids=(9,)))
            assert (core.info.context_length, core.info.weight_version) == (2042, 3)
            assert core.info.core == "http: sglang"
    assert generation.ids.tolist() == [94, 300, 24, 524, 329, 233, 449, 233, 547, 85]
    assert generation.log_probs[0] == pytest.approx(-2.210803270339966)
    assert (generation.versions, last.finish_reason) == ([[3, 10]], "length")
    (path, body), *_ = server.bodies
    assert path == "/generate"
    assert body["input_ids"] == [5, 6, 7]
    assert body["sampling_params"]["stop_token_ids"] == [9]
    assert body["sampling_params"]["stream_interval"] == 16
    assert (body["rid"], body["extra_key"]) == (asked().request_id, "weights-3")


async def test_http_tokenizer_alone_says_what_the_server_does_not(tmp_path: Path) -> None:
    simulated_tokenizer().save_pretrained(tmp_path)
    async with recorded_server() as server, opened(server, str(tmp_path)) as core:
        assert (core.info.vocab_size, core.info.eos_ids) == (259, (258,))
        assert core.info.context_length == 2042


@pytest.mark.parametrize(
    ("facts", "sent"),
    [
        ({}, None),
        ({"enable_priority_scheduling": True}, 7),
        ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, -7),
    ],
)
async def test_http_sglang_priority_is_sent_to_servers_that_schedule_by_it(
    facts: dict[str, Any], sent: int | None, model: str
) -> None:
    async with recorded_server() as server:
        server.on_stream("POST /generate", recorded("sglang_generate.txt"))
        async with opened(server, model, facts=facts) as core:
            request = asked()
            request.priority = 7
            await collect(core, request)
    assert [body.get("priority") for path, body in server.bodies if path == "/generate"] == [sent]


async def test_http_vllm_recorded_answer_becomes_tokens(model: str) -> None:
    async with recorded_server() as server:
        server.on_stream("POST /v1/completions", recorded("vllm_completions.txt"))
        async with opened(server, model, "vllm") as core:
            generation, last = await collect(core, asked(temperature=1.0, seed=11))
            assert core.info.context_length == 512
    assert generation.ids.tolist() == [94, 300, 24, 2]
    assert generation.log_probs.tolist() == pytest.approx(
        [-2.210803270339966, -0.7156825065612793, -2.523533821105957, -1.1527358293533325]
    )
    assert (generation.versions, last.finish_reason) == ([[0, 4]], "stop")
    ((path, body),) = server.bodies
    assert path == "/v1/completions"
    assert (body["model"], body["prompt"], body["seed"]) == ("tiny", [5, 6, 7], 11)
    assert body["return_token_ids"] is True


async def test_http_vllm_temperature_that_its_log_probs_leave_out_is_refused(model: str) -> None:
    async with recorded_server() as server, opened(server, model, "vllm") as core:
        _, last = await collect(core, asked(temperature=0.7))
    assert last.error == (
        "sampling.temperature = 0.7; expected 0 or 1: vLLM gives log-probs before the temperature"
    )


async def test_http_vllm_abort_closes_the_connection(model: str) -> None:
    async with recorded_server() as server:
        first = (RECORDED / "vllm_completions.txt").read_text().split("\n\n")[0] + "\n\n"

        async def stream(_: dict[str, Any], send: Callable[[str], Awaitable[None]]) -> None:
            while True:
                await send(first)
                await anyio.sleep(0.01)

        server.on_stream("POST /v1/completions", stream)
        async with opened(server, model, "vllm") as core:
            chunks: list[Chunk] = []
            async for chunk in core.generate(asked()):
                chunks.append(chunk)
                core.abort_nowait(asked().request_id)
            assert chunks[-1].finish_reason == "abort"
            while server.closed != ["/v1/completions"]:
                await anyio.sleep(0.01)
            assert core.load().running == 0


async def test_http_text_with_separators_of_lines_is_no_end_of_an_event(model: str) -> None:
    recorded_text = (RECORDED / "vllm_completions.txt").read_text()
    events = recorded_text.replace("data: {", 'data: {"note":"\u2028\u2029\x85",')

    async def stream(_: dict[str, Any], send: Callable[[str], Awaitable[None]]) -> None:
        for start in range(0, len(events), 7):  # pieces that begin and end anywhere
            await send(events[start : start + 7])

    async with recorded_server() as server:
        server.on_stream("POST /v1/completions", stream)
        async with opened(server, model, "vllm") as core:
            generation, last = await collect(core, asked(temperature=1.0))
    assert (generation.ids.tolist()[:3], last.error) == ([94, 300, 24], "")


async def test_http_server_facts_of_another_type_are_named(model: str) -> None:
    async with recorded_server() as server:
        facts = {"max_req_input_len": None, "context_length": "2048"}
        with pytest.raises(EngineError) as caught:
            async with opened(server, model, facts=facts):
                pytest.fail("opened")
        assert str(caught.value).startswith(f"{server.url}: a field of the answer is not as")
        assert str(caught.value).endswith("`$.context_length`")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('data: {"error":{"message":"top_p must be in (0, 1]","code":400}}\n\n', "top_p must be"),
        ("data: nonsense\n\n", "/generate: an event is no JSON object"),
    ],
)
async def test_http_answer_that_goes_wrong_ends_in_a_named_error(
    model: str, text: str, error: str
) -> None:
    async with recorded_server() as server:

        async def stream(_: dict[str, Any], send: Callable[[str], Awaitable[None]]) -> None:
            await send(text)

        server.on_stream("POST /generate", stream)
        async with opened(server, model) as core:
            _, last = await collect(core, asked())
    assert last.finish_reason == "error"
    assert error in last.error


async def test_http_server_that_is_full_rejects_and_other_errors_are_named(model: str) -> None:
    async with recorded_server() as server, opened(server, model) as core:
        server.on("POST /generate", "busy", status=503)
        _, full = await collect(core, asked())
        server.on("POST /generate", "no such model", status=400)
        _, wrong = await collect(core, asked())
    assert full.finish_reason == "rejected"
    assert wrong.error == f"{server.url}/generate answered 400: no such model"


async def test_http_key_that_is_not_set_is_named(model: str) -> None:
    core = HttpCore(url="http://127.0.0.1:9", model=model, api_key_variable="NO_SUCH_KEY")
    with pytest.raises(EngineError, match=r"^engine\.api_key_variable = 'NO_SUCH_KEY': not set"):
        await core.start()


async def test_http_server_that_refuses_us_is_an_error_at_once(model: str) -> None:
    async with recorded_server() as server:
        server.on("GET /server_info", "who are you?", status=401)
        with pytest.raises(EngineError, match="/server_info answered 401: who are you"):
            await HttpCore(url=server.url, model=model).start()


async def test_http_image_is_refused_by_name(model: str) -> None:
    medium = Media(kind="image", content=b"x", mime="image/png", width=1, height=1)
    request = asked()
    request.media = (PlacedMedia(medium, 0, 1),)
    async with recorded_server() as server, opened(server, model) as core:
        _, last = await collect(core, request)
    assert last.finish_reason == "error"
    assert last.error == (
        "http: sglang takes no images; it takes text only: images and token ids together are for "
        "engine.kind = 'sglang'"
    )
    assert server.bodies == []
