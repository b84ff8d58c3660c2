"""verl's padding of full rows, in its own environment; each line on standard input is a round.

python -m peer_verl.padding '{"directory": …, "rows": 1024, "prompt": 1024, "response": 4096}'
"""

from __future__ import annotations

import peer_verl.quiet  # isort: skip  # noqa: F401
import asyncio  # noqa: TID251  (verl runs on it)
import gc
import json
import sys
from typing import Any

from driver_cases.full_rows import ids_of_row, spans, tensors_digest
from driver_cases.measuring import Clocks
from driver_cases.side_process import answers_on_stdout
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from peer_verl.agent_loops import make_config, make_worker


def output(row: int, prompt: int, response: int) -> AgentLoopOutput:
    """What its agent loop hands over for a row."""
    mask, log_probs = [], []
    for is_sampled, start, stop in spans(response):
        mask += [int(is_sampled)] * (stop - start)
        log_probs += [-0.5 if is_sampled else 0.0] * (stop - start)
    return AgentLoopOutput(
        prompt_ids=ids_of_row(row, prompt),
        response_ids=ids_of_row(row + 1, response),
        response_mask=mask,
        response_logprobs=log_probs,
        num_turns=2,
        metrics=AgentLoopMetrics(generate_sequences=1.0, tool_calls=0.1),
        extra_fields={"turn_scores": [], "tool_rewards": []},
    )


async def padded(worker: Any, outputs: list[AgentLoopOutput]) -> Any:
    """Each padded by itself, as it ends, then all of them together."""
    prompt = [{"role": "user", "content": ""}]
    each = [await worker._agent_loop_postprocess(one, False, raw_prompt=prompt) for one in outputs]
    return worker._postprocess(each)


def main() -> None:
    """A round for each line."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    prompt, response = options["prompt"], options["response"]
    tokenizer = AutoTokenizer.from_pretrained(options["directory"])
    worker = make_worker(make_config(prompt, response), tokenizer, None, [])
    with answers_on_stdout() as answer:
        answer({})
        while sys.stdin.readline():
            outputs = [output(row, prompt, response) for row in range(options["rows"])]
            gc.collect()
            clocks = Clocks()
            batch = asyncio.run(padded(worker, outputs)).batch
            answer({**clocks.per(), "digest": tensors_digest(batch)})
            del batch, outputs


if __name__ == "__main__":
    main()
