"""The runtime for callers without an event loop, or with one of their own."""

from __future__ import annotations

import atexit
import logging
import math
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast, get_args

import anyio

from rollout.bridge import Post, loop_poster, wait_future
from rollout.engine.wire.operations import ALL_TAGS
from rollout.errors import ConfigError, RolloutError
from rollout.function_refs import refuse_while_imported
from rollout.runtime.blocking_groups import BlockingGroups
from rollout.runtime.blocking_views import BlockingEngines, BlockingTrajectories
from rollout.runtime.loop_call import LoopCall
from rollout.runtime.opening import open_rollout
from rollout.scopes import HOW_TO_OPEN, NotEnteredError, open_task_group

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from anyio.abc import TaskGroup
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

    from rollout.agents.media_intake import MediaFetcher
    from rollout.batch import RolloutBatch
    from rollout.chat import ChatTemplate
    from rollout.config import RolloutConfig
    from rollout.engine.weights import UpdateMode, WeightSource
    from rollout.observe.explanation import Explanation
    from rollout.runtime.runtime import RolloutRuntime
    from rollout.runtime.statistics import RuntimeStatistics
    from rollout.scheduling.rewards import GroupRewardFunction, RewardFunction
    from rollout.tensor_layout import Layout, Trim
    from rollout.types import Prompt

T = TypeVar("T")
#: The loops of anyio.
Backend = Literal["trio", "asyncio"]

_HOW = f"{HOW_TO_OPEN}, or `with` in code that is not async"

logger = logging.getLogger("rollout")


async def _read(read: Callable[[], T]) -> T:
    return read()


class BlockingRollout(BlockingGroups):
    """A `RolloutRuntime` on a thread of its own; made by `open_rollout_blocking`.

    Every method may be called from any thread but the runtime's own, on which async functions and
    `accept` run: what waits there is refused with a `RolloutError`. Ctrl-C, or any other exception
    that reaches a caller while it waits, ends that call's trajectories, leaves as itself, and
    leaves the runtime usable.
    """

    def __init__(self, open_runtime: Callable[[], Any], backend: Backend) -> None:
        refuse_while_imported("open_rollout_blocking")
        self._runtime: RolloutRuntime
        self._inbox: MemoryObjectSendStream[LoopCall]
        self._leave: anyio.Event
        self._post: Post
        self._calls: set[LoopCall] = set()
        self._is_ready = threading.Event()
        self._has_ended = False
        started: Future[None] = Future()
        # A daemon: a caller that forgets to close must not hang the exit of its process.
        self._thread = threading.Thread(
            target=self._run, args=(open_runtime, backend, started), name="rollout", daemon=True
        )
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)

    def __enter__(self) -> BlockingRollout:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> NoReturn:
        self.close()
        raise NotEnteredError(f"open_rollout_blocking is entered by `async with`; {_HOW}")

    async def __aexit__(self, *_error: object) -> None:
        pass

    def __await__(self) -> NoReturn:
        self.close()
        raise NotEnteredError(f"open_rollout_blocking is awaited; {_HOW}")

    @property
    def config(self) -> RolloutConfig:
        """What it was opened with."""
        return self._runtime.config

    @property
    def template(self) -> ChatTemplate:
        """The model's tokenizer and chat format."""
        return self._runtime.template

    @property
    def engines(self) -> BlockingEngines:
        """The engines: replicas can be added, removed and drained there while calls run."""
        return BlockingEngines(self._runtime.engines, self._wait)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int | None = None,
        step: int | None = None,
        validate: bool = False,
        layout: Layout = "padded",
        trim: Trim = False,
    ) -> RolloutBatch:
        """`RolloutRuntime.generate`, waited for in this thread."""
        return self._wait(
            lambda: self._runtime.generate(
                prompts, samples=samples, step=step, validate=validate, layout=layout, trim=trim
            )
        )

    async def agenerate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int | None = None,
        step: int | None = None,
        validate: bool = False,
        layout: Layout = "padded",
        trim: Trim = False,
    ) -> RolloutBatch:
        """`RolloutRuntime.generate`, awaited from any trio or asyncio loop in any thread.

        Cancellation, or any other exception that reaches the awaiting task, ends the call's
        trajectories and passes through.
        """
        call = LoopCall(
            lambda: self._runtime.generate(
                prompts, samples=samples, step=step, validate=validate, layout=layout, trim=trim
            )
        )
        try:
            self._hand_over(call)
            batch: RolloutBatch = await wait_future(call.future)
        except BaseException:
            if not call.future.done():  # a cancellation, or a Ctrl-C in this thread
                self._post(call.cancel)
                with anyio.CancelScope(shield=True):
                    await call.settled()
            raise
        return batch

    @contextmanager
    def stream(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int | None = None,
        step: int | None = None,
        validate: bool = False,
    ) -> Iterator[BlockingTrajectories]:
        """`RolloutRuntime.stream`: ``with … as trajectories``, an iterator of any thread.

        Leaving the block cancels the rest and waits for its end.
        """
        with self._entered(
            lambda: self._runtime.stream(prompts, samples=samples, step=step, validate=validate)
        ) as (received, end):
            yield BlockingTrajectories(received, self._wait, end)

    def cancel(
        self, uid: str | None = None, member: int | None = None, *, reason: str = "cancelled"
    ) -> int:
        """`RolloutRuntime.cancel`, from any thread, also while `generate` runs in another."""

        async def cancel() -> int:
            return self._runtime.cancel(uid, member, reason=reason)

        return self._wait(cancel)

    def update_weights(
        self, *, version: int, source: WeightSource, mode: UpdateMode = "abort_and_resume"
    ) -> None:
        """`RolloutRuntime.update_weights`, waited for in this thread.

        An exception that reaches the thread while it waits leaves the engines to it.
        """
        update = self._start(
            lambda: self._runtime.update_weights(version=version, source=source, mode=mode)
        )
        update.future.result()

    def sleep(self, level: int = 1) -> None:
        """`RolloutRuntime.sleep`, waited for in this thread."""
        self._start(lambda: self._runtime.sleep(level)).future.result()

    def wake_up(self, tags: Iterable[str] = ALL_TAGS) -> None:
        """`RolloutRuntime.wake_up`, waited for in this thread."""
        self._start(lambda: self._runtime.wake_up(tags)).future.result()

    def statistics(self) -> RuntimeStatistics:
        """`RolloutRuntime.statistics`, from any thread."""
        return self._wait(partial(_read, self._runtime.statistics))

    def explain(self) -> Explanation:
        """`RolloutRuntime.explain`, from any thread; waits where something blocks the loop."""
        return self._wait(partial(_read, self._runtime.explain))

    def flush_cache(self) -> None:
        """`RolloutRuntime.flush_cache`, waited for in this thread."""
        self._start(self._runtime.flush_cache).future.result()

    def close(self) -> None:
        """End the runtime and its thread; calls of other threads fail. Idempotent.

        Raises:
            RolloutError: It is called on the runtime's own thread, which it would wait for.
        """
        self._refuse_own_thread("close")
        atexit.unregister(self.close)
        self._is_ready.wait()
        self._post(self._leave.set)
        self._thread.join()

    @contextmanager
    def _entered(
        self, manager: Callable[[], AbstractAsyncContextManager[T]]
    ) -> Iterator[tuple[T, Callable[[], None]]]:
        """What an async context manager gives on the loop, and what has it left; it is left after
        the block.
        """
        opened: Future[tuple[T, anyio.Event]] = Future()

        async def keep_open() -> None:
            async with manager() as given:
                leave = anyio.Event()
                opened.set_result((given, leave))
                await leave.wait()

        def give_up(ended: Future[None]) -> None:
            if not opened.done():
                opened.set_exception(ended.exception() or RolloutError("the runtime is closed"))

        self._refuse_own_thread()
        call = LoopCall(keep_open)
        call.future.add_done_callback(give_up)
        try:
            self._hand_over(call)
            given, leave = opened.result()

            def end() -> None:
                self._refuse_own_thread()
                self._post(leave.set)
                self._finish(call)

            yield given, end
        except BaseException:
            self._abandon(call)
            raise
        end()

    def _wait(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What a call returns; an exception that reaches this thread meanwhile ends the call."""
        self._refuse_own_thread()
        return cast("T", self._finish(LoopCall(function), is_new=True))

    def _finish(self, call: LoopCall, *, is_new: bool = False) -> Any:
        """Wait for the end of a call; an exception that reaches this thread brings it about."""
        try:
            if is_new:
                self._hand_over(call)
            return call.future.result()
        except BaseException:
            self._abandon(call)
            raise

    def _abandon(self, call: LoopCall) -> None:
        """End a call, and wait until it has."""
        if not call.future.done():
            self._post(call.cancel)
            call.future.exception()

    def _refuse_own_thread(self, what: str = "a blocking method") -> None:
        """There a wait would have no end."""
        if threading.current_thread() is self._thread:
            raise RolloutError(
                f"{what}: called on the runtime's own thread, on which async functions and accept "
                "run, and which it would wait for; expected another thread"
            )

    def _start(self, function: Callable[[], Awaitable[Any]]) -> LoopCall:
        """Have it called on the loop, to its end."""
        self._refuse_own_thread()
        call = LoopCall(function)
        self._hand_over(call)
        return call

    def _hand_over(self, call: LoopCall) -> None:
        """Have the loop perform a call; a Ctrl-C in here says nothing about whether it will."""
        self._calls.add(call)
        call.future.add_done_callback(lambda _: self._calls.discard(call))
        self._post(lambda: self._accept(call))
        # The loop may end before the callback runs, and its thread's own sweep may have passed by
        # then.
        if self._has_ended:
            self._fail_calls()

    def _accept(self, call: LoopCall) -> None:
        """On the loop, but in no task of it: the call is handed to one that can start tasks."""
        call.is_accepted = True
        try:
            self._inbox.send_nowait(call)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            call.fail()

    def _fail_calls(self) -> None:
        for call in tuple(self._calls):
            call.fail()

    def _run(self, open_runtime: Callable[[], Any], backend: str, started: Future[None]) -> None:
        try:
            anyio.run(self._serve, open_runtime, started, backend=backend)
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            else:
                logger.exception("the runtime's thread failed")
        finally:
            self._is_ready.set()
            self._has_ended = True
            self._fail_calls()

    async def _serve(self, open_runtime: Callable[[], Any], started: Future[None]) -> None:
        self._leave = anyio.Event()
        self._post = loop_poster()
        self._is_ready.set()
        self._inbox, calls = anyio.create_memory_object_stream[LoopCall](math.inf)
        async with open_task_group() as tasks, self._inbox:
            tasks.start_soon(self._start_calls, calls, tasks)
            tasks.start_soon(self._leave_while_opening, started, tasks.cancel_scope)
            async with open_runtime() as self._runtime:
                started.set_result(None)
                await self._leave.wait()
        if not started.done():
            started.set_exception(RolloutError("the runtime was closed while it opened"))

    async def _start_calls(
        self, calls: MemoryObjectReceiveStream[LoopCall], tasks: TaskGroup
    ) -> None:
        async with calls:
            async for call in calls:
                tasks.start_soon(call.run)

    async def _leave_while_opening(self, started: Future[None], opening: anyio.CancelScope) -> None:
        await self._leave.wait()
        if not started.done():
            opening.cancel()


def open_rollout_blocking(
    config: RolloutConfig,
    tools: Sequence[Any] = (),
    reward: RewardFunction | str | None = None,
    interactions: Sequence[Any] = (),
    *,
    group_reward: GroupRewardFunction | str | None = None,
    media_fetcher: MediaFetcher | None = None,
    backend: Backend = "trio",
    resume: bool = False,
) -> BlockingRollout:
    """A runtime for callers without a loop, or with one of their own; use it as a context manager.

    Args:
        config, tools, reward, interactions, group_reward, media_fetcher, resume: As for
            `open_rollout`.
        backend: The loop on which async tools, rewards and agents run.

    Raises:
        ConfigError: `backend` is neither.
        As `open_rollout`.
    """
    if backend not in get_args(Backend):
        known = " or ".join(map(repr, get_args(Backend)))
        raise ConfigError(f"backend = {backend!r:.80}: expected {known}")
    return BlockingRollout(
        lambda: open_rollout(
            config,
            tools,
            reward,
            interactions,
            group_reward=group_reward,
            media_fetcher=media_fetcher,
            resume=resume,
        ),
        backend,
    )
