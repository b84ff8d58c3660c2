"""The real SGLang HTTP server, started as somebody else would."""

from __future__ import annotations

import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from models import save_model
from test_driver_engines import PYTHON, answers, ask, prompts, sglang

from rollout.config import HttpEngine, InProcessPlacement, ModelConfig, RolloutConfig
from rollout.engine import open_engines
from rollout.engine.cores.sglang.plugin import CPU_VARIABLE
from rollout.engine.generation import Generation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real time."""
    return str(request.param)


@asynccontextmanager
async def sglang_server(model: str, *arguments: str) -> AsyncIterator[str]:
    """Its URL; the server may not be up yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(PYTHON, "-m", "sglang.launch_server", "--model-path", model, "--port", str(port)),
        *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
        *("--sampling-backend", "pytorch", "--max-total-tokens", "20000", "--disable-cuda-graph"),
        *("--skip-tokenizer-init", "--skip-server-warmup", "--sleep-on-idle"),
        *("--max-running-requests", "64", "--weight-version", "3", *arguments),
    ]
    environment = {**os.environ, CPU_VARIABLE: "1", "OMP_NUM_THREADS": "1"}
    process = await anyio.open_process(
        command, env=environment, start_new_session=True, stdout=None, stderr=None
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        with anyio.CancelScope(shield=True):
            os.killpg(process.pid, 9)
            await process.aclose()


@pytest.mark.parametrize("incremental", [False, True])
async def test_http_real_sglang_answers_like_the_engine(incremental: bool, tmp_path: Path) -> None:
    model = save_model("qwen2", tmp_path)
    texts = prompts(8)
    extra = ["--stream-interval", "4", *(["--incremental-streaming-output"] * incremental)]
    async with sglang_server(model, *extra) as url:
        config = RolloutConfig(
            model=ModelConfig(path=model),
            engine=HttpEngine(urls=(url,)),
            placement=InProcessPlacement(),
        )
        through_http = await answers(config, texts)
        async with open_engines(config) as pool:
            await cancelled_is_gone(pool)
    if not incremental:
        for real, own in zip(through_http, await answers(sglang(model), texts), strict=True):
            assert real.ids == own.ids
            assert real.log_probs.tolist() == pytest.approx(own.log_probs.tolist(), abs=1e-4)
    assert {tuple(map(tuple, g.versions)) for g in through_http} == {
        ((3, len(g.ids)),) for g in through_http
    }


async def cancelled_is_gone(pool: Any) -> None:
    """A cancelled generation ends with the server's word, long before its last token."""
    generation = Generation()
    async with anyio.create_task_group() as tasks:

        async def long_one() -> None:
            await ask(pool, [5, 6], generation, max_new_tokens=450, ignore_eos=True)

        tasks.start_soon(long_one)
        while not generation.ids:
            await anyio.sleep(0.005)
        tasks.cancel_scope.cancel()
    while pool.statistics()[0].in_flight:
        await anyio.sleep(0.01)
    assert pool.statistics()[0].tokens.arrived < 450
