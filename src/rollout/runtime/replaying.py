"""Runs a recorded trajectory again, on its journal alone: no engine, no tool, no limit of time."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import attrs
import msgspec

from rollout.agents import get_agent
from rollout.agents.media_intake import MediaIntake
from rollout.agents.services import Services
from rollout.agents.turn import TurnReader
from rollout.chat import get_tool_parser
from rollout.config import LimitsConfig, RolloutConfig, config_from_dict
from rollout.containment import open_containment
from rollout.engine.core import EngineInfo
from rollout.engine.pool.model_template import load_model_template
from rollout.errors import AgentError, ConfigError, EngineError, ToolError
from rollout.interactions import InteractionRegistry
from rollout.journal.index import JournalIndex, read_journal
from rollout.journal.replay_log import ReplayLog
from rollout.limits import Clock
from rollout.observe.tally import Tally
from rollout.runtime.gateway_opening import serve_gateway
from rollout.runtime.opening import list_stop_tokens, make_executor
from rollout.scheduling.members import Member, MemberGroup, cancel_members
from rollout.scheduling.tokenization import TokenizationCheck
from rollout.scheduling.trajectory import TrajectoryRunner, limit_trajectory, run_trajectory
from rollout.seeds import Identity
from rollout.tools import Tool, ToolContext, ToolSession
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rollout.chat.trajectory import Trajectory
    from rollout.journal.records import Answer, Header, Key
    from rollout.media.records import KnownContents
    from rollout.types import Prompt, ToolCall

#: Reason of a replayed trajectory that has departed from its record.
DEPARTED = "departed"


class Record(NamedTuple):
    """One trajectory of a journal.

    Attributes:
        answers: Turns and tool results, in order.
        media: Gives images and videos in it their contents.
        ended: As it ended; None where it had not.
    """

    key: Key
    header: Header
    prompt: Prompt
    answers: list[Answer]
    media: KnownContents
    ended: Trajectory | None


class Replayed(NamedTuple):
    """What became of it.

    Attributes:
        trajectory: As it is now.
        steps: Turns, and calls of a turn, that the record answered.
        departure: At the step after these, how it departs from the record; "" where it does not.
        is_beyond: It wanted to continue where the record ends: no agent had ended it there.
    """

    record: Record
    trajectory: Trajectory
    steps: int
    departure: str
    is_beyond: bool


def find_record(
    path: Path,
    uid: str,
    member: int,
    step: int | None = None,
    call: int | None = None,
    *,
    validate: bool = False,
) -> Record:
    """A trajectory of a journal.

    Args:
        path: Of the journal.
        uid, member: Of the trajectory.
        step: Its step; None where it is in one alone.
        call: How many calls of its step had its uid before; None where there was one alone.
        validate: Whether it is one of a validation, where there are others of this name.

    Raises:
        JournalError: It cannot be read.
        ConfigError: It has no such trajectory, or several.
    """
    index = read_journal(path)
    keys = [
        key
        for key in index.trajectories
        if (key.uid, key.member) == (uid, member)
        and step in (None, key.step)
        and call in (None, key.call)
    ]
    if len({key.validate for key in keys}) > 1:
        keys = [key for key in keys if key.validate is validate]
    if len(keys) == 1:
        return _read_record(index, keys[0])
    wanted = f"--trajectory {uid}/{member}"
    if keys:
        places = " or ".join(f"--step {key.step} --call {key.call}" for key in keys[:8])
        raise ConfigError(f"{wanted}: is in {path} {len(keys)} times; add {places}")
    names = [f"{key.uid}/{key.member}" for key in index.trajectories]
    known = ", ".join([*names[:8], *(["…"] if len(names) > 8 else [])]) or "none"
    raise ConfigError(f"{wanted}: is not in {path}; it has {known}")


def _read_record(index: JournalIndex, key: Key) -> Record:
    assert index.header is not None
    recorded, prompt = index.trajectories[key], index.read_prompt(key.group)
    return Record(
        key,
        index.header,
        prompt,
        list(map(index.read, recorded.answers)),
        index.contents,
        index.read_end(key, recorded, prompt, index.decode),
    )


async def replay(
    record: Record,
    interactions: Sequence[Any] = (),
    on_step: Callable[[int, str], object] = lambda *_: None,
) -> Replayed:
    """Run a recorded trajectory again through its agent, until it ends or departs.

    In this process and on this loop, which a debugger may hold as long as it likes: no limit of
    time holds. Nothing is written.

    Args:
        record: From `find_record`.
        interactions: Factories of simulated users, as for `open_rollout`.
        on_step: Called with each step: its number, from 1, and what it is.

    Raises:
        ConfigError: The agent is not registered.
    """
    header, config = record.header, _make_config(record.header)
    name = record.prompt.agent_name or config.agent.name
    try:
        get_agent(name)
    except AgentError as error:
        raise ConfigError(
            f"agent {name!r}: {error}; expected --tools to name the file that registers it, "
            "or --config the configuration that does"
        ) from None
    template, parser = load_model_template(config), get_tool_parser(config.agent.tool_format)
    async with AsyncExitStack() as stack:
        threads = WorkerThreads(max_threads=config.tools.max_threads, max_abandoned=1)
        stack.callback(threads.close)
        services = Services(
            config=config,
            engines=cast("Any", _RecordedEngines(header)),
            template=template,
            parser=parser,
            stop_token_ids=list_stop_tokens(template, parser),
            tools=make_executor(config, [*map(_RecordedTool, header.schemas)], threads),
            interactions=InteractionRegistry(interactions),
            tally=Tally(),
            threads=threads,
            containment=await stack.enter_async_context(open_containment(config.limits.cleanup_s)),
            texts=WorkerThreads(),
            media=MediaIntake(config.media, template.processor),
        )
        await stack.enter_async_context(serve_gateway(services))
        return await _run(record, services, on_step)


async def _run(
    record: Record, services: Services, on_step: Callable[[int, str], object]
) -> Replayed:
    key, config = record.key, services.config
    reader = TurnReader(services.template, services.parser, record.header.schemas)
    log = ReplayLog(
        record.answers,
        record.ended,
        restore=record.media.restore,
        decode=services.template.decode,
        parse_calls=lambda ids: reader.read_ids(ids, None, in_reasoning=False).calls,
        on_step=on_step,
        on_departure=lambda: cancel_members([member], DEPARTED),
    )
    identity = Identity(
        uid=key.uid,
        group=0,
        member=key.member,
        step=key.step,
        run_seed=record.header.run_seed,
        validate=key.validate,
    )
    group = MemberGroup(0, record.prompt)
    member = Member(record.prompt, identity, group, log=cast("Any", log))
    mode, ignored = config.agent.tokenization_check, config.agent.tokenization_ignore
    runner = TrajectoryRunner(services=services, tokens=TokenizationCheck(mode, ignored))
    member.clock = Clock(limit_trajectory(config.limits, record.prompt))
    trajectory = await run_trajectory(runner, member)
    log.compare(trajectory)
    return Replayed(record, trajectory, log.steps, log.departure, log.is_beyond)


def _make_config(header: Header) -> RolloutConfig:
    """That of the run, without limits of time and without tools that would have to be prepared."""
    config = config_from_dict(header.config)
    names = [each.name for each in attrs.fields(LimitsConfig) if each.name != "cleanup_s"]
    return attrs.evolve(
        config,
        limits=LimitsConfig(**dict.fromkeys(names), cleanup_s=config.limits.cleanup_s),
        tools=attrs.evolve(config.tools, builtin=()),
        journal=attrs.evolve(config.journal, path=None),
        scheduling=attrs.evolve(config.scheduling, max_retries=0),
        seed=header.run_seed,
    )


class _RecordedEngines:
    """What is known of the engines that there were."""

    def __init__(self, header: Header) -> None:
        self.info = msgspec.convert(header.engine, EngineInfo)
        self.weight_version = self.info.weight_version

    async def generate(self, *_: object, **__: object) -> None:
        """There are none."""
        raise EngineError("a replay has no engine")

    def forget(self, session_id: str) -> None:
        """Nothing is known of it."""


class _RecordedTool(Tool):
    """A tool of whom only the answers are there."""

    stateful = False

    def __init__(self, schema: dict[str, Any]) -> None:
        self.schema, self.name = schema, schema["function"]["name"]

    async def open(self, context: ToolContext) -> ToolSession:
        """It answers nothing, and has no reward."""
        return _SilentSession()


class _SilentSession(ToolSession):
    async def execute(self, call: ToolCall) -> str:
        raise ToolError(f"{call.name}: no tool runs in a replay")
