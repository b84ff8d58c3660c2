"""Our side of the driver's benchmark: rounds through `open_rollout` on an instant engine."""

from __future__ import annotations

import gc
import hashlib
import time  # noqa: TID251  (CPU of single turns)
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import attrs
import psutil

import rollout
from driver_cases.measuring import Clocks, Ticker
from driver_cases.workload import (
    PROMPT_TOKENS,
    RESPONSE_TOKENS,
    SCHEMAS,
    TURNS,
    questions,
    tool_text,
)
from rollout.agents import ToolAgent, register_agent
from rollout.config import (
    AgentConfig,
    CustomEngine,
    JournalConfig,
    LengthsConfig,
    LimitsConfig,
    LocalProcessPlacement,
    ModelConfig,
    RolloutConfig,
    SchedulingConfig,
)
from rollout.tools import function_tool
from rollout.types import Prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from rollout.agents import AgentContext
    from rollout.chat.trajectory import Trajectory

#: Tokens that a tool turn adds at most.
TURN_TOKENS = 340
#: That a trajectory may have, unless it needs more.
DEFAULT_TURNS = 32
#: Answers are held until all trajectories wait; many on a busy machine take longer than usual.
HELD_S = 3600.0


@attrs.frozen(kw_only=True)
class Plan:
    """What is run.

    Attributes:
        directory: Of the workload.
        n: Trajectories, all in flight at once.
        turns: Of a trajectory, those that call a tool.
        barrier: "rounds" holds the answers of every turn until all trajectories wait, "first" those
            of the first, "none" no answer; "never" gives none.
        repeat: How many times over each answer says its ids.
        response: R of the tensors.
        journal: Path of its journal; "" for none.
    """

    directory: str
    n: int
    turns: int = TURNS
    barrier: str = "rounds"
    repeat: int = 1
    response: int = RESPONSE_TOKENS
    journal: str = ""

    @property
    def generations(self) -> int:
        """Of a round."""
        return self.n * (self.turns + 1)


def config_of(plan: Plan) -> RolloutConfig:
    """All trajectories at once on one engine in a child process; the rest as it comes."""
    options = {
        "directory": plan.directory,
        "turns": plan.turns,
        "in_flight": plan.n,
        "barrier": plan.barrier,
        "repeat": plan.repeat,
    }
    response = max(plan.response, TURN_TOKENS * (plan.turns + 1))
    turns = max(DEFAULT_TURNS, plan.turns + 1)
    # Counting takes a coroutine for each agent: not where what those take is measured.
    agent = "tool_agent" if plan.barrier == "never" else "counted"
    return RolloutConfig(
        model=ModelConfig(path=plan.directory),
        engine=CustomEngine(core="driver_cases.instant_core:InstantCore", options=options),
        placement=LocalProcessPlacement(),
        limits=LimitsConfig(generation_s=HELD_S, turn_s=HELD_S),
        lengths=LengthsConfig(prompt=PROMPT_TOKENS, response=response),
        agent=AgentConfig(name=agent, max_assistant_turns=turns, max_user_turns=turns),
        scheduling=SchedulingConfig(max_in_flight=plan.n),
        journal=JournalConfig(path=plan.journal or None),
        seed=0,
    )


@register_agent("counted")
class CountedAgent(ToolAgent):
    """The tool agent, which tells when the last one of a round has ended.

    Attributes:
        left: Agents of the round that have not ended.
        when_none_left: Is called then.
    """

    left: ClassVar[int] = 0
    when_none_left: ClassVar[Callable[[], None]]

    async def run(self, context: AgentContext) -> None:
        """Run it, and count it."""
        await super().run(context)
        CountedAgent.left -= 1
        if CountedAgent.left == 0:
            CountedAgent.when_none_left()


class Tools:
    """Two tools that answer at once.

    Attributes:
        cpu_s: CPU of the process so far, whenever as many calls as a turn has have been answered.
    """

    def __init__(self, calls_of_turn: int) -> None:
        self.cpu_s: list[float] = []
        self._calls, self._calls_of_turn = 0, calls_of_turn
        self._text = tool_text()

    def functions(self) -> list[Any]:
        """For `open_rollout`."""

        async def search(query: str, top_k: int = 5) -> str:
            return self._answer()

        async def calculator(expression: str) -> str:
            return self._answer()

        return [
            function_tool(schema=schema)(function)
            for function, schema in zip((search, calculator), SCHEMAS, strict=True)
        ]

    def _answer(self) -> str:
        self._calls += 1
        if self._calls % self._calls_of_turn == 0:
            self.cpu_s.append(time.process_time())
        return self._text


def prompts_of(count: int) -> list[Prompt]:
    """One for each trajectory."""
    return [Prompt(messages=[{"role": "user", "content": each}]) for each in questions(count)]


@asynccontextmanager
async def open_ours(plan: Plan) -> AsyncIterator[OurSide]:
    """Our side with its engine serving."""
    tools = Tools(plan.n)
    async with rollout.open_rollout(config_of(plan), tools.functions()) as runtime:
        yield OurSide(runtime, plan, tools)


class OurSide:
    """Runs rounds, one after the other."""

    def __init__(self, runtime: rollout.RolloutRuntime, plan: Plan, tools: Tools) -> None:
        self.runtime = runtime
        self.prompts = prompts_of(plan.n)
        self._plan, self._tools = plan, tools
        self._engines = tuple(child.pid for child in psutil.Process().children())

    async def round(self, scope: str) -> dict[str, Any]:
        """One round: what it cost a generation, how long the loop stalled, and what came out.

        Args:
            scope: "stream" for trajectories alone, "generate" with their tensors.
        """
        run = {"stream": self._stream, "generate": self._generate}[scope]
        ticker = Ticker(anyio.sleep)
        gc.collect()  # what the round before left
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ticker.run)
            await anyio.sleep(0.05)
            self._tools.cpu_s.clear()
            clocks = Clocks(self._engines)
            ticker.begin()
            trajectories, _held = await run(ticker)
            figures: dict[str, Any] = clocks.per(self._plan.generations)
            figures["stall_ms"] = ticker.longest_ms()
            if scope == "generate":
                figures["end_stall_ms"] = ticker.longest_since_mark_ms()
            tasks.cancel_scope.cancel()
        cpu_s = self._tools.cpu_s
        figures["turn_s"] = [late - early for early, late in pairwise(cpu_s)]
        return {**figures, **contents(trajectories)}

    async def _stream(self, ticker: Ticker) -> tuple[list[Trajectory], Any]:
        async with self.runtime.stream(self.prompts) as trajectories:
            return [each async for each in trajectories], None

    async def _generate(self, ticker: Ticker) -> tuple[list[Trajectory], Any]:
        CountedAgent.left, CountedAgent.when_none_left = self._plan.n, ticker.mark
        batch = await self.runtime.generate(self.prompts)  # what follows the mark makes the tensors
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
