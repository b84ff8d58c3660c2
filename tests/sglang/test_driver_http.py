"""The real SGLang HTTP server, started as somebody else would."""

from __future__ import annotations

import os
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest
import torch
from asking import collect
from driver import PYTHON, ask_all, check_pair, processes, prompts, shares_an_engine
from test_engine_vision import ask

import vision_models
from rollout.config import HttpEngine, InProcessPlacement, ModelConfig, RolloutConfig
from rollout.engine import open_engines
from rollout.engine.cores.http import HttpCore
from rollout.engine.cores.sglang.plugin import CPU_VARIABLE
from rollout.engine.guardian import mapped_files, remove, shared_files
from vision_reference import Reference, image

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from rollout.engine.driver.pool import EnginePool

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
    before = shared_files()
    process = await anyio.open_process(
        command, env=environment, start_new_session=True, stdout=None, stderr=None
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        with anyio.CancelScope(shield=True):
            left = mapped_files(each.pid for each in processes()) - before
            os.killpg(process.pid, 9)
            await process.aclose()
            remove(left)


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


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
async def test_http_real_sglang_sees_images_beside_the_ids_of_their_prompt(
    family: str, tmp_path: Path
) -> None:
    """Token for token what transformers says, on ids that text would not give back."""
    model = vision_models.save(family, tmp_path)
    reference = Reference(model)
    a, b = image(1), image(2, 130, 50)
    precise = () if family == "qwen2_5_vl" else ("--enable-precise-embedding-interpolation",)
    async with sglang_server(model, *precise) as url:
        core = HttpCore(url=url, model=model)
        with anyio.fail_after(300):
            await core.start()
        try:
            assert core.info.modalities == ("image",)
            assert core.info.media_fault(["video"]).startswith(
                "http: sglang takes no videos; it takes images: SGLang's HTTP server turns the ids"
            )
            for parts, media in (
                (("Look: ", a, "?"), (a,)),
                ((b, " and ", a, " and ", b), (b, a, b)),
            ):
                inputs = reference.inputs(*parts)
                answer = await collect(core, ask(reference, inputs, *media))
                assert answer.ids == reference.greedy(inputs, 16), answer.last.error
                assert np.abs(reference.ratios(inputs, media, answer) - 1).max() < 1e-3
            # Bytes that are no text: written out as text they would be others.
            ids = [*inputs["input_ids"][0].tolist(), 200, 201, 202]
            inputs = {**inputs, "input_ids": torch.tensor([ids])}
            answer = await collect(core, ask(reference, inputs, b, a, b))
            assert answer.last.finish_reason == "length", answer.last.error
        finally:
            await core.aclose()
