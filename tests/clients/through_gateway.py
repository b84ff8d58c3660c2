"""Runs a client as the agent of one trajectory, on scripted engines, and looks at its rows.

What the rows must be is read from the engines themselves, through a recorder around them: nothing
that the gateway or the driver counts is asked.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import attrs

import rollout
from harness import Recorder
from rollout import Prompt, Trajectory
from rollout.agents import AgentTask
from rollout.batch import RolloutBatch
from rollout.config import (
    AgentConfig,
    ChannelConfig,
    GatewayConfig,
    LengthsConfig,
    SandboxConfig,
)
from rollout.testing import Scenario, decode_ids

Program = Callable[[AgentTask], Any]

#: Tokens are bytes here, and the first request of a coding agent has 85 KB.
LENGTHS = LengthsConfig(prompt=400_000, response=2_000_000)
CONTEXT = 2_500_000

_programs: dict[str, Program] = {}


class Sampled(NamedTuple):
    """One answer of an engine: int32 little-endian, packed."""

    prompt: bytes
    ids: bytes


class Row(NamedTuple):
    """One row of the tensors.

    Attributes:
        turns: Each stretch that the mask names, with all that stands before it.
    """

    purpose: str
    is_trainable: bool
    turns: tuple[Sampled, ...]


class AgentFailed(Exception):
    """The trajectory failed, for this reason."""


@attrs.frozen(kw_only=True)
class Run:
    """What came of a client's run.

    Attributes:
        result: What the client returned.
        sampled: What the engines say that they sampled.
        anomalies: What the race harness's checks find, in words.
    """

    result: Any
    trajectory: Trajectory
    rows: list[Row]
    sampled: list[Sampled]
    anomalies: list[str]

    def assert_exact(self, *purposes: str, stops: Sequence[str] = ()) -> None:
        """Its rows are those, and hold what was sampled to the token.

        Every answer of an engine stands in one row and once, after the very tokens that its engine
        had read; nothing else is trained. Rows of side calls are not.

        Args:
            purposes: Of the rows.
            stops: Strings of the client's that end turns: what follows was told to nobody.
        """
        assert self.anomalies == []
        assert [row.purpose for row in self.rows] == list(purposes), self.story()
        told = Counter(Sampled(each.prompt, _cut(each.ids, stops)) for each in self.sampled)
        assert Counter(turn for row in self.rows for turn in row.turns) == told
        for row in self.rows:
            assert row.is_trainable == (row.purpose != "side")

    def story(self) -> str:
        """What stands in the rows, for people."""
        parts = [str(self.trajectory.cause or self.trajectory.outcome)]
        for at, row in enumerate(self.rows):
            text = decode_ids(row.turns[-1].prompt + row.turns[-1].ids) if row.turns else ""
            parts.append(f"\n=== row {at}: {row.purpose}, {len(row.turns)} turns\n{text}")
        return "".join(parts)


@rollout.agent("client")
def run_sync(task: AgentTask) -> None:
    """A client in a thread."""
    task.extra["result"] = _programs[task.extra["program"]](task)


@rollout.agent("async_client")
async def run_async(task: AgentTask) -> None:
    """A client on an asyncio loop: that of the runtime, if it has one."""
    task.extra["result"] = await _programs[task.extra["program"]](task)


@rollout.agent("native_client", backend="native")
async def run_native(task: AgentTask) -> None:
    """A client that knows trio too."""
    task.extra["result"] = await _programs[task.extra["program"]](task)


class Gatewayed:
    """A runtime with its recorder; see `opened`."""

    def __init__(self, runtime: Any, recorder: Recorder) -> None:
        self._runtime = runtime
        self._recorder = recorder

    async def roll(self, program: Program, members: int = 1) -> RolloutBatch:
        """Run `program` as that many trajectories; what it raises is raised here."""
        failures: list[BaseException] = []
        name = f"{len(_programs)}"
        _programs[name] = _keeping(program, failures)
        prompt = Prompt(messages=[{"role": "user", "content": "-"}], extra={"program": name})
        batch = await self.generate(prompt, members)
        if failures:
            raise failures[0]
        return batch

    async def generate(self, prompt: Prompt, members: int = 1) -> RolloutBatch:
        """Run the agent on a prompt."""
        batch: RolloutBatch = await self._runtime.generate([prompt], samples=members, trim=True)
        return batch

    def sampled(self) -> list[Sampled]:
        """What the engines say that they sampled."""
        (runtime,) = self._recorder.runtimes
        sent = [each for core in runtime.cores for each in core.requests.values()]
        return [
            Sampled(each.request.prompt_ids, b"".join(chunk.ids for chunk in each.chunks))
            for each in sent
        ]


@asynccontextmanager
async def opened(
    scenario: Scenario,
    *,
    agent: str = "client",
    recorder: Recorder | None = None,
    lengths: LengthsConfig = LENGTHS,
    base_s: float = 0.0005,
    sandbox: SandboxConfig | None = None,
    **gateway: Any,
) -> AsyncIterator[Gatewayed]:
    """A runtime whose agents are clients.

    Args:
        scenario: What the model says.
        agent: Which of the agents above runs them.
        recorder: Records it.
        lengths: Of the rows.
        base_s: Real seconds that the engine takes for a token; streams come in pieces.
        sandbox: Where programs run.
        gateway: Fields of the `gateway` section.
    """
    scenario = scenario.capacity(context_length=CONTEXT).kv(tokens=2 * CONTEXT)
    config = scenario.timing(base_s=base_s, slope_s=0, prefill_tokens_per_s=None).config(
        agent=AgentConfig(name=agent),
        gateway=GatewayConfig(**gateway),
        lengths=lengths,
        sandbox=sandbox or SandboxConfig(),
        channel=ChannelConfig(stream_interval_s=0.01),
    )
    recorder = recorder or Recorder()
    async with recorder.open_rollout(config) as runtime:
        yield Gatewayed(runtime, recorder)


async def run(work: Program | Prompt, scenario: Scenario, **options: Any) -> Run:
    """Run a program, or the agent on a prompt, as one trajectory.

    The options are those of `opened`.
    """
    recorder = Recorder()
    async with opened(scenario, recorder=recorder, **options) as gatewayed:
        is_prompt = isinstance(work, Prompt)
        batch = await (gatewayed.generate(work) if is_prompt else gatewayed.roll(work))
    (trajectory,) = batch.trajectories
    if trajectory.cause is not None:
        raise AgentFailed(trajectory.cause.message)
    return Run(
        result=trajectory.extra.get("result"),
        trajectory=trajectory,
        rows=list(_rows(batch, trajectory)),
        sampled=gatewayed.sampled(),
        anomalies=recorder.anomalies(),
    )


def _keeping(program: Program, failures: list[BaseException]) -> Program:
    """The program; what it raises is kept, with its traceback."""

    async def awaited(task: AgentTask) -> Any:
        try:
            return await program(task)
        except Exception as error:
            failures.append(error)
            raise

    def called(task: AgentTask) -> Any:
        try:
            return program(task)
        except Exception as error:
            failures.append(error)
            raise

    return awaited if inspect.iscoroutinefunction(program) else called


def _rows(batch: RolloutBatch, trajectory: Trajectory) -> Iterator[Row]:
    tensors = batch.tensors
    prompt_length = tensors["prompts"].shape[1]
    for at, segment in enumerate(trajectory.segments):
        real = tensors["attention_mask"][at].bool()
        ids = tensors["input_ids"][at][real].int().numpy()
        mask = real.clone()
        mask[:prompt_length] = False
        mask[prompt_length:] = tensors["response_mask"][at].bool()
        yield Row(
            purpose=segment.purpose,
            is_trainable=bool(tensors["trainable"][at]),
            turns=tuple(
                Sampled(ids[:start].tobytes(), ids[start:stop].tobytes())
                for start, stop in _stretches(mask[real].tolist())
            ),
        )


def _cut(ids: bytes, stops: Sequence[str]) -> bytes:
    """Up to the end of the first stop string to be complete; tokens are bytes."""
    text = decode_ids(ids)
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    return ids[: 4 * len(text[: min(ends)].encode())] if ends else ids


def _stretches(mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    start = None
    for at, is_generated in enumerate([*mask, False]):
        if is_generated and start is None:
            start = at
        elif not is_generated and start is not None:
            yield start, at
            start = None
