"""The core over the real SGLang on a CPU, beside SGLang's own code."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import numpy as np
import pytest
import torch
import transformers
from asking import Answer, asked, collect
from models import CONTEXT, EOS, VOCABULARY, save_model

from rollout.bridge import wait_future
from rollout.engine.cores.sglang import SGLangCore
from rollout.engine.cores.sglang import sglang_core as core_module
from rollout.engine.weights import DiskWeights
from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.engine.core import Chunk, GenerationRequest

#: SGLang is written for a process that ends with it: its loop's tasks and its sockets stay.
has_sglang = pytest.mark.rollout(allow_leaks=("files", "processes", "tasks"))
pytestmark = [pytest.mark.anyio, has_sglang]

#: SGLang keeps these tokens of the context to itself.
RESERVED = 6


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(llama: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()


@asynccontextmanager
async def opened(model: str, **options: Any) -> AsyncIterator[SGLangCore]:
    """A core that serves and is watched."""
    core = SGLangCore(model=model, device="cpu", **{"dtype": "float32", **options})
    await core.start()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(core.watch)
            yield core
            tasks.cancel_scope.cancel()
    finally:
        await core.aclose()


@pytest.fixture(scope="module")
async def core(llama: str) -> AsyncIterator[SGLangCore]:
    """64 at once, a chunk for every four tokens."""
    async with opened(llama, max_running=64, stream_interval=4) as core:
        yield core


def scores(model: Any, prompt: list[int], ids: list[int], temperature: float) -> list[float]:
    """Log-probs of `ids` after `prompt`, by transformers."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    table = torch.log_softmax(logits / temperature, -1)
    return [float(row[token]) for row, token in zip(table, ids, strict=True)]


def prompts(count: int, length: int = 12) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return rng.integers(3, VOCABULARY, (count, length)).tolist()


async def collect_all(core: SGLangCore, requests: list[GenerationRequest]) -> list[Answer]:
    answers: dict[str, Answer] = {}

    async def one(request: GenerationRequest) -> None:
        answers[request.request_id] = await collect(core, request)

    async with anyio.create_task_group() as tasks:
        for request in requests:
            tasks.start_soon(one, request)
    return [answers[request.request_id] for request in requests]


async def until_idle(core: SGLangCore) -> None:
    """Until SGLang itself says that nothing is left, its KV cache included."""
    while (load := core.load()).running or load.queued or load.kv_used:
        await anyio.sleep(0.005)


async def test_core_greedy_ids_and_log_probs_equal_those_of_transformers(
    core: SGLangCore, reference: Any
) -> None:
    texts = prompts(8)
    answers = await collect_all(core, [asked(text, max_new_tokens=40) for text in texts])
    for text, answer in zip(texts, answers, strict=True):
        with torch.inference_mode():
            out = reference.generate(torch.tensor([text]), max_new_tokens=40, do_sample=False)
        assert answer.ids == out[0, len(text) :].tolist()
        np.testing.assert_allclose(
            answer.log_probs, scores(reference, text, answer.ids, 1.0), atol=1e-4
        )
        assert {chunk.weight_version for chunk in answer.chunks} == {0}


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.8, "top_k": 20, "min_p": 0.01}],
)
async def test_core_sampled_log_probs_are_of_the_distribution_after_the_temperature(
    core: SGLangCore, reference: Any, sampling: dict[str, float]
) -> None:
    text = prompts(1)[0]
    answer = await collect(core, asked(text, max_new_tokens=60, ignore_eos=True, **sampling))
    expected = scores(reference, text, answer.ids, sampling["temperature"])
    np.testing.assert_allclose(answer.log_probs, expected, atol=1e-4)


async def test_core_top_log_probs_lead_with_the_greedy_token(core: SGLangCore) -> None:
    answer = await collect(core, asked(prompts(1)[0], top_log_probs=3))
    for chunk in answer.chunks:
        ids = np.frombuffer(chunk.ids, "<i4")
        top = np.frombuffer(chunk.top_ids, "<i4").reshape(-1, 3)
        values = np.frombuffer(chunk.top_log_probs, "<f4").reshape(-1, 3)
        np.testing.assert_array_equal(top[:, 0], ids)
        np.testing.assert_allclose(values[:, 0], np.frombuffer(chunk.log_probs, "<f4"), atol=1e-6)
        assert (np.diff(values) <= 0).all()


async def test_core_streams_by_the_interval(core: SGLangCore) -> None:
    answer = await collect(core, asked(prompts(1)[0], max_new_tokens=33, ignore_eos=True))
    sizes = [len(chunk.ids) // 4 for chunk in answer.chunks]
    assert sum(sizes) == 33
    assert 3 <= len(sizes) <= 11


async def test_core_stop_token_ends_the_answer_and_is_its_last_id(core: SGLangCore) -> None:
    text = prompts(1)[0]
    free = await collect(core, asked(text, max_new_tokens=20))
    stop = free.ids[7]
    stopped = await collect(core, asked(text, max_new_tokens=20, stop_token_ids=(stop,)))
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
    assert stopped.last.finish_reason == "stop"


async def test_core_eos_ends_the_answer_unless_it_is_ignored(core: SGLangCore) -> None:
    draws = [asked(text, max_new_tokens=400, temperature=5.0) for text in prompts(16)]
    stopped = [a for a in await collect_all(core, draws) if a.last.finish_reason == "stop"]
    assert stopped
    assert {answer.ids.index(EOS) == len(answer.ids) - 1 for answer in stopped} == {True}
    draws = [
        asked(text, max_new_tokens=400, temperature=5.0, ignore_eos=True) for text in prompts(16)
    ]
    assert {(a.last.finish_reason, len(a.ids)) for a in await collect_all(core, draws)} == {
        ("length", 400)
    }


async def test_core_answer_fills_the_context_and_no_more(core: SGLangCore) -> None:
    assert core.info.context_length == CONTEXT - RESERVED
    for length in (10, core.info.context_length - 1):
        text = prompts(1, length)[0]
        answer = await collect(core, asked(text, max_new_tokens=10_000, ignore_eos=True))
        assert (answer.last.finish_reason, answer.last.error) == ("length", "")
        assert length + len(answer.ids) == core.info.context_length
    refused = await collect(core, asked(prompts(1, core.info.context_length)[0]))
    assert refused.last.error == (
        f"the prompt has {CONTEXT - 6} tokens; expected at most {CONTEXT - 7}, since it and a new "
        f"token must fit into a context of {CONTEXT - 6}"
    )


@pytest.mark.parametrize(
    ("prompt", "request_", "sampling", "error"),
    [
        ([], {}, {}, "the prompt has no tokens"),
        (
            [5, VOCABULARY],
            {},
            {},
            "token id 600 at position 1 is outside the engine's vocabulary of 600 ids",
        ),
        ([5], {}, {"top_p": 0.0}, "sampling.top_p = 0.0; expected a number in (0, 1]"),
        (
            [5],
            {},
            {"repetition_penalty": 1.5},
            "sampling.repetition_penalty = 1.5; expected 1: SGLang penalises generated tokens "
            "only and gives log-probs after the penalty",
        ),
        (
            [5],
            {},
            {"ignore_eos": True, "stop_token_ids": (7,)},
            "sampling.ignore_eos: SGLang then ignores sampling.stop_token_ids too",
        ),
        (
            [5],
            {"routed_experts": True},
            {},
            "routed_experts: this engine tells none; SGLang does with engine.routed_experts = true",
        ),
    ],
)
async def test_core_request_that_it_cannot_serve_is_refused_by_name(
    core: SGLangCore,
    prompt: list[int],
    request_: dict[str, Any],
    sampling: dict[str, Any],
    error: str,
) -> None:
    answer = await collect(core, asked(prompt, request=request_, **sampling))
    assert (answer.last.finish_reason, answer.last.error) == ("error", error)


async def started(core: SGLangCore, request: GenerationRequest, tasks: Any) -> list[Chunk]:
    """The chunks of a request that fill as they come, once the first one has."""
    seen: list[Chunk] = []
    tasks.start_soon(collect, core, request, seen)
    while not seen:
        await anyio.sleep(0.002)
    return seen


async def test_core_abort_keeps_the_tokens_and_frees_the_cache(core: SGLangCore) -> None:
    request = asked(prompts(1)[0], max_new_tokens=480, ignore_eos=True)
    async with anyio.create_task_group() as tasks:
        seen = await started(core, request, tasks)
        core.abort_nowait(request.request_id)
        core.abort_nowait("nobody knows it")
    assert seen[-1].finish_reason == "abort"
    assert 0 < sum(len(chunk.ids) for chunk in seen) // 4 < 480
    with anyio.fail_after(10):
        await until_idle(core)


async def test_core_abort_that_is_lost_is_sent_again_past_the_latch(
    core: SGLangCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    manager = core._sglang._tokens
    dispatch, dropped = manager._dispatch_to_scheduler, []

    def drop_the_first(message: Any) -> None:
        if isinstance(message, AbortReq) and not dropped:
            dropped.append(message.rid)
        else:
            dispatch(message)

    monkeypatch.setattr(manager, "_dispatch_to_scheduler", drop_the_first)
    request = asked(prompts(1)[0], max_new_tokens=480, ignore_eos=True)
    async with anyio.create_task_group() as tasks:
        seen = await started(core, request, tasks)
        core.abort_nowait(request.request_id)
        assert dropped == [request.request_id]
        core.abort_nowait(request.request_id)
    assert seen[-1].finish_reason == "abort"
    assert sum(len(chunk.ids) for chunk in seen) // 4 < 480


async def test_core_abort_that_overtakes_its_request_is_sent_again(core: SGLangCore) -> None:
    requests = [asked(text, max_new_tokens=480, ignore_eos=True) for text in prompts(20)]
    seen: list[list[Chunk]] = [[] for _ in requests]
    async with anyio.create_task_group() as tasks:
        for request, chunks in zip(requests, seen, strict=True):
            tasks.start_soon(collect, core, request, chunks)
        await anyio.lowlevel.checkpoint()
        for request in requests:
            core.abort_nowait(request.request_id)
    assert {chunks[-1].finish_reason for chunks in seen} == {"abort"}
    with anyio.fail_after(10):
        await until_idle(core)


async def test_core_iterator_closed_early_aborts_the_request(core: SGLangCore) -> None:
    chunks = core.generate(asked(prompts(1)[0], max_new_tokens=480, ignore_eos=True))
    await anext(chunks)
    await chunks.aclose()
    with anyio.fail_after(10):
        await until_idle(core)


async def test_core_prefix_cache_is_keyed_by_the_weights(
    core: SGLangCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = prompts(3, 100)[2]
    first = await collect(core, asked(text))
    again = await collect(core, asked(text))
    assert (first.last.cached_tokens, again.last.cached_tokens) == (0, 99)
    monkeypatch.setattr(core, "_updates", core._updates + 1)
    assert (await collect(core, asked(text))).last.cached_tokens == 0


async def test_core_request_amid_a_change_of_weights_leaves_no_prefix_to_later_ones(
    core: SGLangCore, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = prompts(4, 100)[3]
    load = core._sglang.load_from_disk
    amid: list[Answer] = []

    async def load_late(path: str, version: int) -> None:
        amid.append(await collect(core, asked(text)))  # SGLang has not been paused yet
        await load(path, version)

    monkeypatch.setattr(core._sglang, "load_from_disk", load_late)
    await core.update_weights(1, DiskWeights(llama))
    after = await collect(core, asked(text))
    monkeypatch.undo()
    await core.update_weights(0, DiskWeights(llama))
    assert [answer.last.cached_tokens for answer in (*amid, after)] == [0, 0]
    assert {chunk.weight_version for chunk in amid[0].chunks} == {0}
    assert {chunk.weight_version for chunk in after.chunks} == {1}


async def test_core_weights_under_requests_need_a_version_that_names_what_sampled_a_token(
    core: SGLangCore, llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core._sglang, "names_versions", False)
    request = asked(prompts(1)[0], max_new_tokens=480, ignore_eos=True)
    async with anyio.create_task_group() as tasks:
        await started(core, request, tasks)
        with pytest.raises(EngineError, match=r"^mode = 'in_place': this version of SGLang does "):
            await core.update_weights(1, DiskWeights(llama))
        core.abort_nowait(request.request_id)
    assert core.info.weight_version == 0
    await core.update_weights(0, DiskWeights(llama))


async def test_core_larger_priority_leaves_the_queue_first(core: SGLangCore) -> None:
    ends: list[int] = []

    async def one(text: list[int], priority: int, count: int) -> None:
        request = asked(text, request={"priority": priority}, max_new_tokens=count, ignore_eos=True)
        await collect(core, request)
        ends.append(priority)

    async with anyio.create_task_group() as tasks:
        for text in prompts(64):  # they fill every place
            tasks.start_soon(one, text, 9, 200)
        while core.load().running < 64:
            await anyio.sleep(0.01)
        for priority in (0, 0, 0, 5):
            tasks.start_soon(one, prompts(1)[0], priority, 1)
    assert ends.index(5) < ends.index(0)


async def test_core_queue_that_is_full_rejects(
    core: SGLangCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = msgspec.structs.replace(core.info, max_requests=0, max_running=0)
    monkeypatch.setattr(core, "_info", full)
    answer = await collect(core, asked([5]))
    assert (answer.last.finish_reason, answer.last.error) == (
        "rejected",
        "engine queue is full: 0 waiting, limit 0",
    )


async def test_core_routed_experts_are_those_of_transformers(tmp_path: Any) -> None:
    model = save_model("qwen3_moe", tmp_path)
    text = prompts(1)[0]
    async with opened(model, routed_experts=True) as core:
        answer = await collect(core, asked(text, request={"routed_experts": True}))
        plain = await collect(core, asked(text))
        start = len(text) - 2
        rest = await collect(
            core, asked(text, request={"routed_experts": True, "routed_experts_start": start})
        )
        assert core.info.capabilities.expert_shape is not None
        layers, top_k = core.info.capabilities.expert_shape
    assert plain.ids == answer.ids == rest.ids
    assert plain.last.routed_experts == b""
    assert rest.last.routed_experts == answer.last.routed_experts[2 * layers * top_k * start :]
    whole = torch.tensor([text + answer.ids])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        logits = loaded(whole, output_router_logits=True).router_logits
    expected = torch.stack([layer.topk(2).indices for layer in logits], 1)[:-1]
    routed = np.frombuffer(answer.last.routed_experts, "<i2").reshape(expected.shape)
    np.testing.assert_array_equal(np.sort(routed), np.sort(expected.numpy()))


async def test_core_process_that_is_frozen_is_lost_by_name(
    llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_module, "FROZEN_S", 0.5)
    core = SGLangCore(model=llama, device="cpu", dtype="float32")
    await core.start()
    try:
        answers: list[Answer] = []

        async def one_after_another() -> None:
            while not answers or answers[-1].last.finish_reason == "length":
                request = asked(prompts(1)[0], max_new_tokens=480, ignore_eos=True)
                answers.append(await collect(core, request))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one_after_another)
            while not core.load().generated_tokens:
                await anyio.sleep(0.002)
            scheduler = core._sglang._processes[0]
            os.kill(scheduler.pid, signal.SIGSTOP)
            assert await core.watch() == "SGLang's process has been stopped for 0.5 s"
        assert answers[-1].last.finish_reason == "error"
        assert answers[-1].last.error == "SGLang's process has been stopped for 0.5 s"
        assert answers[-1].last.is_fatal
        assert (await collect(core, asked([5]))).last.finish_reason == "rejected"
    finally:
        await core.aclose()
    assert not scheduler.is_alive()


async def test_core_start_that_is_cancelled_leaves_no_process(llama: str) -> None:
    core = SGLangCore(model=llama, device="cpu")
    with anyio.move_on_after(2) as scope:
        await core.start()
    assert scope.cancelled_caught
    with anyio.fail_after(60):
        await wait_future(core._server_thread.stopped)
    assert [p for p in multiprocessing.active_children() if p.is_alive()] == []
