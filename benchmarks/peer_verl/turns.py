"""Rounds of the driver's benchmark through verl, in its own environment.

    python -m peer_verl.turns '{"directory": …, "n": 256, "scope": "loop", "barrier": "rounds"}'

A line on standard input is a round; its figures come back as a line of JSON. Scope "loop" is the
agent loops alone, "worker" the worker with them, which also makes the padded tensors.
"""

from __future__ import annotations

import peer_verl.quiet  # isort: skip  # noqa: F401
import asyncio  # noqa: TID251  (verl runs on it)
import gc
import hashlib
import json
import sys
from typing import Any

import numpy as np
from driver_cases.measuring import Clocks, Ticker
from driver_cases.side_process import answers_on_stdout
from driver_cases.workload import PROMPT_TOKENS, RESPONSE_TOKENS, TURNS, Answers, questions
from transformers import AutoTokenizer

from peer_verl.agent_loops import (
    HeldAnswers,
    batch_of,
    make_config,
    make_tools,
    make_worker,
    run_loops,
)


class VerlSide:
    """Runs rounds, one after the other."""

    def __init__(self, directory: str, n: int, scope: str, barrier: str = "rounds") -> None:
        self._config = make_config(PROMPT_TOKENS, RESPONSE_TOKENS)
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._answers, self._tools = Answers(directory), make_tools()
        self._questions, self._scope, self._barrier = questions(n), scope, barrier

    async def round(self) -> dict[str, Any]:
        """One round: what it cost a generation, and what came out."""
        gc.collect()
        client = HeldAnswers(self._answers, len(self._questions), self._barrier)
        ticker = Ticker(asyncio.sleep)
        ticking = asyncio.create_task(ticker.run())
        await asyncio.sleep(0.05)
        run = {"loop": self._loops, "worker": self._worker}[self._scope]
        clocks = Clocks()
        ticker.begin()
        out = await run(client)
        figures = clocks.per(len(self._questions) * (TURNS + 1))
        stall_ms = ticker.longest_ms()
        ticking.cancel()
        rows = rows_of_batch(out) if self._scope == "worker" else rows_of_outputs(out)
        return {**figures, "stall_ms": stall_ms, **contents(rows)}

    async def _loops(self, client: HeldAnswers) -> Any:
        return await run_loops(self._config, self._tokenizer, client, self._tools, self._questions)

    async def _worker(self, client: HeldAnswers) -> Any:
        worker = make_worker(self._config, self._tokenizer, client, self._tools)
        return await worker.generate_sequences(batch_of(self._questions))


def rows_of_outputs(outputs: list[Any]) -> list[tuple[Any, Any]]:
    """Ids and mask of each trajectory."""
    return [
        (
            [*each.prompt_ids, *each.response_ids],
            [*([0] * len(each.prompt_ids)), *each.response_mask],
        )
        for each in outputs
    ]


def rows_of_batch(batch: Any) -> list[tuple[Any, Any]]:
    """The same of its tensors, without the padding."""
    tensors = {key: batch.batch[key].numpy() for key in ("input_ids", "attention_mask")}
    mask = np.pad(batch.batch["response_mask"].numpy(), ((0, 0), (PROMPT_TOKENS, 0)))
    rows = zip(tensors["input_ids"], tensors["attention_mask"].astype(bool), mask, strict=True)
    return [(ids[there], trained[there]) for ids, there, trained in rows]


def contents(rows: list[tuple[Any, Any]]) -> dict[str, Any]:
    """See `ours.contents`."""
    digest, tokens, sampled = hashlib.sha256(), 0, 0
    for ids, mask in rows:
        digest.update(np.asarray(ids, dtype="<i4").tobytes())
        digest.update(np.asarray(mask, dtype="u1").tobytes())
        tokens += len(ids)
        sampled += int(np.sum(mask))
    return {"tokens": tokens, "sampled": sampled, "digest": digest.hexdigest()[:16]}


async def main() -> None:
    """A round for each line."""
    side = VerlSide(**json.loads(sys.argv[1]))
    with answers_on_stdout() as answer:
        answer({})
        while await asyncio.to_thread(sys.stdin.readline):
            answer(await side.round())


if __name__ == "__main__":
    asyncio.run(main())
