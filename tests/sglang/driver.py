"""What the driver's tests share: an engine as users configure it, and questions to it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import numpy as np
import psutil
import pytest
import torch
import transformers
from models import SIZES

from rollout import AgentLoop, register_agent
from rollout.agents import AgentContext
from rollout.config import (
    AgentConfig,
    LengthsConfig,
    LocalProcessPlacement,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    SchedulingConfig,
    SGLangEngine,
)
from rollout.engine import SamplingParams
from rollout.engine.core import pack_ids
from rollout.engine.pool.generation import Generation
from rollout.testing import simulated_tokenizer
from rollout.tools import function_tool
from rollout.types import Message, Prompt, ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.engine.pool.pool import EnginePool

#: Made by `make sglang-cpu`; the variable names another one.
PYTHON = os.environ.get(
    "ROLLOUT_SGLANG_PYTHON", str(Path(__file__).parents[2] / ".venv-sglang/bin/python")
)
EMBEDDED = "embedded:smollm2-135m-instruct"
#: Its tasks, processes and sockets come and go with it; `conftest` looks at the end what is left.
shares_an_engine = pytest.mark.rollout(allow_leaks=("threads", "processes", "files", "tasks"))
#: Ids that are no special tokens of the simulated tokenizer's.
WORDS = 256
TURNS = 3
#: A first turn is long: a driver that is late still finds it under way.
FIRST_TOKENS, LATER_TOKENS = 320, 24


def save_speaking_model(
    directory: Path,
    seed: int,
    config: Callable[..., Any] = transformers.LlamaConfig,
    **more: Any,
) -> str:
    """Random weights with the byte-level tokenizer, so that agents can talk to it."""
    tokenizer = simulated_tokenizer()
    facts = {
        **SIZES,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 2048,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **more,
    }
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config(**facts))
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] = 0  # no greedy turn ends before its length
    model.float().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def sglang(model: str, placement: Any = None, **engine: Any) -> RolloutConfig:
    """A small SGLang, and agents that take three greedy turns."""
    options = {
        "device": "cpu",
        "dtype": "float32",
        "max_running": 128,
        "max_queued": 2000,
        "stream_interval": 4,
        "start_timeout_s": 300.0,
    }
    return RolloutConfig(
        model=ModelConfig(path=model),
        engine=SGLangEngine(**options | engine),
        placement=placement or LocalProcessPlacement(python=PYTHON),
        agent=AgentConfig(name="three_turns"),
        sampling=SamplingConfig(temperature=0.0),
        lengths=LengthsConfig(prompt=1024, response=900),
        scheduling=SchedulingConfig(samples_per_prompt=1, max_in_flight=64),
    )


def load_networks(models: Sequence[str]) -> list[Any]:
    """The same weights in transformers, which computes everything afresh."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    return [load(path, dtype=torch.float32).eval() for path in models]


def choices(network: Any, ids: list[int], cache: Any = None) -> list[int]:
    """What it would greedily say after each of `ids`."""
    with torch.inference_mode():
        logits = network(torch.tensor([ids]), past_key_values=cache).logits
    return logits[0].argmax(-1).tolist()


def is_greedy(network: Any, ids: list[int], start: int, end: int, cache: Any = None) -> bool:
    """Whether it would say `ids[start:end]`; of two that are as good as equal, either.

    Args:
        cache: Keys and values of the tokens before `start - 1`; None computes them.
    """
    known = start - 1 if cache is not None else 0
    with torch.inference_mode():
        logits = network(torch.tensor([ids[known:end]]), past_key_values=cache).logits[0]
    logits = logits[start - 1 - known : end - 1 - known]
    said = logits.gather(1, torch.tensor(ids[start:end]).unsqueeze(1))[:, 0]
    return bool((logits.amax(1) - said < 1e-3).all())


@function_tool
async def clock(city: str) -> str:
    """What time it is.

    Args:
        city: Where.
    """
    await anyio.sleep(0.01)
    return f"Noon in {city}."


@register_agent("three_turns")
class ThreeTurns(AgentLoop):
    """Calls the tool after every turn but the last, whatever the model says."""

    async def run(self, context: AgentContext) -> None:
        for turn in range(TURNS):
            tokens = LATER_TOKENS if turn else FIRST_TOKENS
            context.sampling = msgspec.structs.replace(context.sampling, max_new_tokens=tokens)
            await context.generate()
            if turn < TURNS - 1:
                await context.call_tools([ToolCall(name="clock", arguments={"city": "Oslo"})])


def questions(count: int, about: str = "") -> list[Prompt]:
    texts = [f"{about} {n} {n * n}" for n in range(count)]
    return [Prompt(messages=[Message(role="user", content=text)]) for text in texts]


def prompts(count: int, length: int = 24) -> list[list[int]]:
    return np.random.default_rng(3).integers(3, WORDS, (count, length)).tolist()


async def ask(
    pool: EnginePool, prompt: Sequence[int], generation: Generation, **sampling: Any
) -> Generation:
    """Greedy, 32 tokens."""
    await pool.generate(
        generation.ask(
            session_id=str(id(generation)),
            prompt_ids=pack_ids(list(prompt)),
            sampling=SamplingParams(**{"max_new_tokens": 32, "temperature": 0.0, **sampling}),
        )
    )
    return generation


async def ask_all(
    pool: EnginePool, texts: Sequence[Sequence[int]], **sampling: Any
) -> list[Generation]:
    """At once."""
    generations = [Generation() for _ in texts]
    async with anyio.create_task_group() as tasks:
        for text, generation in zip(texts, generations, strict=True):
            tasks.start_soon(partial(ask, pool, text, generation, **sampling))
    return generations


def processes() -> list[psutil.Process]:
    """Of ours that run an engine, SGLang's own included."""
    return psutil.Process().children(recursive=True)


def is_alive(process: psutil.Process) -> bool:
    """A zombie has ended."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def command(process: psutil.Process) -> str:
    """Empty for a process that has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def schedulers() -> list[psutil.Process]:
    return [process for process in processes() if "sglang::scheduler" in command(process)]


async def check_pair(pool: EnginePool) -> None:
    """What every engine does wherever it lives: see tests/test_engine_pairs.py."""
    texts = [[5, 6, 7, 60 + number] for number in range(6)]
    first, second = [await ask_all(pool, texts, max_new_tokens=8, ignore_eos=True) for _ in "ab"]
    assert [g.ids for g in first] == [g.ids for g in second]
    assert {(len(g.ids), len(g.log_probs), g.finish_reason) for g in first} == {(8, 8, "length")}
    await cancelled_is_gone(pool)


async def cancelled_is_gone(pool: EnginePool) -> None:
    """A cancelled generation ends with the engine's word, long before its last token."""
    before = sum(replica.tokens.arrived for replica in pool.statistics())
    cut = Generation()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(ask, pool, [5, 6], cut, max_new_tokens=1000, ignore_eos=True))
        while not cut.ids:
            await anyio.sleep(0.005)
        tasks.cancel_scope.cancel()
    while any(replica.in_flight for replica in pool.statistics()):
        await anyio.sleep(0.01)
    assert sum(replica.tokens.arrived for replica in pool.statistics()) - before < 1000
