"""The runtime for callers without an event loop, or with one of their own."""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    contextmanager,
    suppress,
)
from threading import get_ident
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    get_args,
)

import anyio
import anyio.to_thread
from anyio.from_thread import start_blocking_portal

from rollout.bridge import loop_poster, wait_future
from rollout.chat.trajectory import Group, Trajectory
from rollout.engine.pool.pool import EnginePool
from rollout.errors import ConfigError, RolloutError
from rollout.runtime.opening import HOW_TO_OPEN, NotEnteredError, open_rollout
from rollout.runtime.runtime import RolloutRuntime
from rollout.scheduling.source_calls import GroupStream
from rollout.scopes import find_propagating
from rollout.user_code import refuse_while_imported

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from anyio.streams.memory import MemoryObjectReceiveStream

    from rollout.agents.media_intake import MediaFetcher
    from rollout.chat import ChatTemplate
    from rollout.config import RolloutConfig
    from rollout.engine.core import EngineInfo
    from rollout.engine.routing import Router
    from rollout.scheduling.rewards.functions import GroupRewardFunction, RewardFunction

T = TypeVar("T")
P = ParamSpec("P")
#: The loops of anyio.
Backend = Literal["trio", "asyncio"]

logger = logging.getLogger("rollout")


def _runs_trio() -> bool:
    """Whether trio runs in this thread, where it refuses to wait for another loop."""
    trio = sys.modules.get("trio")
    return trio is not None and bool(trio.lowlevel.in_trio_run())


class _Call(Future[Any]):
    """A call on the runtime's loop; done when it has ended, or will not begin."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function
        self._scope: anyio.CancelScope

    async def perform(self) -> None:
        """Perform it, unless its caller has given it up: it would run to its first checkpoint."""
        if not self.set_running_or_notify_cancel():
            return
        with anyio.CancelScope() as self._scope:
            try:
                value = self._function()
                self.set_result(await value if inspect.isawaitable(value) else value)
            except KeyboardInterrupt as error:  # an agent's own: Ctrl-C reaches the main thread
                self.set_exception(error)
            except BaseException as error:
                is_over = find_propagating(error) is not None
                self.set_exception(RolloutError("the runtime is closed") if is_over else error)
                if is_over:
                    raise

    def stop(self) -> None:
        """Cancel it once it has begun; on the loop."""
        self._scope.cancel()


def _waited_for(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], *, is_ended: bool = True
) -> Callable[Concatenate[Any, P], T]:
    """An async method of what `self` stands for, run on the loop and waited for in this thread.

    Args:
        is_ended: Whether an exception that reaches the thread meanwhile ends the call.
    """
    return _called(method, is_ended=is_ended)  # type: ignore[arg-type]


def _called(
    method: Callable[Concatenate[Any, P], T], *, is_ended: bool = True
) -> Callable[Concatenate[Any, P], T]:
    """A method of what `self` stands for, called on the loop and waited for in this thread."""

    @functools.wraps(method)
    def wait(self: Any, /, *args: P.args, **named: P.kwargs) -> Any:
        function = functools.partial(method, self._target, *args, **named)
        return self._host._wait(function, is_ended=is_ended)

    return wait


def _awaited(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """An async method of what `self` stands for, awaited from any trio or asyncio loop.

    Cancellation, or any other exception that reaches the awaiting task, ends the call's
    trajectories and passes through.
    """

    @functools.wraps(method)
    async def run(self: BlockingRollout, /, *args: P.args, **named: P.kwargs) -> T:
        function = functools.partial(method, self._target, *args, **named)
        call = _Call(function)
        try:
            await anyio.to_thread.run_sync(self._start, call)
            result: T = await wait_future(call)
        except BaseException:  # the call's error, a cancellation, or a Ctrl-C in this thread
            if self._begin_end(call):
                with anyio.CancelScope(shield=True), suppress(Exception):
                    await wait_future(call)
            raise
        return result

    return run


def _entered(
    method: Callable[Concatenate[Any, P], AbstractAsyncContextManager[Any]],
    wrap: Callable[[Any, Callable[[], None], BlockingRollout], T],
) -> Callable[Concatenate[Any, P], AbstractContextManager[T]]:
    """An async context manager of the runtime's; `wrap` makes what any thread waits for."""

    @functools.wraps(method)
    @contextmanager
    def enter(self: BlockingRollout, /, *args: P.args, **named: P.kwargs) -> Iterator[T]:
        with self._enter(functools.partial(method, self._target, *args, **named)) as entered:
            yield wrap(*entered, self)

    shown = inspect.signature(method)
    gives = f"Iterator[{getattr(wrap, '__name__', '')}]"
    enter.__signature__ = shown.replace(return_annotation=gives)  # type: ignore[attr-defined]
    return enter


class BlockingTrajectories(Iterator[Trajectory]):
    """Trajectories of `BlockingRollout.stream`, in the order in which they end."""

    def __init__(
        self,
        stream: MemoryObjectReceiveStream[Trajectory],
        leave: Callable[[], None],
        host: BlockingRollout,
    ) -> None:
        self._stream, self._leave, self._host = stream, leave, host

    def __next__(self) -> Trajectory:
        """The next one, once it has ended; a RolloutError where the stream is over."""
        try:
            trajectory: Trajectory = self._host._wait(self._stream.receive)
        except anyio.EndOfStream:
            raise StopIteration from None
        except (anyio.ClosedResourceError, RolloutError):
            self._leave()  # the runtime may have been closed, and says so
            raise RolloutError("the stream has been left") from None
        return trajectory


class BlockingGroupStream(Iterator[Group]):
    """Groups of `BlockingRollout.stream_groups`, as they finish."""

    def __init__(
        self, stream: GroupStream, _leave: Callable[[], None], host: BlockingRollout
    ) -> None:
        self._target, self._host = stream, host

    def __next__(self) -> Group:
        """The next one, once it is accepted."""
        group: Group | None = self._host._wait(self._target.receive)
        if group is None:
            raise StopIteration
        return group

    metrics = _called(GroupStream.metrics)


class BlockingEngines:
    """The `EnginePool` of a runtime on another thread; its methods may be called from any."""

    def __init__(self, pool: EnginePool, host: BlockingRollout) -> None:
        self._target, self._host = pool, host

    @property
    def info(self) -> EngineInfo:
        """The facts that all replicas share."""
        return self._target.info

    @property
    def router(self) -> Router:
        """Decides where requests go; its `statistics` say why."""
        return self._target.router

    statistics = _called(EnginePool.statistics)
    loads = _called(EnginePool.loads)
    drain = _called(EnginePool.drain)
    resume = _called(EnginePool.resume)
    add_replica = _waited_for(EnginePool.add_replica)
    remove_replica = _waited_for(EnginePool.remove_replica)


class BlockingRollout:
    """A `RolloutRuntime` on a thread of its own; made by `open_rollout_blocking`.

    Its methods are the runtime's, waited for in the caller's thread. Every one may be called from
    any thread but the runtime's own, on which async functions and `accept` run, and those that run
    trio: what waits there is refused with a `RolloutError`. Ctrl-C, or any other exception
    that reaches a caller while it waits, ends that call's trajectories, leaves as itself, and
    leaves the runtime usable.
    """

    def __init__(
        self, open_runtime: Callable[[], AbstractAsyncContextManager[RolloutRuntime]], backend: str
    ) -> None:
        refuse_while_imported("open_rollout_blocking")
        if _runs_trio():
            raise NotEnteredError(f"open_rollout_blocking is called in a task; {HOW_TO_OPEN}")
        self._host, self._process = self, os.getpid()
        self._lock, self._closing = threading.Lock(), threading.Lock()
        self._is_open = True  # guarded by `_lock`
        with ExitStack() as stack:
            # Its thread is a daemon: a caller that forgets to close must not hang the exit.
            portal = start_blocking_portal(backend, name="rollout")
            self._portal = stack.enter_context(portal)
            self._post, self._thread = self._portal.call(lambda: (loop_poster(), get_ident()))
            stack.callback(self._end_calls)
            self._target: RolloutRuntime = stack.enter_context(self._enter(open_runtime))[0]
            self._stack = stack.pop_all()
        atexit.register(self.close)

    def __enter__(self) -> BlockingRollout:
        return self

    def __exit__(self, kind: object, *_error: object) -> None:
        try:
            self.close()
        except Exception:
            if kind is None:
                raise
            logger.exception("the runtime's thread failed")  # the block's own error goes first

    @property
    def config(self) -> RolloutConfig:
        """What it was opened with."""
        return self._target.config

    @property
    def template(self) -> ChatTemplate:
        """The model's tokenizer and chat format."""
        return self._target.template

    @property
    def engines(self) -> BlockingEngines:
        """The engines: replicas can be added, removed and drained there while calls run."""
        return BlockingEngines(self._target.engines, self)

    generate = _waited_for(RolloutRuntime.generate)
    agenerate = _awaited(RolloutRuntime.generate)
    collect = _waited_for(RolloutRuntime.collect)
    make_batch = _waited_for(RolloutRuntime.make_batch)
    discard_carried = _waited_for(RolloutRuntime.discard_carried)
    # Leaving the block of these cancels the rest, and waits for its end.
    stream = _entered(RolloutRuntime.stream, BlockingTrajectories)
    stream_groups = _entered(RolloutRuntime.stream_groups, BlockingGroupStream)
    # An exception that reaches the thread while it waits for these leaves the engines to them.
    update_weights = _waited_for(RolloutRuntime.update_weights, is_ended=False)
    sleep = _waited_for(RolloutRuntime.sleep, is_ended=False)
    wake_up = _waited_for(RolloutRuntime.wake_up, is_ended=False)
    flush_cache = _waited_for(RolloutRuntime.flush_cache, is_ended=False)
    cancel = _called(RolloutRuntime.cancel)
    statistics = _called(RolloutRuntime.statistics)
    explain = _called(RolloutRuntime.explain)

    def close(self) -> None:
        """End the runtime and its thread; calls of other threads fail. Idempotent.

        Raises:
            RolloutError: It is called on the runtime's own thread, which it would wait for.
            Exception: What closing the runtime raised.
        """
        if os.getpid() != self._process:  # a fork, which has neither its thread nor its engines
            return
        self._refuse_thread("close")
        atexit.unregister(self.close)
        with self._closing:  # a second thread returns when the first one has closed it
            self._stack.close()

    def _wait(self, function: Callable[[], Any], *, is_ended: bool = True) -> Any:
        """What a function returns on the loop, awaited there where it can be.

        Args:
            is_ended: Whether an exception that reaches this thread meanwhile ends the call.
        """
        call = _Call(function)
        self._start(call)
        try:
            return call.result()
        except BaseException:
            if is_ended:
                self._end(call)
            raise

    def _start(self, call: _Call) -> None:
        """Have a call performed on the loop, which this thread waits for until it begins."""
        self._refuse_thread("a blocking method")
        try:
            with self._lock:
                if not self._is_open:
                    raise RolloutError("the runtime is closed")
                self._portal.start_task_soon(call.perform)
        except RuntimeError:  # the loop has ended by itself
            raise RolloutError("the runtime is closed") from None
        except BaseException:
            self._end(call)
            raise

    def _end(self, call: _Call) -> None:
        """Cancel a call, and wait for its end."""
        if self._begin_end(call):
            call.exception()

    def _begin_end(self, call: _Call) -> bool:
        """Cancel a call; whether it has begun and not ended."""
        if call.cancel() or call.done():
            return False
        self._post(call.stop)
        return True

    @contextmanager
    def _enter(
        self, manager: Callable[[], AbstractAsyncContextManager[T]]
    ) -> Iterator[tuple[T, Callable[[], None]]]:
        """What an async context manager gives on the loop, and what leaves it; left at the end."""
        opened: Future[tuple[T, anyio.Event]] = Future()

        async def hold_open() -> None:
            async with manager() as value:
                leaving = anyio.Event()
                opened.set_result((value, leaving))
                await leaving.wait()

        call = _Call(hold_open)
        self._start(call)
        try:
            wait([opened, call], return_when=FIRST_COMPLETED)
            if not opened.done():
                call.result()  # raises
            value, leaving = opened.result()

            def leave() -> None:
                self._refuse_thread("a blocking method")
                self._post(leaving.set)
                call.result()

            yield value, leave
            leave()
        except BaseException:
            self._end(call)
            raise

    def _end_calls(self) -> None:
        """Refuse further calls, and end those that are left, such as streams that nobody leaves."""
        with self._lock:
            self._is_open = False
        self._portal.call(self._portal.stop, True)

    def _refuse_thread(self, what: str) -> None:
        """Refuse to wait in a thread where a wait would have no end, or stop a loop of trio's."""
        if get_ident() == self._thread:
            raise RolloutError(
                f"{what}: called on the runtime's own thread, on which async functions and accept "
                "run, and which it would wait for; expected another thread"
            )
        if _runs_trio():
            raise RolloutError(f"{what}: called in a task of trio's; expected another thread")


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
    open_runtime = functools.partial(
        open_rollout,
        config,
        tools,
        reward,
        interactions,
        group_reward=group_reward,
        media_fetcher=media_fetcher,
        resume=resume,
    )
    return BlockingRollout(open_runtime, backend)
