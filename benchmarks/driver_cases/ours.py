"""Our side of the driver's benchmark: rounds through `open_rollout` on an instant engine."""

from __future__ import annotations

import hashlib
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import attrs
import psutil

import rollout
from driver_cases.measuring import Clocks, Ticker
from driver_cases.workload import SCHEMAS, TURNS, questions, tool_text
from rollout.config import (
    AgentConfig,
    CustomEngine,
    LengthsConfig,
    LocalProcessPlacement,
    ModelConfig,
    RolloutConfig,
    SchedulingConfig,
)
from rollout.tools import function_tool
from rollout.types import Prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rollout.chat.trajectory import Trajectory

#: Tokens that a tool turn adds at most.
TURN_TOKENS = 340


@attrs.frozen(kw_only=True)
class Plan:
    """What is run.

    Attributes:
        directory: Of the workload.
        n: Trajectories, all in flight at once.
        turns: Of a trajectory, those that call a tool.
        scope: "stream" for trajectories alone, "generate" with their tensors.
        barrier: "rounds" holds the answers of every turn until all trajectories wait, "first" those
            of the first, "none" no answer.
    """

    directory: str
    n: int
    turns: int = TURNS
    scope: str = "stream"
    barrier: str = "rounds"

    @property
    def generations(self) -> int:
        """Of a round."""
        return self.n * (self.turns + 1)


def config_of(plan: Plan) -> RolloutConfig:
    """All trajectories at once on one engine in a child process; the rest as it comes."""
    options = {
        "directory": plan.directory,
        "turns": plan.turns,
        "in_flight": 0 if plan.barrier == "none" else plan.n,
        "barrier": plan.barrier,
    }
    turns = {"max_assistant_turns": plan.turns + 1, "max_user_turns": plan.turns + 1}
    return RolloutConfig(
        model=ModelConfig(path=plan.directory),
        engine=CustomEngine(core="driver_cases.instant_core:InstantCore", options=options),
        placement=LocalProcessPlacement(),
        lengths=LengthsConfig(prompt=1024, response=max(2048, TURN_TOKENS * (plan.turns + 1))),
        agent=AgentConfig(**(turns if plan.turns > TURNS else {})),
        scheduling=SchedulingConfig(max_in_flight=plan.n),
        seed=0,
    )


def tools() -> list[Any]:
    """Two tools that answer at once."""
    text = tool_text()

    async def search(query: str, top_k: int = 5) -> str:
        return text

    async def calculator(expression: str) -> str:
        return text

    both = zip((search, calculator), SCHEMAS, strict=True)
    return [function_tool(schema=schema)(function) for function, schema in both]


def prompts_of(count: int) -> list[Prompt]:
    """One for each trajectory."""
    return [Prompt(messages=[{"role": "user", "content": each}]) for each in questions(count)]


@asynccontextmanager
async def open_ours(plan: Plan) -> AsyncIterator[OurSide]:
    """Opens the runtime and the ticker."""
    async with (
        rollout.open_rollout(config_of(plan), tools()) as runtime,
        anyio.create_task_group() as tasks,
    ):
        side = OurSide(runtime, plan)
        tasks.start_soon(side.ticker.run)
        yield side
        tasks.cancel_scope.cancel()


class OurSide:
    """Runs rounds, one after the other."""

    def __init__(self, runtime: rollout.RolloutRuntime, plan: Plan) -> None:
        self.runtime = runtime
        self.ticker = Ticker(anyio.sleep)
        self.prompts = prompts_of(plan.n)
        self._plan = plan
        self._engines = tuple(child.pid for child in psutil.Process().children())

    async def round(self) -> dict[str, Any]:
        """One round: what it cost a generation, and what came out."""
        run = {"stream": self._stream, "generate": self._generate}[self._plan.scope]
        await anyio.sleep(0.05)  # what the round before left to do is done
        clocks = Clocks(self._engines)
        self.ticker.begin()
        trajectories, _held = await run()
        figures = clocks.per_generation(self._plan.generations)
        stall_ms = self.ticker.longest_ms()
        return {**figures, "stall_ms": stall_ms, **contents(trajectories)}

    async def _stream(self) -> tuple[list[Trajectory], Any]:
        async with self.runtime.stream(self.prompts) as trajectories:
            return [each async for each in trajectories], None

    async def _generate(self) -> tuple[list[Trajectory], Any]:
        batch = await self.runtime.generate(self.prompts)
        return list(batch.trajectories), batch


def contents(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Tokens in all, those that were sampled, and a digest of every id and its mask, in order."""
    digest, tokens, sampled = hashlib.sha256(), 0, 0
    for each in sorted(trajectories, key=lambda each: each.group):
        if each.outcome != "completed":
            raise SystemExit(f"{each.uid}: {each.outcome}, {each.reason} {each.cause}")
        digest.update(each.transcript.ids().astype("<i4").tobytes())
        digest.update(each.transcript.mask().astype("u1").tobytes())
        tokens += len(each.transcript)
        sampled += each.transcript.generated_length
    return {"tokens": tokens, "sampled": sampled, "digest": digest.hexdigest()[:16]}


async def run_rounds(plan: Plan, rounds: int) -> list[dict[str, Any]]:
    """A round that does not count, and `rounds` that do."""
    Path(plan.directory).mkdir(parents=True, exist_ok=True)
    async with open_ours(plan) as side:
        return [await side.round() for _ in range(rounds + 1)][1:]
