"""What golden runs are made of: scenarios, prompts, tools, users and agents."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import anyio

from golden.stage import HELD_TOKENS, Stage, runs_on_asyncio
from rollout import (
    AgentLoop,
    CustomEngine,
    Interaction,
    InteractionTurn,
    LengthsConfig,
    Prompt,
    RolloutConfig,
    Tool,
    ToolResult,
    ToolSession,
    function_tool,
    register_agent,
)
from rollout.agents import ToolAgent
from rollout.testing import Scenario, tool_call

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from rollout import AgentContext

T = TypeVar("T")
LENGTHS = LengthsConfig(prompt=2200, response=700)


def choose(seed: int, what: str, options: Sequence[T]) -> T:
    """One of the options, the same in every process."""
    return options[zlib.crc32(f"{seed} {what}".encode()) % len(options)]


def scenario_of(seed: int, **options: Any) -> Scenario:
    """An engine that takes its time where that is virtual, and none where it is real."""
    made = Scenario(seed=seed, **{"stream_interval": choose(seed, "interval", (8, 32)), **options})
    if runs_on_asyncio():
        return made.timing(base_s=0.0, slope_s=0.0, prefill_tokens_per_s=None)
    return made.timing(base_s=0.01, slope_s=0.001, prefill_tokens_per_s=20_000.0)


def config_of(scenario: Scenario, **sections: Any) -> RolloutConfig:
    """Short rows."""
    return scenario.config(**{"lengths": LENGTHS, **sections})


def held_config_of(scenario: Scenario, **sections: Any) -> RolloutConfig:
    """Engines that hold answers back: see `HeldCore`; scenarios have chunks of `HELD_TOKENS`."""
    assert scenario.options.stream_interval == HELD_TOKENS
    core = CustomEngine(core="golden.stage:HeldCore", options=scenario.to_dict())
    return config_of(scenario, engine=core, **sections)


def user(text: str, **fields: Any) -> Prompt:
    """A prompt of one message."""
    return Prompt(messages=[{"role": "user", "content": text}], **fields)


async def endless(texts: Callable[[int], str], **fields: Any) -> AsyncIterator[Prompt]:
    """Prompts p0, p1, … of a data loader."""
    number = 0
    while True:
        yield user(texts(number), uid=f"p{number}", **fields)
        number += 1


@function_tool
async def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Two.
    """
    return a + b


@function_tool
async def fail(why: str) -> str:
    """Fail.

    Args:
        why: Reason.
    """
    raise ValueError(why)


@function_tool
async def pay(amount: float) -> tuple[str, float]:
    """Pay.

    Args:
        amount: Sum.
    """
    return f"paid {amount:g}", amount


class Notebook(Tool):
    """A session for each trajectory, whose calls run one after another."""

    name = "note"
    schema: ClassVar[dict[str, Any]] = {
        "type": "function",
        "function": {
            "name": "note",
            "description": "Note.",
            "parameters": {"type": "object", "properties": {"line": {"type": "string"}}},
        },
    }

    async def open(self, context: Any) -> ToolSession:
        return _Notes(str(context.kwargs.get("title", "")))


class _Notes(ToolSession):
    def __init__(self, title: str) -> None:
        self.lines = [title] if title else []
        self.serial = self

    async def execute(self, call: Any) -> ToolResult:
        count = len(self.lines)
        await anyio.lowlevel.checkpoint()
        assert len(self.lines) == count  # no other call meanwhile
        self.lines.append(call.arguments["line"])
        return ToolResult(f"{len(self.lines)}: {' '.join(self.lines)}")

    async def calc_reward(self) -> float:
        return 0.25 * len(self.lines)


class Checker(Interaction):
    """Scores answers by their length, and asks three times."""

    name = "checker"

    async def start(self, context: Any) -> None:
        self.asked, self.truth = 0, str(context.ground_truth)

    async def respond(self, messages: Any) -> InteractionTurn:
        said = messages[-1]["content"]
        self.asked += 1
        is_done = self.truth in said or self.asked == 3
        score = len(said) / 64
        text = "" if is_done else f"{self.asked}: not {self.truth}."
        return InteractionTurn(text, is_done=is_done, score=score, extra={"asked": self.asked})


def stage_tools(stage: Stage) -> list[Any]:
    """Tools that wait for each other."""

    @function_tool
    async def wait(gate: str) -> str:
        """Wait at a gate.

        Args:
            gate: Which.
        """
        await stage.pass_gate(gate)
        return f"through {gate}"

    @function_tool
    async def after(event: str, count: int) -> str:
        """Wait until something has come so often.

        Args:
            event: What.
            count: Times.
        """
        await stage.until(event, count)
        return f"after {count} {event}"

    @function_tool
    async def note_event(event: str) -> str:
        """Say that something has come.

        Args:
            event: What.
        """
        stage.note(event)
        return f"noted {event}"

    return [wait, after, note_event]


WAIT = tool_call("wait", gate="gate")
STUCK = tool_call("wait", gate="stuck")


@register_agent("golden_watched")
class Watched(ToolAgent):
    """Says by the event "seen" that the first chunk of a held answer has come."""

    async def run(self, context: AgentContext) -> None:
        stage: Stage = STAGES["it"]
        is_seen = False

        def read(generation: Any) -> None:
            nonlocal is_seen
            if len(generation.ids) == HELD_TOKENS and not is_seen:
                is_seen = True
                stage.note("seen")

        context.on_tokens.append(read)
        await super().run(context)


#: That of the run under way, for agents, which are registered once for all.
STAGES: dict[str, Stage] = {}


class Trials(AgentLoop):
    """An agent that does what the prompt's `extra` names."""

    trials: ClassVar[dict[str, Any]] = {}

    async def run(self, context: AgentContext) -> None:
        await self.trials[context.prompt.extra["trial"]](context)


register_agent("golden_trials")(Trials)


def trial(function: Any) -> Any:
    """Register what `Trials` does for the prompts that name it."""
    Trials.trials[function.__name__] = function
    return function
