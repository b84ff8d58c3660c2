"""Runs with a journal, and journals as a death leaves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio

import rollout
from rollout import Prompt, Reward, RolloutBatch, RolloutConfig, Trajectory, function_tool
from rollout.config import JournalConfig
from rollout.journal.log_file import HEAD, MAGIC, read_frames
from rollout.journal.records import EndRecord, decode_record
from rollout.testing import Scenario, run_virtual, tool_call

CALLED: list[tuple[int, int]] = []


@function_tool
async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    CALLED.append((a, b))
    await anyio.sleep(0.01)
    return a + b


ADDING = (
    Scenario(seed=1)
    .reply("sum", tool_call("add", a=1, b=1), filler=20)
    .then(tool_call("add", a=2, b=2))
    .then("the end")
    .reply("quick", "at once", filler=5)
    .timing(base_s=0.02)
)


def config_of(path: Path, scenario: Scenario = ADDING, **sections: Any) -> RolloutConfig:
    journal = sections.pop("journal", {})
    return scenario.config(journal=JournalConfig(path=str(path), **journal), seed=7, **sections)


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(messages=[{"role": "user", "content": text}], uid=text) for text in texts]


async def reward(trajectory: Trajectory) -> Reward:
    """Of no thread, so that the order of the records does not depend on the machine."""
    count = trajectory.transcript.generated_length
    values = [0.1] * trajectory.transcript.response_length
    return Reward(value=count / 3, extra={"of": [count, "é"]}, token_values=values)


class Ran:
    """What a run gave.

    Attributes:
        tokens: That engines sampled for it.
    """

    def __init__(self, batch: RolloutBatch, tokens: int, statistics: Any) -> None:
        self.batch, self.tokens, self.statistics = batch, tokens, statistics

    @property
    def trajectories(self) -> list[Trajectory]:
        return list(self.batch.trajectories)


def run(
    config: RolloutConfig,
    given: Sequence[Prompt],
    *,
    resume: bool = False,
    tools: Sequence[Any] = (add,),
    reward: Callable[[Trajectory], Any] | None = reward,
    **options: Any,
) -> Ran:
    async def act() -> Ran:
        async with rollout.open_rollout(config, tools, reward, resume=resume) as runtime:
            batch = await runtime.generate(given, **options)
            statistics = runtime.statistics()
            tokens = sum(each.tokens.arrived for each in statistics.replicas)
            return Ran(batch, tokens, statistics.journal)

    CALLED.clear()
    return run_virtual(act)


def content(trajectory: Trajectory) -> dict[str, Any]:
    """All of it, to be compared."""
    return {
        "ids": [each.transcript.ids().tolist() for each in trajectory.segments],
        "masks": [each.transcript.mask().tolist() for each in trajectory.segments],
        "log_probs": [each.transcript.log_probs().tobytes() for each in trajectory.segments],
        "versions": [each.transcript.weight_versions().tolist() for each in trajectory.segments],
        "spans": [each.transcript.spans for each in trajectory.segments],
        "token_rewards": [each.token_rewards for each in trajectory.segments],
        "seeds": [each.seeds for each in trajectory.segments],
        "parents": [(each.parent, each.purpose, each.session_id) for each in trajectory.segments],
        "told": [list(each.messages) for each in trajectory.segments],
        **{
            name: getattr(trajectory, name)
            for name in Trajectory.__struct_fields__
            if name not in ("segments", "transcript", "metrics")
        },
    }


GIVEN = prompts("sum one", "quick two", "sum three")


def cut_before_last_answers(path: Path, before: type) -> Path:
    """A copy that ends before the last record of a kind."""
    entries = records_in(path)
    at = max(at for at, each in enumerate(entries) if isinstance(each, before))
    return cut(path, record_ends(path)[at - 1])


def frames_in(path: Path) -> list[tuple[int, bytes]]:
    """Where each whole frame of a journal begins, and its payload."""
    return [(start, payload) for start, payload in read_frames(path) if payload is not None]


def records_in(path: Path) -> list[Any]:
    """The records of a journal."""
    return [decode_record(payload) for _, payload in frames_in(path)]


def record_ends(path: Path) -> list[int]:
    """Where the records of a journal end."""
    return [start + HEAD.size + len(payload) for start, payload in frames_in(path)]


def cut(path: Path, size: int) -> Path:
    """A copy of a journal that a death left with its first bytes."""
    copy = path.with_name(f"cut-{size}")
    copy.write_bytes(path.read_bytes()[:size])
    return copy


def cut_before_end(path: Path) -> None:
    """As a death leaves it right before its first trajectory was finished."""
    size = len(MAGIC)
    for start, payload in frames_in(path):
        if isinstance(decode_record(payload), EndRecord):
            size = start
            break
    path.write_bytes(path.read_bytes()[:size])
