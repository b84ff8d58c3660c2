"""The embedded engine: exact tokens in every kind of batch, and one end for every request."""

from __future__ import annotations

import subprocess
import sys
import threading
from array import array
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import msgspec
import numpy as np
import pytest
import torch
import transformers

from rollout.config import RayPlacement, RolloutConfig, TransformersEngine
from rollout.engine.core import (
    Chunk,
    GenerationRequest,
    SamplingParams,
    pack_ids,
    unpack_ids,
)
from rollout.engine.cores.transformers import TransformersCore
from rollout.engine.cores.transformers import sampling as sampling_module
from rollout.engine.cores.transformers import transformers_core as core_module
from rollout.engine.pool.opening import build_core_spec
from rollout.errors import EngineError
from rollout.seeds import RequestIds
from slow_cases import slow_after, slow_but
from tiny_models import TINY, save_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.process]
VOCABULARY, CONTEXT = TINY["vocab_size"], TINY["max_position_embeddings"]
#: A program that leaves while its core generates.
LEAVING = """
import sys, anyio
from rollout.engine.core import GenerationRequest, SamplingParams, pack_ids
from rollout.engine.cores.transformers import TransformersCore

async def main():
    core = TransformersCore(model=sys.argv[1])
    await core.start()
    sampling = SamplingParams(max_new_tokens=2000, ignore_eos=True)
    request = GenerationRequest(request_id="a", prompt_ids=pack_ids([5]), sampling=sampling)
    async for _ in core.generate(request):
        print("leaving")
        return

anyio.run(main)
"""
ids_of_requests = RequestIds()


class Answer(msgspec.Struct):
    """Everything that came back for one request."""

    ids: list[int]
    log_probs: list[float]
    chunks: list[Chunk]

    @property
    def last(self) -> Chunk:
        return self.chunks[-1]


@pytest.fixture(params=slow_but(["asyncio", "trio"], "asyncio"))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real time: the model works in a real thread."""
    return request.param


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a small random model."""
    return save_model(transformers.LlamaConfig(**TINY), tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def opened(model: str, **options: Any) -> AsyncIterator[TransformersCore]:
    core = TransformersCore(model=model, **{"dtype": "float32", "max_running": 8, **options})
    await core.start()
    try:
        yield core
    finally:
        await core.aclose()


def asked(prompt: Any, session_id: str = "", priority: int = 0, **sampling: Any):
    return GenerationRequest(
        request_id=ids_of_requests.new(),
        prompt_ids=pack_ids([int(token) for token in prompt]),
        session_id=session_id,
        priority=priority,
        sampling=SamplingParams(**{"max_new_tokens": 8, "temperature": 0.0, **sampling}),
    )


async def collect(core: TransformersCore, request: GenerationRequest) -> Answer:
    ids, log_probs, chunks = array("i"), array("f"), []
    async for chunk in core.generate(request):
        assert chunk.request_id == request.request_id
        assert chunk.offset == len(ids)
        assert len(chunk.ids) == len(chunk.log_probs)
        ids.extend(unpack_ids(chunk.ids))
        log_probs.frombytes(chunk.log_probs)
        chunks.append(chunk)
    assert [chunk.finish_reason is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [
        True
    ]
    return Answer(ids.tolist(), log_probs.tolist(), chunks)


async def collect_all(core: TransformersCore, requests: list[GenerationRequest]) -> list[Answer]:
    answers: dict[str, Answer] = {}

    async def one(request: GenerationRequest) -> None:
        answers[request.request_id] = await collect(core, request)

    async with anyio.create_task_group() as tasks:
        for request in requests:
            tasks.start_soon(one, request)
    return [answers[request.request_id] for request in requests]


def prompts(count: int, seed: int = 0, shared: int = 0) -> list[list[int]]:
    """`count` prompts of uneven length, with the first `shared` tokens in common."""
    rng = np.random.default_rng(seed)
    start = rng.integers(3, VOCABULARY, shared).tolist()
    lengths = rng.integers(1, 40, count)
    return [start + rng.integers(3, VOCABULARY, int(length)).tolist() for length in lengths]


def reference(model: str, prompt: list[int], count: int, **options: Any) -> tuple[list, list]:
    """Greedy ids of transformers' own `generate`, and their log-probs."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return greedy(loaded, prompt, count, **options)


def greedy(loaded: Any, prompt: list[int], count: int, **options: Any) -> tuple[list, list]:
    with torch.inference_mode():
        out = loaded.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
    ids = out.sequences[0, len(prompt) :].tolist()
    pairs = zip(out.logits, ids, strict=True)
    return ids, [logits[0].log_softmax(-1)[token].item() for logits, token in pairs]


class Gate:
    """Holds the engine's draws until it is opened."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original
        self._reached, self._opened = threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> Any:
        self._reached.set()
        assert self._opened.wait(20)
        return self._original(*args)

    def open(self) -> None:
        self._opened.set()

    async def reached(self) -> None:
        while not self._reached.is_set():
            await anyio.lowlevel.checkpoint()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate(sampling_module.sample)
    monkeypatch.setattr(sampling_module, "sample", gate)
    return gate


# Exact tokens


@pytest.mark.parametrize("max_running", slow_but([1, 8], 8))
async def test_core_greedy_equals_transformers_generate(tiny: str, max_running: int) -> None:
    work = prompts(6)
    async with opened(tiny, max_running=max_running) as core:
        answers = await collect_all(core, [asked(p, max_new_tokens=12) for p in work])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    for prompt, answer in zip(work, answers, strict=True):
        ids, log_probs = greedy(loaded, prompt, 12)
        assert answer.ids == ids
        np.testing.assert_allclose(answer.log_probs, log_probs, atol=1e-4)


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "heads": lambda: transformers.LlamaConfig(
        **{**TINY, "num_key_value_heads": 4, "tie_word_embeddings": True}
    ),
    "qwen2": lambda: transformers.Qwen2Config(**TINY),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**TINY, sliding_window=None),
    "mixtral": lambda: transformers.MixtralConfig(**TINY, num_local_experts=4),
    "olmo2": lambda: transformers.Olmo2Config(**TINY),
    "phi3": lambda: transformers.Phi3Config(**TINY),
}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("name", slow_after(1, ARCHITECTURES))
async def test_core_other_architecture_equals_transformers_generate(
    name: str, tmp_path: Path
) -> None:
    model = save_model(ARCHITECTURES[name](), tmp_path)
    work = [*prompts(3, shared=40), *prompts(2, seed=1)]
    async with opened(model) as core:
        answers = await collect_all(core, [asked(p, max_new_tokens=12) for p in work])
    for prompt, answer in zip(work, answers, strict=True):
        ids, log_probs = reference(model, prompt, 12)
        assert answer.ids == ids
        np.testing.assert_allclose(answer.log_probs, log_probs, atol=1e-4)


def window(cls: type) -> Callable[[], Any]:
    return lambda: cls(**{**TINY, "num_hidden_layers": 6}, sliding_window=16)


UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "mistral": (window(transformers.MistralConfig), "it attends to a sliding window of 16"),
    "gemma2": (window(transformers.Gemma2Config), "it has layers of sliding_attention"),
    "mamba": (
        lambda: transformers.MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2),
        "it keeps a recurrent state",
    ),
    "rope": (
        lambda: transformers.LlamaConfig(
            **TINY, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        ),
        "its positions are of type dynamic, which depend on the length",
    ),
    "softcap": (
        lambda: transformers.Gemma2Config(**TINY, layer_types=["full_attention"] * 2),
        "Gemma2Attention asks for softcap",
    ),
}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("name", UNSUPPORTED)
async def test_core_unsupported_architecture_is_refused_at_start(name: str, tmp_path: Path) -> None:
    config, reason = UNSUPPORTED[name]
    core = TransformersCore(model=save_model(config(), tmp_path))
    with pytest.raises(EngineError, match=f"ForCausalLM is not supported: {reason}"):
        await core.start()
    await core.aclose()


async def test_core_long_prompt_in_parts_equals_transformers_generate(tiny: str) -> None:
    rng = np.random.default_rng(3)
    long = rng.integers(3, VOCABULARY, 700).tolist()
    async with opened(tiny) as core:
        answers = await collect_all(
            core, [asked(long[:30], max_new_tokens=20), asked(long, max_new_tokens=10)]
        )
    assert answers[1].ids == reference(tiny, long, 10)[0]
    assert answers[0].ids == reference(tiny, long[:30], 20)[0]


async def test_core_further_turns_reuse_the_session_and_stay_exact(tiny: str) -> None:
    sessions = prompts(3, seed=4)
    rng = np.random.default_rng(5)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    computed = [0] * 3
    async with opened(tiny) as core:
        for _ in range(3):
            answers = await collect_all(
                core,
                [
                    asked(p, f"s{i}", max_new_tokens=8 + i, ignore_eos=True)
                    for i, p in enumerate(sessions)
                ],
            )
            for i, (prompt, answer) in enumerate(zip(sessions, answers, strict=True)):
                expected = greedy(loaded, prompt, 8 + i, eos_token_id=-1)
                assert answer.ids == expected[0]
                np.testing.assert_allclose(answer.log_probs, expected[1], atol=1e-4)
                assert answer.last.cached_tokens == computed[i]
                # All but the token sampled last, which was never fed to the model.
                computed[i] = len(prompt) + 8 + i - 1
            sessions = [
                prompt + answer.ids + rng.integers(3, VOCABULARY, 5).tolist()
                for prompt, answer in zip(sessions, answers, strict=True)
            ]


async def test_core_group_computes_its_prompt_once(tiny: str) -> None:
    prompt = prompts(1, shared=100)[0]
    async with opened(tiny) as core:
        members = [asked(prompt, f"m{i}", temperature=1.0, seed=i) for i in range(6)]
        answers = await collect_all(core, members)
        alone = [await collect(core, asked(prompt, temperature=1.0, seed=i)) for i in range(6)]
    cached = sorted(answer.last.cached_tokens for answer in answers)
    assert cached == [0] + [len(prompt) - 1] * 5
    assert [answer.ids for answer in answers] == [answer.ids for answer in alone]


async def test_core_resumed_request_continues_as_if_never_stopped(tiny: str) -> None:
    prompt = prompts(1, seed=7)[0]
    sampling = {"temperature": 1.0, "seed": 11, "ignore_eos": True}
    async with opened(tiny) as core:
        whole = await collect(core, asked(prompt, max_new_tokens=30, **sampling))
        resumed = await collect(core, asked(prompt + whole.ids[:12], max_new_tokens=18, **sampling))
    assert resumed.ids == whole.ids[12:]


async def test_core_without_a_seed_draws_afresh(tiny: str) -> None:
    prompt = prompts(1, seed=8)[0]
    async with opened(tiny) as core:
        requests = [asked(prompt, temperature=1.0, ignore_eos=True) for _ in range(4)]
        answers = await collect_all(core, requests)
    assert len({tuple(answer.ids) for answer in answers}) == 4


# Ends


async def test_core_end_token_ends_the_request_and_is_part_of_it(tiny: str) -> None:
    prompt = prompts(1, seed=10)[0]
    async with opened(tiny) as core:
        free = await collect(core, asked(prompt, ignore_eos=True))
        stop = free.ids[5]
        first = free.ids.index(stop)
        answer = await collect(core, asked(prompt, ignore_eos=True, stop_token_ids=(stop,)))
    assert free.last.finish_reason == "length"
    assert answer.ids == free.ids[: first + 1]
    assert answer.last.finish_reason == "stop"


async def test_core_full_context_ends_the_request_with_length(tiny: str) -> None:
    prompt = prompts(1, seed=11, shared=20)[0]
    async with opened(tiny, context_length=len(prompt) + 3) as core:
        assert core.info.context_length == len(prompt) + 3
        answer = await collect(core, asked(prompt, ignore_eos=True, max_new_tokens=100))
    assert len(answer.ids) == 3
    assert answer.last.finish_reason == "length"


async def test_core_abort_returns_the_tokens_so_far(tiny: str) -> None:
    prompt = prompts(1, seed=12)[0]
    sampling = {"max_new_tokens": 1500, "ignore_eos": True}
    request = asked(prompt, **sampling)
    async with opened(tiny) as core:
        ids, chunks = [], []
        async for chunk in core.generate(request):
            ids += unpack_ids(chunk.ids)
            chunks.append(chunk)
            if len(chunks) == 5:
                core.abort_nowait(request.request_id)
        whole = await collect(core, asked(prompt, **{**sampling, "max_new_tokens": len(ids) + 1}))
        assert core.load().running == 0
    assert chunks[-1].finish_reason == "abort"
    assert 5 <= len(ids) < 1500
    assert whole.ids[: len(ids)] == ids


async def test_core_abort_of_a_waiting_request_ends_it_without_tokens(
    tiny: str, gate: Gate
) -> None:
    running, waiting = asked([5, 6]), asked([7, 8])
    async with opened(tiny, max_running=1) as core, anyio.create_task_group() as tasks:
        answers: dict[str, Answer] = {}

        async def keep(request: GenerationRequest) -> None:
            answers[request.request_id] = await collect(core, request)

        for request in (running, waiting):
            tasks.start_soon(keep, request)
            await anyio.wait_all_tasks_blocked()
        assert (core.load().running + core.load().queued) == 2
        core.abort_nowait(waiting.request_id)
        gate.open()
    aborted = answers[waiting.request_id]
    assert (aborted.last.finish_reason, aborted.ids) == ("abort", [])
    assert len(answers[running.request_id].ids) == 8


async def test_core_iterator_closed_early_frees_its_place(tiny: str) -> None:
    async with opened(tiny, max_running=1) as core:
        chunks = core.generate(asked([9, 8, 7], max_new_tokens=1500, ignore_eos=True))
        async for _ in chunks:
            break
        await chunks.aclose()
        answer = await collect(core, asked([3, 4], max_new_tokens=3, ignore_eos=True))
        assert core.load().queued == 0
    assert answer.last.finish_reason == "length"


async def test_core_full_queue_is_rejected_with_its_size(tiny: str, gate: Gate) -> None:
    async with (
        opened(tiny, max_running=2, max_queued=3) as core,
        anyio.create_task_group() as tasks,
    ):
        for i in range(5):
            tasks.start_soon(collect, core, asked([5 + i, 6]))
        await anyio.wait_all_tasks_blocked()
        refused = await collect(core, asked([5, 6]))
        assert core.info.max_requests == 5
        gate.open()
    assert refused.last.finish_reason == "rejected"
    assert refused.last.error == "engine queue is full: 3 waiting, limit 3"


async def test_core_larger_priority_runs_first(tiny: str, gate: Gate) -> None:
    order: list[int] = []

    async def one(core: TransformersCore, priority: int) -> None:
        await collect(core, asked([7, priority + 3], priority=priority))
        order.append(priority)

    async with opened(tiny, max_running=1) as core, anyio.create_task_group() as tasks:
        tasks.start_soon(one, core, 0)
        await gate.reached()
        for priority in (1, 2, 2, 1):
            tasks.start_soon(one, core, priority)
        await anyio.wait_all_tasks_blocked()
        gate.open()
    assert order == [0, 2, 2, 1, 1]


#: What cannot be asked for, and what is said of it.
UNUSABLE: list[tuple[list[int], dict[str, Any], str]] = [
    ([], {}, "the prompt has no tokens"),
    ([5, 600], {}, "token id 600 at position 1 is outside the engine's vocabulary of 600 ids"),
    (
        [5] * 64,
        {},
        "the prompt has 64 tokens; expected at most 63, since it and a new token must fit into a "
        "context of 64",
    ),
    ([5], {"max_new_tokens": 0}, "max_new_tokens = 0; expected at least 1"),
    ([5], {"temperature": -0.5}, "temperature = -0.5; expected a finite number of at least 0"),
    ([5], {"top_p": 0.0}, "top_p = 0.0; expected a number in (0, 1]"),
    ([5], {"top_k": 0}, "top_k = 0; expected -1 or at least 1"),
    ([5], {"min_p": 1.5}, "min_p = 1.5; expected a number in [0, 1]"),
    (
        [5],
        {"repetition_penalty": 0.0},
        "repetition_penalty = 0.0; expected a finite number above 0",
    ),
    ([5], {"stop_token_ids": (600,)}, "stop_token_ids = (600,); expected ids in [0, 600)"),
]


async def test_core_unusable_request_is_an_error_that_says_why(tiny: str) -> None:
    async with opened(tiny, context_length=64) as core:
        for prompt, sampling, said in UNUSABLE:
            last = (await collect(core, asked(prompt, **sampling))).last
            error = f"sampling.{said}" if sampling else said
            assert (last.finish_reason, last.error) == ("error", error)


async def test_core_failing_step_ends_every_request_and_later_ones(
    tiny: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original, draws = sampling_module.sample, []

    def breaks(*args: Any) -> Any:
        draws.append(1)
        if len(draws) > 3:
            raise ValueError("out of luck")
        return original(*args)

    monkeypatch.setattr(sampling_module, "sample", breaks)
    async with opened(tiny, max_running=2) as core:
        requests = [asked([5 + i, 6], ignore_eos=True) for i in range(4)]
        answers = await collect_all(core, requests)
        later = await collect(core, asked([5]))
        assert core.load().running == core.load().queued == 0
    text = "the engine stopped: ValueError: out of luck"
    assert [answer.last.finish_reason for answer in answers] == ["error"] * 4
    assert {answer.last.error for answer in [*answers, later]} == {text}
    assert sum(len(answer.ids) for answer in answers) in {3, 4, 5, 6}
    assert "the embedded engine stopped" in caplog.text


async def test_core_logits_that_are_not_finite_end_their_request_only(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = sampling_module.sample

    def spoilt(logits: torch.Tensor, rows: Any) -> Any:
        for index, row in enumerate(rows):
            if row.length == 4 and row.ids[0] == 9:
                logits[index] = torch.nan
        return original(logits, rows)

    monkeypatch.setattr(sampling_module, "sample", spoilt)
    async with opened(tiny) as core:
        bad, good = await collect_all(core, [asked([9, 8, 7]), asked([8, 8, 7])])
    assert bad.last.error == "the model's logits at position 3 are not finite"
    assert (bad.last.finish_reason, len(bad.ids)) == ("error", 1)
    assert good.last.finish_reason == "length"


async def test_core_close_ends_running_requests_with_their_tokens(tiny: str) -> None:
    async with opened(tiny) as core, anyio.create_task_group() as tasks:
        seen = anyio.Event()
        chunks: list[Chunk] = []

        async def watch() -> None:
            request = asked([5, 6], max_new_tokens=1500, ignore_eos=True)
            async for chunk in core.generate(request):
                chunks.append(chunk)
                seen.set()

        tasks.start_soon(watch)
        await seen.wait()
        await core.aclose()
    assert chunks[-1].finish_reason == "abort"
    assert [chunk.offset for chunk in chunks] == list(range(len(chunks)))
    answer = await collect(core, asked([5]))
    assert (answer.last.finish_reason, answer.last.error) == ("error", "the engine is closed")


async def test_core_close_does_not_wait_for_a_step_without_end(
    tiny: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_module, "CORE_CLOSE_S", 0.1)
    answers: list[Answer] = []

    async def one(core: TransformersCore) -> None:
        answers.append(await collect(core, asked([5, 6])))

    async with opened(tiny) as core, anyio.create_task_group() as tasks:
        tasks.start_soon(one, core)
        await gate.reached()
        with anyio.fail_after(4):
            await core.aclose()
    gate.open()
    assert answers[0].last.finish_reason == "abort"


@pytest.mark.slow
def test_process_that_ends_without_closing_its_core_ends_cleanly(tiny: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVING, tiny],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "leaving\n", "")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "/no/such/model"}, "model.path = '/no/such/model': no such directory"),
        ({"dtype": "int3"}, "^engine.dtype = 'int3'; expected auto, bfloat16, float16, float32"),
        ({"device": "warp"}, "cannot be loaded"),
    ],
)
async def test_core_that_cannot_load_says_why(
    tiny: str, options: dict[str, Any], error: str
) -> None:
    core = TransformersCore(**{"model": tiny, **options})
    with pytest.raises(EngineError, match=error):
        await core.start()
    await core.aclose()


def test_replicas_of_a_machine_take_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout.engine.cores.transformers.model import choose_device  # imports for a second

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = RolloutConfig(engine=TransformersEngine(device="cuda", replicas=3))
    gpus = [build_core_spec(config, replica).options["gpu"] for replica in range(3)]
    assert [choose_device("cuda", gpu) for gpu in gpus] == ["cuda:0", "cuda:1", "cuda:0"]
    assert choose_device("auto", 1) == "cuda:1"
    assert [choose_device(name, 1) for name in ("cuda:0", "cpu")] == ["cuda:0", "cpu"]
    on_ray = RolloutConfig(engine=TransformersEngine(device="cuda"), placement=RayPlacement())
    assert build_core_spec(on_ray, 1).options["gpu"] == 0  # each sees its own


async def test_core_top_log_probs_lead_with_the_greedy_token(tiny: str) -> None:
    async with opened(tiny) as core:
        texts = prompts(3)
        counts = (4, 0, 1)
        asking = [asked(text, top_log_probs=k) for text, k in zip(texts, counts, strict=True)]
        answers = await collect_all(core, asking)
        too_many = await collect(core, asked([5], top_log_probs=VOCABULARY + 1))
    for answer, count in zip(answers, counts, strict=True):
        ids = np.frombuffer(b"".join(chunk.top_ids for chunk in answer.chunks), "<i4")
        values = np.frombuffer(b"".join(chunk.top_log_probs for chunk in answer.chunks), "<f4")
        if count:
            assert ids.reshape(-1, count)[:, 0].tolist() == answer.ids
            np.testing.assert_allclose(values.reshape(-1, count)[:, 0], answer.log_probs, atol=1e-6)
            assert (np.diff(values.reshape(-1, count)) <= 0).all()
        else:
            assert not len(ids)
            assert not len(values)
    last = too_many.chunks[-1]
    assert last.error == (
        f"sampling.top_log_probs = {VOCABULARY + 1}; expected at most {VOCABULARY}"
    )
