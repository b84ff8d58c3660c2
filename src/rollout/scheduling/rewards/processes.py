"""Child processes for reward functions that hold the interpreter, crash or do not return.

The driver's side is `RewardProcesses`, a child's is `main`; between them go trajectories as
`chat.trajectory_codec` writes them.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.chat.group import Group
from rollout.chat.plain_data import NotPlainError, encoder, simplify, to_plain_items
from rollout.chat.reward_values import BadRewardError, check_group_values, check_reward_value
from rollout.chat.trajectory_codec import (
    CompleteTrajectory,
    make_encodable,
    pack_complete,
    unpack_complete,
)
from rollout.child_processes import ChildDiedError, ChildProcess, ChildProcesses
from rollout.child_serving import MAX_REPLY, resolve_outcome, serve
from rollout.errors import ConfigError
from rollout.function_refs import FunctionRef, describe_slow_import, function_at
from rollout.scheduling.rewards.functions import make_verl_arguments
from rollout.types import Cause, Reward

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rollout.chat.trajectory import Trajectory
    from rollout.config import RolloutConfig
    from rollout.scheduling.rewards.functions import LoadedReward, RewardFunctions
    from rollout.worker_threads import WorkerThreads


class RewardProcessError(Exception):
    """The process of a reward function ended before it had answered."""


class RewardRaisedError(Exception):
    """A reward function raised in its process, or what it returned is no reward.

    Attributes:
        cause: What it raised there.
    """

    def __init__(self, cause: Cause) -> None:
        super().__init__(f"{cause.type}: {cause.message}")
        self.cause = cause


class Request(msgspec.Struct):
    """Import functions, and call the first one where there is something to call it with.

    Attributes:
        subjects: What it is about: one trajectory, or all members of a group.
        is_group: Whether it takes the group.
        keywords: What it takes in the place of the trajectory, as verl's functions do.
    """

    functions: list[FunctionRef]
    subjects: list[CompleteTrajectory] = []
    is_group: bool = False
    keywords: dict[str, Any] | None = None


class Reply(msgspec.Struct, omit_defaults=True):
    """A reward for each trajectory, or what was raised."""

    rewards: list[Reward | None] = []
    failure: Cause | None = None


_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


@asynccontextmanager
async def open_reward_processes(
    config: RolloutConfig, functions: RewardFunctions, threads: WorkerThreads
) -> AsyncIterator[RewardProcesses | None]:
    """Yield the pool of processes that the configuration asks for, if any.

    A process has imported the functions by then, within `limits.reward_s`; all end with the block.

    Raises:
        ConfigError: They cannot be imported there; says why.
    """
    count, both = config.rewards.processes, (functions.single, functions.group)
    refs = [each.ref for each in both if each is not None and each.ref is not None]
    if not count or not refs:
        yield None
        return
    children = ChildProcesses(
        "rollout.scheduling.rewards.processes",
        max_processes=count,
        cleanup_s=config.limits.cleanup_s,
    )
    pool, limit_s = RewardProcesses(children, refs, threads), config.limits.reward_s
    try:
        try:
            with anyio.fail_after(limit_s):
                async with children.worker() as child:
                    await _ask(child, pool.load)
        except TimeoutError:
            slow = describe_slow_import(refs, f"limits.reward_s = {limit_s:g} s")
            raise ConfigError(f"rewards.processes: {slow}") from None
        except (RewardRaisedError, RewardProcessError) as error:
            raise ConfigError(
                f"rewards.processes: the reward cannot be imported in its process: {error}"
            ) from error
        yield pool
    finally:
        await children.close()


class RewardProcesses:
    """A pool of child processes, each calling one reward function at a time.

    One that dies, or is killed because its call was cancelled, is replaced by the next call; one
    that died while it had none fails none.

    Args:
        functions: A process imports them before its first call.
        threads: Where requests are made, since long trajectories take a while.
    """

    def __init__(
        self, children: ChildProcesses, functions: list[FunctionRef], threads: WorkerThreads
    ) -> None:
        self._children, self._threads = children, threads
        self.load = encoder.encode(Request(functions))

    async def score(
        self,
        function: LoadedReward,
        subject: Trajectory | Group,
        tokenizer: Any,
        begin: Callable[[], None],
    ) -> Any:
        """A reward, or those of a group; cancellation kills the process with the process's group.

        Args:
            tokenizer: Decodes responses for functions that were written for verl.
            begin: Called when the call begins: not while it waits for a process or a thread, and
                not while a new process imports the functions, which may take as long again.

        Raises:
            RewardRaisedError: The function raised, or returned what is no reward.
            RewardProcessError: Its process died.
            NotPlainError: The trajectory holds what cannot be handed over.
        """
        async with self._children.worker() as child:
            request = await self._threads.run("reward", write_request, function, subject, tokenizer)
            if child.is_new:
                begin()
                await _ask(child, self.load)
            begin()
            rewards = (await _ask(child, request)).rewards
        return rewards if isinstance(subject, Group) else rewards[0]


async def _ask(child: ChildProcess, request: bytes) -> Reply:
    try:
        reply = _decode_reply(await child.ask(request))
    except ChildDiedError as error:
        code = error.exit_code
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        raise RewardProcessError(
            f"its process {how} before it had answered; another process takes its place"
        ) from None
    if reply.failure is not None:
        raise RewardRaisedError(reply.failure)
    return reply


def write_request(function: LoadedReward, subject: Trajectory | Group, tokenizer: Any) -> bytes:
    """Write the request to call a function.

    Raises:
        NotPlainError: Something in it is no plain data.
    """
    assert function.ref is not None
    is_group, keywords = isinstance(subject, Group), None
    members = subject.trajectories if isinstance(subject, Group) else [subject]
    try:
        if function.verl_names:
            keywords = make_verl_arguments(function.verl_names, members[0], tokenizer)
            keywords = to_plain_items(keywords, "arguments", simplify)
        subjects = [pack_complete(each, f"trajectories[{at}]") for at, each in enumerate(members)]
    except NotPlainError as error:
        error.what += ", to be handed over with rewards.processes"
        raise
    return encoder.encode(Request([function.ref], subjects, is_group, keywords))


def main() -> None:
    """The child: answer requests until standard input closes."""
    serve(_answer)


def _answer(body: bytes) -> bytes:
    try:
        reply = encoder.encode(Reply(_call(_decode_request(body))))
        if len(reply) > MAX_REPLY:
            raise BadRewardError(f"the reward takes {len(reply)} bytes; at most {MAX_REPLY}")
    except BaseException as error:
        return encoder.encode(Reply(failure=make_encodable(Cause.of(error))))
    return reply


def _call(request: Request) -> list[Reward | None]:
    function, *_ = map(function_at, request.functions)
    if not request.subjects:
        return []
    members, group = list(map(unpack_complete, request.subjects)), None
    if request.is_group:
        group = Group.of(members[0].uid, members[0].prompt, members)
    if request.keywords is not None:
        value = resolve_outcome(function(**request.keywords))
    else:
        value = resolve_outcome(function(group or members[0]))
    if group is not None:
        rewards = check_group_values(value, group)
    else:
        rewards = [check_reward_value(value, members[0])]
    return [each and _make_plain(each, f"rewards[{at}].extra") for at, each in enumerate(rewards)]


def _make_plain(reward: Reward, where: str) -> Reward:
    assert isinstance(reward.token_values, Mapping)
    try:
        extra = to_plain_items(reward.extra, where, simplify)
    except NotPlainError as error:
        raise BadRewardError(
            f"the reward function returned what cannot leave its process: {error}"
        ) from None
    values = {at: list(each) for at, each in reward.token_values.items()}
    return msgspec.structs.replace(reward, extra=extra, token_values=values)
