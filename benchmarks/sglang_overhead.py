"""What the library costs: tokens per second through all of it ÷ straight from `sglang.Engine`.

64 tool-using trajectories run through `open_rollout` on a real SGLang: agent, template, parser,
tool, router, channel, tensors. Their requests are then replayed on an `sglang.Engine` in a process
of its own: the same prompts and numbers of tokens, the next turn after the same tool delay, all
trajectories at once. Both engines have the same arguments and answer greedily, so that both say the
same and their prefix caches hit alike. Rounds of either take turns.

    slow    the embedded model solves sums with a calculator
    fast    a random model of two layers, four turns of 16 to 64 tokens; a tool call after each

It finds SGLang in the environment that `make sglang-cpu` made, and a GPU if that environment has
one. Progress goes to stderr; the last line of stdout is the result as JSON.

    python benchmarks/sglang_overhead.py [--device cuda] [--model PATH] [--python PYTHON]
                                         [--work fast] [--rounds 40] [--quick]
"""

from __future__ import annotations

import argparse
import json
import random  # noqa: TID251  (lengths of turns; no seed of the library's)
import statistics
import subprocess
import sys
import tempfile
import time  # noqa: TID251  (what is measured here)
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import attrs
import msgspec
import torch
import transformers

import rollout
from rollout.agents import AgentContext, AgentLoop, register_agent
from rollout.cli.demo import arithmetic_tasks
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
from rollout.engine.model_files import resolve_model
from rollout.engine.pool.opening import build_core_spec
from rollout.testing import simulated_tokenizer
from rollout.tools import function_tool
from rollout.tools.builtin import calculate, format_number
from rollout.types import Message, Prompt, ToolCall

if TYPE_CHECKING:
    from rollout.chat.trajectory import Trajectory

TRAJECTORIES = 64
TURNS, TURN_TOKENS = 4, (16, 64)
TOOL_S = 0.05
ROUNDS = {"slow": 2, "fast": 20}
#: Trajectories of the round before, which does not count.
WARM_UP = 4
EMBEDDED = "embedded:smollm2-135m-instruct"
#: Without the tools' signatures: SGLang's attention on a CPU is slow on long contexts.
SHORT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PYTHON = Path(__file__).parents[1] / ".venv-sglang/bin/python"

Plan = list[list[tuple[list[int], int, float]]]


@function_tool
async def calculator(expression: str) -> str:
    """Calculate an arithmetic expression.

    Args:
        expression: E.g. ``2 * (3 + 4)``.
    """
    await anyio.sleep(TOOL_S)
    return format_number(calculate(expression))


@register_agent("fixed_calls")
class FixedCalls(AgentLoop):
    """Calls the tool after every turn but the last, whatever the model says.

    The prompt's ``extra`` names the tokens of each turn.
    """

    async def run(self, context: AgentContext) -> None:
        """The turns."""
        for turn, tokens in enumerate(context.prompt.extra["turns"], start=1):
            context.sampling = msgspec.structs.replace(context.sampling, max_new_tokens=tokens)
            await context.generate()
            if turn < TURNS:
                call = ToolCall(name="calculator", arguments={"expression": f"{turn} + 1"})
                await context.call_tools([call])


@attrs.frozen
class Work:
    """One of the two kinds of work.

    Attributes:
        prompts: Of a round; each round has its own.
    """

    name: str
    config: RolloutConfig
    prompts: Callable[[int], Sequence[Prompt]]


@attrs.frozen
class Round:
    """What one round took: through the library, and straight.

    Attributes:
        driver_cpu_s: Of this process, its engine not counted.
    """

    tokens: int
    turns: int
    seconds: float
    driver_cpu_s: float
    straight_seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second through the library."""
        return self.tokens / self.seconds

    @property
    def straight_rate(self) -> float:
        """Tokens per second of the engine by itself, afterwards."""
        return self.tokens / self.straight_seconds


class Straight:
    """`straight_sglang.py` in a process of its own."""

    def __init__(self, python: str, config: RolloutConfig) -> None:
        options = dict(build_core_spec(config, 0).options)
        options["model"] = resolve_model(config.model.path, config.model.revision)
        program = Path(__file__).with_name("straight_sglang.py")
        self._process = subprocess.Popen(
            [python, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ask(options)

    def ask(self, line: Any) -> dict[str, Any]:
        """Its answer to a line; blocks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("straight_sglang.py ended without an answer")
        said: dict[str, Any] = json.loads(answer)
        return said

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def plan_of(trajectories: Sequence[Trajectory]) -> Plan:
    """The requests of trajectories; a tool's delay lies between two of them."""
    plan: Plan = []
    for trajectory in trajectories:
        transcript = trajectory.transcript
        ids = transcript.ids().tolist()
        spans = list(transcript.generated_spans())
        turns = [(ids[: span.start], len(span), TOOL_S) for span in spans]
        turns[-1] = (*turns[-1][:2], 0.0)
        plan.append(turns)
    return plan


async def run_work(work: Work, python: str, count: int) -> list[Round]:
    """So many rounds through the library and straight, in turns, after one that does not count."""
    finished: list[Trajectory] = []

    async def keep(trajectory: Trajectory) -> float:
        finished.append(trajectory)
        return 0.0

    straight = await anyio.to_thread.run_sync(Straight, python, work.config)
    rounds = []
    try:
        async with rollout.open_rollout(work.config, [calculator], keep) as runtime:
            for index in range(count + 1):
                finished.clear()
                prompts = work.prompts(index)[: None if index else WARM_UP]
                cpu, begun = time.process_time(), time.perf_counter()
                await runtime.generate(prompts)
                seconds = time.perf_counter() - begun
                cpu = time.process_time() - cpu
                plan = plan_of(finished)
                again = await anyio.to_thread.run_sync(straight.ask, plan)
                if len(plan) != len(prompts):
                    raise SystemExit(f"{len(plan)} of {len(prompts)} trajectories ended")
                rounds.append(measured(plan, seconds, cpu, again))
                report(work.name, rounds[-1])
    finally:
        straight.close()
    return rounds[1:]


def measured(plan: Plan, seconds: float, cpu: float, again: dict[str, Any]) -> Round:
    """One round; both sides must have generated the same number of tokens."""
    tokens = sum(count for turns in plan for _, count, _ in turns)
    if again["tokens"] != tokens:
        raise SystemExit(f"{tokens} tokens, replayed {again}")
    return Round(
        tokens=tokens,
        turns=sum(map(len, plan)),
        seconds=seconds,
        driver_cpu_s=cpu,
        straight_seconds=again["seconds"],
    )


def report(name: str, done: Round) -> None:
    """A line of progress."""
    print(
        f"{name}: {done.tokens} tokens in {done.turns} turns; library {done.rate:.0f} tokens/s, "
        f"straight {done.straight_rate:.0f}",
        file=sys.stderr,
        flush=True,
    )


def config_for(
    model: str,
    device: str,
    python: str,
    server_args: dict[str, Any] | None = None,
    **sections: Any,
) -> RolloutConfig:
    """What both kinds of work share."""
    # Plain torch decodes faster in float32 on a CPU.
    dtype = "float32" if device == "cpu" else "bfloat16"
    return RolloutConfig(
        model=ModelConfig(path=model),
        engine=SGLangEngine(
            device=device, dtype=dtype, max_running=TRAJECTORIES, server_args=server_args or {}
        ),
        placement=LocalProcessPlacement(python=python),
        sampling=SamplingConfig(temperature=0.0),
        scheduling=SchedulingConfig(samples_per_prompt=1, max_in_flight=TRAJECTORIES),
        seed=0,
        **sections,
    )


def slow_work(model: str, device: str, python: str) -> Work:
    """Sums, with the calculator."""
    config = config_for(
        model,
        device,
        python,
        lengths=LengthsConfig(prompt=768, response=256, turn=96),
        agent=AgentConfig(max_assistant_turns=4),
    )
    return Work("slow", config, lambda index: arithmetic_tasks(TRAJECTORIES, index).prompts)


def fast_work(directory: str, device: str, python: str) -> Work:
    """A model too small to be the bottleneck."""
    save_fast_model(directory)
    config = config_for(
        directory,
        device,
        python,
        # A step on a CPU is short by default, for the sake of larger models.
        {"chunked_prefill_size": 4096} if device == "cpu" else None,
        lengths=LengthsConfig(prompt=256, response=768),
        agent=AgentConfig(name="fixed_calls"),
    )

    def prompts(index: int) -> list[Prompt]:
        draw = random.Random(index)
        return [
            Prompt(
                messages=[Message(role="user", content=f"{index} {member}")],
                extra={"turns": [draw.randint(*TURN_TOKENS) for _ in range(TURNS)]},
            )
            for member in range(TRAJECTORIES)
        ]

    return Work("fast", config, prompts)


def save_fast_model(directory: str) -> None:
    """Two layers, random weights, the byte-level tokenizer of the simulated engine."""
    tokenizer = simulated_tokenizer()
    tokenizer.chat_template = SHORT_TEMPLATE
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] = 0  # no turn ends before its length
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def has_gpu(python: str) -> bool:
    """Whether torch in SGLang's environment sees one."""
    look = "import torch; print(torch.cuda.is_available())"
    done = subprocess.run([python, "-c", look], capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"


def main() -> None:
    """Run both kinds of work and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", default=str(PYTHON), help="SGLang's interpreter")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: the GPU if there is one"
    )
    parser.add_argument("--model", default=EMBEDDED, help="of the slow work")
    parser.add_argument("--work", nargs="+", choices=tuple(ROUNDS), default=list(ROUNDS))
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    parser.add_argument("--quick", action="store_true", help="the fast work alone")
    asked = parser.parse_args()
    if asked.quick:
        asked.work = ["fast"]
    if not Path(asked.python).exists():
        raise SystemExit(f"{asked.python}: no such interpreter; run `make sglang-cpu`")
    device = asked.device or ("cuda" if has_gpu(asked.python) else "cpu")
    transformers.utils.logging.disable_progress_bar()
    summary: dict[str, Any] = {"device": device, "trajectories": TRAJECTORIES}
    with tempfile.TemporaryDirectory() as directory:
        works = {
            "slow": lambda: slow_work(asked.model, device, asked.python),
            "fast": lambda: fast_work(directory, device, asked.python),
        }
        for name in asked.work:
            rounds = anyio.run(run_work, works[name](), asked.python, asked.rounds or ROUNDS[name])
            suffix = "_fast" if name == "fast" else ""
            summary |= {f"{key}{suffix}": value for key, value in figures(rounds).items()}
    print(json.dumps(summary))


def figures(rounds: list[Round]) -> dict[str, Any]:
    """The result of one kind of work."""
    seconds = sum(each.driver_cpu_s for each in rounds)
    # A machine's speed drifts: each round but the first stands between two straight ones.
    ratios = [
        each.rate / statistics.fmean((last.straight_rate, each.straight_rate))
        for last, each in zip([rounds[0], *rounds], rounds, strict=False)
    ]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "driver_cpu_ms_per_turn": round(1000 * seconds / sum(each.turns for each in rounds), 2),
        "tokens_per_s": round(statistics.median(each.rate for each in rounds)),
        "rounds": [round(each, 3) for each in ratios],
    }


if __name__ == "__main__":
    main()
