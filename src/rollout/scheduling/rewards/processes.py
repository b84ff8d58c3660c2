"""Child processes for reward functions that hold the interpreter, crash or do not return.

The driver's side is `RewardProcesses`, that of a child `main`; between them go trajectories as
`chat.trajectory_codec` writes them.
"""

from __future__ import annotations

import signal
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.chat.group import Group
from rollout.chat.plain_data import (
    NotPlainError,
    encoder,
    simplify,
    to_plain_items,
)
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
from rollout.scheduling.rewards.signatures import make_verl_arguments
from rollout.types import Cause, Reward

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Load(msgspec.Struct, tag=True):
    """Import these functions."""

    functions: list[FunctionRef]


class Ask(msgspec.Struct, tag=True):
    """Call a function.

    Attributes:
        subjects: What it is about: one, or all members of a group.
        is_group: Whether it takes the group.
        keywords: What it takes in the place of the trajectory, as verl's functions do.
    """

    function: FunctionRef
    subjects: list[CompleteTrajectory]
    is_group: bool = False
    keywords: dict[str, Any] | None = None


#: A reward: its value, its extra, and the values of tokens, float32, and segments.
PackedReward = tuple[float, dict[str, Any], dict[int, bytes], dict[int, float]]


class Reply(msgspec.Struct, omit_defaults=True):
    """What came of it: a reward for each trajectory, or what was raised."""

    rewards: list[PackedReward | None] = []
    failure: Cause | None = None


_decode_request = msgspec.msgpack.Decoder(Load | Ask).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


class RewardProcesses:
    """A pool of child processes, each calling one reward function at a time.

    One that dies, or is killed because its call was cancelled, is replaced by the next call; one
    that died while it had none fails none.

    Args:
        functions: Those that are called; a process imports them before its first call.
        threads: Where requests are made, since long trajectories take a while; stays the caller's.
        max_processes: Calls at once; further ones wait.
        cleanup_s: Seconds for the end of a process that was killed.
    """

    def __init__(
        self,
        functions: Sequence[FunctionRef],
        threads: WorkerThreads,
        *,
        max_processes: int,
        cleanup_s: float,
    ) -> None:
        self._threads, self._functions = threads, list(functions)
        self._processes = ChildProcesses(
            "rollout.scheduling.rewards.processes",
            max_processes=max_processes,
            cleanup_s=cleanup_s,
        )

    async def prepare(self, limit_s: float | None) -> None:
        """Have a process import the functions, in this time.

        Raises:
            ConfigError: It cannot; says why.
        """
        try:
            with anyio.fail_after(limit_s):
                async with self._processes.worker() as child:
                    await _ask(child, Load(self._functions))
        except TimeoutError:
            slow = describe_slow_import(self._functions, f"limits.reward_s = {limit_s:g} s")
            raise ConfigError(f"rewards.processes: {slow}") from None
        except (RewardRaisedError, RewardProcessError) as error:
            raise ConfigError(
                f"rewards.processes: the reward cannot be imported in its process: {error}"
            ) from error

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
        async with self._processes.worker() as child:
            request = await self._threads.run("reward", write_request, function, subject, tokenizer)
            if child.is_new:
                begin()
                await _ask(child, Load(self._functions))
            begin()
            reply = await _ask(child, request)
        rewards = [None if each is None else _unpack_reward(each) for each in reply.rewards]
        return rewards if isinstance(subject, Group) else rewards[0]

    async def close(self) -> None:
        """End all processes."""
        await self._processes.close()


def make_reward_processes(
    config: RolloutConfig, functions: RewardFunctions, threads: WorkerThreads
) -> RewardProcesses | None:
    """The pool that the configuration asks for, if any; the caller closes it."""
    count, both = config.rewards.processes, (functions.single, functions.group)
    refs = [each.ref for each in both if each is not None and each.ref is not None]
    if not count or not refs:
        return None
    return RewardProcesses(refs, threads, max_processes=count, cleanup_s=config.limits.cleanup_s)


async def _ask(child: ChildProcess, request: bytes | Load) -> Reply:
    try:
        answer = await child.ask(request if isinstance(request, bytes) else encoder.encode(request))
    except ChildDiedError as error:
        code = error.exit_code
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        raise RewardProcessError(
            f"its process {how} before it had answered; another process takes its place"
        ) from None
    reply = _decode_reply(answer)
    if reply.failure is not None:
        raise RewardRaisedError(reply.failure)
    return reply


def write_request(function: LoadedReward, subject: Trajectory | Group, tokenizer: Any) -> bytes:
    """The request to call a function.

    Raises:
        NotPlainError: Something in it is no plain data.
    """
    assert function.ref is not None
    keywords = None
    members = subject.trajectories if isinstance(subject, Group) else [subject]
    try:
        if function.form.verl_names and not isinstance(subject, Group):
            keywords = make_verl_arguments(function.form.verl_names, subject, tokenizer)
            keywords = to_plain_items(keywords, "arguments", simplify)
        subjects = [pack_complete(each, f"trajectories[{at}]") for at, each in enumerate(members)]
        return _encode(Ask(function.ref, subjects, isinstance(subject, Group), keywords))
    except NotPlainError as error:
        error.what += ", to be handed over with rewards.processes"
        raise


def _encode(message: msgspec.Struct) -> bytes:
    try:
        return encoder.encode(message)
    except Exception as error:  # whatever a foreign object raises
        raise NotPlainError(f"holds what cannot be written: {error}", "it") from None


def _pack_reward(reward: Reward, where: str) -> PackedReward:
    assert isinstance(reward.token_values, Mapping)
    return (
        reward.value,
        to_plain_items(reward.extra, f"{where}.extra", simplify),
        {at: array("f", each).tobytes() for at, each in reward.token_values.items()},
        dict(reward.segment_values),
    )


def _unpack_reward(packed: PackedReward) -> Reward:
    value, extra, of_tokens, of_segments = packed
    return Reward(
        value=value,
        extra=extra,
        token_values={at: array("f", each) for at, each in of_tokens.items()},
        segment_values=of_segments,
    )


def main() -> None:
    """The child: answer requests until standard input closes."""
    serve(_answer)


def _answer(body: bytes) -> bytes:
    try:
        reply = _encode(_reply(_decode_request(body)))
        if len(reply) > MAX_REPLY:
            raise BadRewardError(f"the reward takes {len(reply)} bytes; at most {MAX_REPLY}")
    except BaseException as error:
        return encoder.encode(Reply(failure=make_encodable(Cause.of(error))))
    return reply


def _reply(request: Load | Ask) -> Reply:
    if isinstance(request, Load):
        for function in request.functions:
            function_at(function)
        return Reply()
    members = list(map(unpack_complete, request.subjects))
    function, keywords, group = function_at(request.function), request.keywords, None
    if request.is_group:
        group = Group.of(members[0].uid, members[0].prompt, members)
    subject = members[0] if group is None else group
    value = resolve_outcome(function(subject) if keywords is None else function(**keywords))
    rewards: Sequence[Reward | None] = (
        [check_reward_value(value, members[0])]
        if group is None
        else check_group_values(value, group)
    )
    try:
        return Reply(
            [
                None if each is None else _pack_reward(each, f"rewards[{at}]")
                for at, each in enumerate(rewards)
            ]
        )
    except NotPlainError as error:
        raise BadRewardError(
            f"the reward function returned what cannot leave its process: {error}"
        ) from None
