"""Child processes for reward functions that hold the interpreter, crash or do not return.

The driver's side is `RewardProcesses`, a child's is `answer`; between them go trajectories as
`chat.trajectory_codec` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from rollout.chat.plain_data import NotPlainError, encoder, simplify, to_plain
from rollout.chat.reward_values import BadRewardError, check_rewards
from rollout.chat.trajectory import Group
from rollout.chat.trajectory_codec import CompleteTrajectory, pack_complete, unpack_complete
from rollout.child_processes import ChildDiedError, ChildProcesses, resolve_outcome
from rollout.errors import ConfigError
from rollout.scheduling.rewards.functions import make_verl_arguments
from rollout.types import Reward
from rollout.user_code import FunctionRef, NotImportableError
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.config import RolloutConfig
    from rollout.scheduling.rewards.functions import LoadedReward


class RewardProcessError(Exception):
    """The process of a reward function ended before it had answered."""


class RewardRequest(msgspec.Struct):
    """What a reward function is called with.

    Attributes:
        subjects: What it is about: one trajectory, or all members of a group.
        is_group: Whether it takes the group.
        keywords: What it takes in the place of the trajectory, as verl's functions do.
    """

    subjects: list[CompleteTrajectory]
    is_group: bool
    keywords: dict[str, Any] | None


_read_request = msgspec.msgpack.Decoder(RewardRequest).decode
_read_rewards = msgspec.msgpack.Decoder(list[Reward | None]).decode


@asynccontextmanager
async def open_reward_processes(
    config: RolloutConfig, functions: Sequence[LoadedReward | None], threads: WorkerThreads
) -> AsyncIterator[Sequence[LoadedReward | None]]:
    """Yield the functions, to be called in processes where the configuration asks for some.

    A process has imported the functions by then, within `limits.reward_s`; all end with the block.

    Raises:
        ConfigError: They cannot be imported there; says why.
    """
    count = config.rewards.processes
    refs = [each.ref for each in functions if each is not None and each.ref is not None]
    if not count or not refs:
        yield functions
        return
    children = ChildProcesses(__name__, max_processes=count, cleanup_s=config.limits.cleanup_s)
    try:
        try:
            await children.prepare(refs, config.limits.reward_s, "limits.reward_s")
        except NotImportableError as error:
            raise ConfigError(f"rewards.processes: {error}") from error
        processes = RewardProcesses(children, refs, threads)
        yield [each and attrs.evolve(each, processes=processes) for each in functions]
    finally:
        await children.close()


@attrs.frozen
class RewardProcesses:
    """A pool of child processes, each calling one reward function at a time.

    Attributes:
        functions: A process imports them before its first call.
        threads: Where requests are made, since long trajectories take a while.
    """

    children: ChildProcesses
    functions: list[FunctionRef]
    threads: WorkerThreads

    async def score(
        self,
        function: LoadedReward,
        subject: Trajectory | Group,
        tokenizer: Any,
        begin: Callable[[], None],
    ) -> list[Reward | None]:
        """The reward, or those of a group; cancellation kills the process with the process's group.

        Args:
            tokenizer: Decodes responses for functions that were written for verl.
            begin: Called when its time begins: once there is a process and a thread; and again
                after a new process has imported the functions, which may take as long.

        Raises:
            ChildRaisedError: The function raised, or returned what is no reward.
            RewardProcessError: Its process died.
            NotPlainError: The trajectory holds what cannot be handed over.
        """
        assert function.ref is not None
        try:
            async with self.children.worker() as child:
                run = self.threads.run
                body = await run("reward", write_request, function, subject, tokenizer)
                if child.is_new:
                    begin()
                    for each in self.functions:
                        await child.ask(each)
                begin()
                return _read_rewards(await child.ask(function.ref, body))
        except ChildDiedError as error:
            raise RewardProcessError(
                f"its process {error} before it had answered; another process takes its place"
            ) from None


def write_request(function: LoadedReward, subject: Trajectory | Group, tokenizer: Any) -> bytes:
    """Write down what a function is called with.

    Raises:
        NotPlainError: Something in it is no plain data.
    """
    keywords = None
    members = subject.trajectories if isinstance(subject, Group) else [subject]
    try:
        if function.verl_names:
            keywords = make_verl_arguments(function.verl_names, members[0], tokenizer)
            keywords = to_plain(dict(keywords), "arguments", simplify)
        subjects = [pack_complete(each, f"trajectories[{at}]") for at, each in enumerate(members)]
    except NotPlainError as error:
        error.what += ", to be handed over with rewards.processes"
        raise
    return encoder.encode(RewardRequest(subjects, function.is_group, keywords))


def answer(function: Any, body: bytes) -> bytes:
    """The child: the rewards of a request; raises what the function raises."""
    request = _read_request(body)
    members = list(map(unpack_complete, request.subjects))
    subject: Trajectory | Group = members[0]
    if request.is_group:
        subject = Group(uid=members[0].uid, prompt=members[0].prompt, trajectories=tuple(members))
    if request.keywords is None:
        value = resolve_outcome(function(subject))
    else:
        value = resolve_outcome(function(**request.keywords))
    rewards = check_rewards(value, subject)
    return encoder.encode(
        [each and _make_plain(each, f"rewards[{at}].extra") for at, each in enumerate(rewards)]
    )


def _make_plain(reward: Reward, where: str) -> Reward:
    assert isinstance(reward.token_values, Mapping)
    try:
        extra = to_plain(dict(reward.extra), where, simplify)
    except NotPlainError as error:
        raise BadRewardError(
            f"the reward function returned what cannot leave its process: {error}"
        ) from None
    values = {at: list(each) for at, each in reward.token_values.items()}
    return msgspec.structs.replace(reward, extra=extra, token_values=values)
