"""Generated tokens per CPU second: our embedded core against transformers' own ways to generate.

The work is that of agents: 32 requests of 3 turns, prompts of 256 tokens, answers of geometric
length (mean 64, at most 256, end tokens ignored), and 32 tokens of tool output before each further
turn. A turn's prompt is everything before it. Every contender gets the same prompts and lengths,
samples at temperature 1 in bfloat16 on one thread, and counts only the tokens asked for:

    ours        the core through its public interface, `max_running=32`
    static      `generate` on padded batches in the order given, until the longest row is done
    continuous  transformers' continuous batching, with its prefix cache

A peer's batch is the best of 8, 16 and 32 in a pilot: the first turn of all requests with answers
a quarter as long. Two lanes run side by side, so that every contender has a neighbour: ours, a
peer's pilot, the peer, and in the shorter lane ours again. Ours counts with the median of its
three runs, a peer with its whole run. Progress goes to stderr; the last line of stdout is the
result as JSON. It takes 7 to 9 minutes on two cores; with `--quick` about two, with two turns and
answers a quarter as long, which says little about the ratio. A CPU without instructions for
bfloat16 takes many times as long.

    python benchmarks/embedded.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time  # noqa: TID251  (what is measured here is CPU time)
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from rollout.engine.core import GenerationRequest, SamplingParams, pack_ids, unpack_ids
from rollout.engine.cores.transformers import TransformersCore
from rollout.engine.model_files import resolve_model

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = 7
REQUESTS, TURNS = 32, 3
PROMPT, TOOL_TEXT = 256, 32
MEAN, CAP = 64, 256
BATCHES = (8, 16, 32)
PILOT_SHARE = 4
MODEL = "embedded:smollm2-135m-instruct"
#: Ids of ordinary text in the model's vocabulary.
FIRST_ID, LAST_ID = 1000, 40000
#: Of the continuous batching: the fastest of the settings tried (pages of 32 or 256 tokens, steps
#: of 256 or 512 tokens), with room for all requests at their longest.
PAGE, STEP_TOKENS, PAGES = 32, 256, 1280

Ids = list[int]


class Workload:
    """The prompts, lengths and tool texts that every contender gets."""

    def __init__(self, turns: int = TURNS, share: int = 1) -> None:
        rng = np.random.default_rng(SEED)
        lengths = rng.geometric(1 / MEAN, (REQUESTS, TURNS)).clip(max=CAP)
        self.lengths = -(-lengths[:, :turns] // share)
        self.prompts = rng.integers(FIRST_ID, LAST_ID, (REQUESTS, PROMPT)).tolist()
        self.tool_texts = rng.integers(FIRST_ID, LAST_ID, (REQUESTS, TURNS, TOOL_TEXT)).tolist()
        self.turns = turns
        self.tokens = int(self.lengths.sum())

    def length(self, request: int, turn: int) -> int:
        """Tokens of one answer."""
        return int(self.lengths[request, turn])

    def next_prompt(self, request: int, turn: int, history: Ids, answer: Ids) -> Ids:
        """The prompt of the turn after `turn`, whose answer must have the length asked for."""
        if len(answer) != self.length(request, turn):
            raise RuntimeError(f"expected {self.length(request, turn)} ids, got {len(answer)}")
        return history + answer + self.tool_texts[request][turn]


class Stopwatch:
    """CPU seconds of this process, all its threads counted, and a line about them on stderr."""

    def __init__(self, name: str, work: Workload) -> None:
        self._name, self._work = name, work
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def stop(self) -> float:
        """Generated tokens per CPU second since the start."""
        seconds = time.process_time() - self._cpu
        rate = self._work.tokens / seconds
        wall = time.perf_counter() - self._wall
        text = f"{rate:6.1f} tokens per CPU second ({seconds:.0f} s of CPU, {wall:.0f} s of wall)"
        print(f"{self._name:>20}: {text}", file=sys.stderr, flush=True)
        return rate


async def run_ours(work: Workload, model: str) -> float:
    """All requests at once; each continues as soon as its turn is over. Loading is not counted."""
    core = TransformersCore(model=model, dtype="bfloat16", threads=1, max_running=32)

    async def converse(index: int) -> None:
        prompt = work.prompts[index]
        for turn in range(work.turns):
            request = GenerationRequest(
                request_id=f"{index:08d}{turn:08d}",
                session_id=f"{index:08d}",
                prompt_ids=pack_ids(prompt),
                sampling=SamplingParams(
                    max_new_tokens=work.length(index, turn), ignore_eos=True, seed=index
                ),
            )
            answer: Ids = []
            async for chunk in core.generate(request):
                answer.extend(unpack_ids(chunk.ids))
            prompt = work.next_prompt(index, turn, prompt, answer)

    await core.start()
    try:
        watch = Stopwatch("ours", work)
        async with anyio.create_task_group() as tasks:
            for index in range(REQUESTS):
                tasks.start_soon(converse, index)
        return watch.stop()
    finally:
        await core.aclose()


def plain_sampling(max_new_tokens: int) -> GenerationConfig:
    """Temperature 1 over the whole vocabulary, with end tokens ignored."""
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=-1,
        pad_token_id=0,
    )


def run_static(model: Any, work: Workload, batch: int) -> None:
    """`generate` on one padded batch after another, each turn by turn."""
    for first in range(0, REQUESTS, batch):
        members = range(first, first + batch)
        prompts = [work.prompts[index] for index in members]
        for turn in range(work.turns):
            width = max(map(len, prompts))
            ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
            mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
            lengths = [work.length(index, turn) for index in members]
            out = model.generate(
                torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                generation_config=plain_sampling(max(lengths)),
            )
            answers = [row[:n] for row, n in zip(out[:, width:].tolist(), lengths, strict=True)]
            prompts = [
                work.next_prompt(index, turn, prompt, answer)
                for index, prompt, answer in zip(members, prompts, answers, strict=True)
            ]


def run_continuous(model: Any, work: Workload, batch: int) -> None:
    """All requests at once, `batch` of them together; each continues when its turn is over."""
    config = ContinuousBatchingConfig(
        max_requests_per_batch=batch,
        page_size=PAGE,
        num_blocks=PAGES,
        max_batch_tokens=STEP_TOKENS,
    )
    prompts = list(work.prompts)
    with model.continuous_batching_context_manager(
        generation_config=plain_sampling(CAP), continuous_batching_config=config
    ) as manager:

        def submit(index: int, turn: int) -> None:
            length = work.length(index, turn)
            name = f"{index}-{turn}"
            manager.add_request(prompts[index], name, max_new_tokens=length, eos_token_id=-1)

        for index in range(REQUESTS):
            submit(index, 0)
        for _ in range(REQUESTS * work.turns):
            result = manager.get_result()
            index, turn = map(int, result.request_id.split("-"))
            answer = list(result.generated_tokens)
            prompts[index] = work.next_prompt(index, turn, prompts[index], answer)
            if turn + 1 < work.turns:
                submit(index, turn + 1)


PEERS: dict[str, Callable[[Any, Workload, int], None]] = {
    "static": run_static,
    "continuous": run_continuous,
}


def whole(*, is_quick: bool) -> Workload:
    """What counts."""
    return Workload(turns=2, share=PILOT_SHARE) if is_quick else Workload()


def run_peer(name: str, model: str, work: Workload) -> dict[str, Any]:
    """The peer's pilot with every batch, then its whole run with the best one."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    pilot = Workload(turns=1, share=PILOT_SHARE)
    pilots = {}
    for batch in BATCHES:
        watch = Stopwatch(f"{name} pilot of {batch}", pilot)
        PEERS[name](loaded, pilot, batch)
        pilots[batch] = round(watch.stop(), 1)
    best = max(pilots, key=pilots.__getitem__)
    watch = Stopwatch(f"{name} of {best}", work)
    PEERS[name](loaded, work, best)
    return {"rate": watch.stop(), "batch": best, "pilots": pilots}


def run_lane(name: str, *, is_quick: bool) -> None:
    """One lane, in a process of its own: ours, the peer, ours if there is time; prints JSON."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = resolve_model(MODEL)
    ours = [anyio.run(run_ours, whole(is_quick=is_quick), model)]
    peer = run_peer(name, model, whole(is_quick=is_quick))
    if name == "continuous":
        ours.append(anyio.run(run_ours, whole(is_quick=is_quick), model))
    print(json.dumps({"ours": ours, "peer": peer}))


def main() -> None:
    """Run both lanes, or as a lane, and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two minutes: shorter answers")
    parser.add_argument("--lane", choices=tuple(PEERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.lane:
        run_lane(options.lane, is_quick=options.quick)
    else:
        run_lanes(is_quick=options.quick)


def run_lanes(*, is_quick: bool) -> None:
    """Both lanes side by side, in processes of their own."""
    resolve_model(MODEL)
    quick = ["--quick"] if is_quick else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    lanes = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--lane", name, *quick],
            stdout=subprocess.PIPE,
            env=environment,
        )
        for name in PEERS
    }
    answers = {name: lane.communicate()[0] for name, lane in lanes.items()}
    failed = [name for name, lane in lanes.items() if lane.returncode]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
    results = {name: json.loads(answer) for name, answer in answers.items()}
    rates = {name: result["peer"]["rate"] for name, result in results.items()}
    runs = [rate for result in results.values() for rate in result["ours"]]
    ours = statistics.median(runs)
    summary = {
        "ours": round(ours, 1),
        **{name: round(rate, 1) for name, rate in rates.items()},
        "ratio_best": round(ours / max(rates.values()), 2),
        "unit": "generated tokens per CPU second",
        "runs_of_ours": [round(rate, 1) for rate in runs],
        "batches": {name: result["peer"]["batch"] for name, result in results.items()},
        "pilots": {name: result["peer"]["pilots"] for name, result in results.items()},
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
