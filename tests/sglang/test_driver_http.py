"""The real SGLang HTTP server, started as somebody else would."""

from __future__ import annotations

import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import pytest
from driver import PYTHON, ask_all, check_pair, prompts, shares_an_engine

from rollout.config import HttpEngine, InProcessPlacement, ModelConfig, RolloutConfig
from rollout.engine import open_engines
from rollout.engine.cores.sglang.plugin import CPU_VARIABLE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.engine.pool.pool import EnginePool

pytestmark = [pytest.mark.anyio, shares_an_engine]
INCREMENTAL = "--incremental-streaming-output"
NO_TOKENIZER = "--skip-tokenizer-init"


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
        *("--skip-server-warmup", "--sleep-on-idle"),
        *("--max-running-requests", "64", "--weight-version", "3", "--stream-interval", "4"),
        *arguments,
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


@pytest.mark.parametrize("extra", [(), pytest.param((INCREMENTAL,), marks=pytest.mark.slow)])
async def test_http_real_sglang_answers_like_the_engine(
    extra: tuple[str, ...], pool: EnginePool, models: list[str]
) -> None:
    texts = prompts(8)
    async with sglang_server(models[0], NO_TOKENIZER, *extra) as url:
        config = RolloutConfig(
            model=ModelConfig(path=models[0]),
            engine=HttpEngine(urls=(url,), start_timeout_s=300.0),
            placement=InProcessPlacement(),
        )
        async with open_engines(config) as servers:
            through_http = await ask_all(servers, texts)
            await check_pair(servers)
    for answer, own in zip(through_http, await ask_all(pool, texts), strict=True):
        assert answer.ids == own.ids
        assert answer.log_probs.tolist() == pytest.approx(own.log_probs.tolist(), abs=1e-4)
        assert answer.versions == [[3, len(answer.ids)]]
