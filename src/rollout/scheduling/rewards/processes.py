"""Child processes for reward functions that hold the interpreter, crash or do not return."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.chat.group import Group
from rollout.child_processes import ChildDiedError, ChildProcesses, DiedIdleError, Worker
from rollout.errors import ConfigError
from rollout.import_watch import opened_watch
from rollout.scheduling.rewards.encoding import encoded
from rollout.scheduling.rewards.messages import Ask, Load, Reply
from rollout.scheduling.rewards.signatures import verl_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.config import RolloutConfig
    from rollout.function_refs import FunctionRef
    from rollout.scheduling.rewards.functions import LoadedReward, RewardFunctions
    from rollout.types import Cause, Reward
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
        self._threads = threads
        self._functions = list(functions)
        self._load = encoded(Load(self._functions))
        self._processes = ChildProcesses(
            "rollout.scheduling.rewards.child", max_processes=max_processes, cleanup_s=cleanup_s
        )

    async def prepare(self, limit_s: float | None) -> None:
        """Have a process import the functions, in this time.

        Raises:
            ConfigError: It cannot; says why.
        """
        with opened_watch(limit_s) as watch:
            load = encoded(Load(self._functions, watch.file, watch.every_s))
            try:
                with anyio.fail_after(limit_s):
                    async with self._processes.worker() as worker:
                        await _reply_of(worker, load)
            except TimeoutError:
                limit = f"limits.reward_s = {limit_s:g} s"
                slow = watch.describe_slow(self._functions, limit)
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
        assert function.ref is not None
        ref, names = function.ref, function.verl_names

        def write() -> bytes:
            keywords = None
            if names and not isinstance(subject, Group):
                keywords = verl_arguments(names, subject, tokenizer)
            return encoded(Ask.about(ref, subject, keywords))

        rewards = await self._ask(write, begin)
        return rewards if isinstance(subject, Group) else rewards[0]

    async def _ask(
        self, write: Callable[[], bytes], begin: Callable[[], None]
    ) -> list[Reward | None]:
        async with self._processes.worker() as worker:
            body = await self._threads.run("reward", write)
            with suppress(DiedIdleError):
                if not worker.is_new:
                    begin()
                    return (await _reply_of(worker, body)).restored()
            begin()
            await _reply_of(worker, self._load)
            begin()
            return (await _reply_of(worker, body)).restored()

    async def close(self) -> None:
        """End all processes."""
        await self._processes.close()


def make_reward_processes(
    config: RolloutConfig, functions: RewardFunctions, threads: WorkerThreads
) -> RewardProcesses | None:
    """The pool that the configuration asks for, if any; the caller closes it."""
    count, each = config.rewards.processes, (functions.single, functions.group)
    refs = [one.ref for one in each if one is not None and one.ref is not None]
    if not count or not refs:
        return None
    return RewardProcesses(refs, threads, max_processes=count, cleanup_s=config.limits.cleanup_s)


async def _reply_of(worker: Worker, request: bytes) -> Reply:
    try:
        answer = await worker.ask(request)
    except ChildDiedError as error:
        raise RewardProcessError(
            f"its process {_ended(error.exit_code)} before it had answered; another process takes "
            "its place"
        ) from None
    reply = msgspec.msgpack.decode(answer, type=Reply)
    if reply.failure is not None:
        raise RewardRaisedError(reply.failure)
    return reply


def _ended(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was killed by {signal.Signals(-exit_code).name}"
