"""The runtime for callers without an event loop, or with one of their own."""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    NoReturn,
    ParamSpec,
    TypeVar,
    get_args,
)

import anyio

from rollout.bridge import Post, loop_poster, wait_future
from rollout.chat.group import Group
from rollout.chat.trajectory import Trajectory
from rollout.errors import ConfigError, RolloutError
from rollout.function_refs import refuse_while_imported
from rollout.runtime.opening import HOW_TO_OPEN, NotEnteredError, open_rollout
from rollout.runtime.runtime import RolloutRuntime
from rollout.scopes import find_propagating, open_task_group

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from contextlib import AbstractAsyncContextManager

    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

    from rollout.agents.media_intake import MediaFetcher
    from rollout.batch import RolloutBatch
    from rollout.chat import ChatTemplate
    from rollout.config import GroupPolicy, RolloutConfig
    from rollout.engine.core import EngineInfo, EngineLoad
    from rollout.engine.driver.pool import EnginePool
    from rollout.engine.driver.replica_statistics import ReplicaStatistics
    from rollout.engine.routing import Router
    from rollout.runtime.calls import GroupStream
    from rollout.scheduling.rewards.signatures import GroupRewardFunction, RewardFunction
    from rollout.scheduling.sources import Source
    from rollout.tensor_layout import Layout, Trim
    from rollout.types import Prompt

T = TypeVar("T")
P = ParamSpec("P")
#: The loops of anyio.
Backend = Literal["trio", "asyncio"]

logger = logging.getLogger("rollout")


class _Call:
    """One call on the runtime's loop.

    Attributes:
        future: What it returns or raises; done when it has ended.
        is_cancelled: Set by the caller's thread: a call that has not begun does not begin.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self.is_cancelled = False
        self._function = function
        self._scope: anyio.CancelScope | None = None

    async def run(self) -> None:
        """Perform it. Cancelled before it begins, it would still run to its first checkpoint."""
        if self.is_cancelled:
            self.fail()
            return
        with anyio.CancelScope() as self._scope:
            try:
                value = self._function()
                self.future.set_result(await value if inspect.isawaitable(value) else value)
            except BaseException as error:
                if find_propagating(error) is not None:
                    self.fail()
                    raise
                self.future.set_exception(error)

    def end(self) -> None:
        """Cancel it, or have it not begin; on the loop."""
        if self._scope is None:
            self.fail()
        else:
            self._scope.cancel()

    def fail(self) -> None:
        """It was cancelled, or no loop is going to perform it."""
        if not self.future.done():
            why = "the call was cancelled" if self.is_cancelled else "the runtime is closed"
            self.future.set_exception(RolloutError(why))


def _waited_for(
    method: Callable[Concatenate[RolloutRuntime, P], Coroutine[Any, Any, T]],
    *,
    is_ended: bool = True,
) -> Callable[Concatenate[BlockingRollout, P], T]:
    """A method of the runtime, awaited on its loop and waited for in the caller's thread.

    Args:
        is_ended: Whether an exception that reaches the thread meanwhile ends the call.
    """

    @functools.wraps(method)
    def wait(self: BlockingRollout, /, *args: P.args, **named: P.kwargs) -> T:
        function = functools.partial(method, self._runtime, *args, **named)
        if is_ended:
            return self._wait(function)
        result: T = self._start(function).future.result()
        return result

    return wait


def _called(
    method: Callable[Concatenate[RolloutRuntime, P], T],
) -> Callable[Concatenate[BlockingRollout, P], T]:
    """A method of the runtime, called on its loop."""

    @functools.wraps(method)
    def call(self: BlockingRollout, /, *args: P.args, **named: P.kwargs) -> T:
        return self._do(functools.partial(method, self._runtime, *args, **named))

    return call


class BlockingRollout:
    """A `RolloutRuntime` on a thread of its own; made by `open_rollout_blocking`.

    Its methods are the runtime's, waited for in the caller's thread. Every one may be called from
    any thread but the runtime's own, on which async functions and `accept` run: what waits there
    is refused with a `RolloutError`. Ctrl-C, or any other exception
    that reaches a caller while it waits, ends that call's trajectories, leaves as itself, and
    leaves the runtime usable.
    """

    def __init__(
        self, open_runtime: Callable[[], AbstractAsyncContextManager[RolloutRuntime]], backend: str
    ) -> None:
        refuse_while_imported("open_rollout_blocking")
        self._lock, self._closing = threading.Lock(), threading.Lock()
        self._is_running = True  # guarded by `_lock`, and so are `_calls`
        self._calls: set[_Call] = set()
        self._started: Future[tuple[Post, MemoryObjectSendStream[_Call]]] = Future()
        # A daemon: a caller that forgets to close must not hang the exit of its process.
        self._thread = threading.Thread(
            target=self._run, args=(backend,), name="rollout", daemon=True
        )
        self._thread.start()
        with ExitStack() as stack:
            stack.callback(self._stop)
            self._post, self._inbox = self._started.result()
            self._runtime: RolloutRuntime = stack.enter_context(self._entered(open_runtime))[0]
            self._stack = stack.pop_all()
        atexit.register(self.close)

    def __enter__(self) -> BlockingRollout:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    async def __aenter__(self) -> NoReturn:
        self._refuse("is entered by `async with`")

    def _refuse_await(self) -> NoReturn:
        self._refuse("is awaited")

    __await__ = _refuse_await

    def _refuse(self, how: str) -> NoReturn:
        self.close()
        raise NotEnteredError(
            f"open_rollout_blocking {how}; {HOW_TO_OPEN}, or `with` in code that is not async"
        )

    async def __aexit__(self, *_error: object) -> None:
        pass

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
        return BlockingEngines(self._runtime.engines, self)

    generate = _waited_for(RolloutRuntime.generate)
    collect = _waited_for(RolloutRuntime.collect)
    make_batch = _waited_for(RolloutRuntime.make_batch)
    discard_carried = _waited_for(RolloutRuntime.discard_carried)
    # An exception that reaches the thread while it waits for these leaves the engines to them.
    update_weights = _waited_for(RolloutRuntime.update_weights, is_ended=False)
    sleep = _waited_for(RolloutRuntime.sleep, is_ended=False)
    wake_up = _waited_for(RolloutRuntime.wake_up, is_ended=False)
    flush_cache = _waited_for(RolloutRuntime.flush_cache, is_ended=False)
    cancel = _called(RolloutRuntime.cancel)
    statistics = _called(RolloutRuntime.statistics)
    explain = _called(RolloutRuntime.explain)

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
        call = _Call(
            lambda: self._runtime.generate(
                prompts, samples=samples, step=step, validate=validate, layout=layout, trim=trim
            )
        )
        try:
            self._send(call)
            batch: RolloutBatch = await wait_future(call.future)
        except BaseException:  # the call's error, a cancellation, or a Ctrl-C in this thread
            if not call.future.done():
                call.is_cancelled = True
                self._post(call.end)
                with anyio.CancelScope(shield=True), suppress(Exception):
                    await wait_future(call.future)
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
        ) as (received, leave):
            yield BlockingTrajectories(received, leave, self)

    @contextmanager
    def stream_groups(
        self,
        source: Source,
        *,
        policy: GroupPolicy | None = None,
        step: int | None = None,
        max_staleness: int | None = None,
        groups_per_step: int | None = None,
    ) -> Iterator[BlockingGroupStream]:
        """`RolloutRuntime.stream_groups`: ``with … as groups``, an iterator of any thread."""
        with self._entered(
            lambda: self._runtime.stream_groups(
                source,
                policy=policy,
                step=step,
                max_staleness=max_staleness,
                groups_per_step=groups_per_step,
            )
        ) as (stream, _):
            yield BlockingGroupStream(stream, self)

    def close(self) -> None:
        """End the runtime and its thread; calls of other threads fail. Idempotent.

        Raises:
            RolloutError: It is called on the runtime's own thread, which it would wait for.
        """
        self._refuse_own_thread("close")
        atexit.unregister(self.close)
        with self._closing:  # a second thread returns when the first one has closed it
            try:
                self._stack.close()
            except Exception:
                logger.exception("the runtime's thread failed")

    def _wait(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What a coroutine function returns on the loop."""
        result: T = self._finish(self._start(function))
        return result

    def _do(self, function: Callable[[], T]) -> T:
        """What a function returns that is called on the loop."""
        result: T = self._finish(self._start(function))
        return result

    def _start(self, function: Callable[[], Any]) -> _Call:
        """Have a function called on the loop."""
        self._refuse_own_thread()
        call = _Call(function)
        try:
            self._send(call)
        except BaseException:
            self._cancel(call)
            raise
        return call

    def _finish(self, call: _Call) -> Any:
        """Wait for a call's end; an exception that reaches this thread meanwhile cancels it."""
        try:
            return call.future.result()
        except BaseException:
            self._cancel(call)
            raise

    def _cancel(self, call: _Call) -> None:
        """Cancel a call, and wait for its end."""
        call.is_cancelled = True
        if call in self._calls:
            self._post(call.end)
            call.future.exception()

    def _send(self, call: _Call) -> None:
        """Have the loop perform a call; where the loop ends first, the call fails.

        The loop is not waited for, as `BlockingPortal` does: a thread that runs a loop of its own
        may not wait for trio, and the two loops may need each other.
        """
        with self._lock:
            if not self._is_running:
                raise RolloutError("the runtime is closed")
            self._calls.add(call)
        call.future.add_done_callback(lambda _: self._calls.discard(call))
        self._post(lambda: self._begin(call))

    def _begin(self, call: _Call) -> None:
        """On the loop, but in no task of it, which alone could start one."""
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # the loop ends
            self._inbox.send_nowait(call)

    def _run(self, backend: str) -> None:
        """The life of the thread."""
        try:
            anyio.run(self._serve, backend=backend)
        except BaseException as error:
            if self._started.done():
                logger.exception("the runtime's thread failed")
            else:
                self._started.set_exception(error)
        finally:
            with self._lock:
                self._is_running = False
            for call in tuple(self._calls):
                call.fail()

    async def _serve(self) -> None:
        inbox, calls = anyio.create_memory_object_stream[_Call](math.inf)
        async with inbox, calls, open_task_group() as tasks:
            self._started.set_result((loop_poster(), inbox))
            async for call in calls:
                tasks.start_soon(call.run)

    def _stop(self) -> None:
        """End the thread."""
        post, inbox = self._started.result()
        post(inbox.close)
        self._thread.join()

    @contextmanager
    def _entered(
        self, manager: Callable[[], AbstractAsyncContextManager[T]]
    ) -> Iterator[tuple[T, Callable[[], None]]]:
        """What an async context manager gives on the loop, and what leaves it; left at the end."""
        opened: Future[tuple[T, anyio.Event]] = Future()

        async def hold_open() -> None:
            async with manager() as value:
                leaving = anyio.Event()
                opened.set_result((value, leaving))
                await leaving.wait()

        def report(ended: Future[None]) -> None:
            if not opened.done():
                opened.set_exception(ended.exception() or RolloutError("the runtime is closed"))

        call = self._start(hold_open)
        call.future.add_done_callback(report)
        try:
            value, leaving = opened.result()

            def leave() -> None:
                self._refuse_own_thread()
                self._post(leaving.set)
                self._finish(call)

            yield value, leave
        except BaseException:
            self._cancel(call)
            raise
        leave()

    def _refuse_own_thread(self, what: str = "a blocking method") -> None:
        """There a wait would have no end."""
        if threading.current_thread() is self._thread:
            raise RolloutError(
                f"{what}: called on the runtime's own thread, on which async functions and accept "
                "run, and which it would wait for; expected another thread"
            )


class BlockingEngines:
    """The `EnginePool` of a runtime on another thread; its methods may be called from any."""

    def __init__(self, pool: EnginePool, runtime: BlockingRollout) -> None:
        self._pool, self._runtime = pool, runtime

    @property
    def info(self) -> EngineInfo:
        """The facts that all replicas share."""
        return self._pool.info

    @property
    def router(self) -> Router:
        """Decides where requests go; its `statistics` say why."""
        return self._pool.router

    def statistics(self) -> tuple[ReplicaStatistics, ...]:
        """`EnginePool.statistics`."""
        return self._runtime._do(self._pool.statistics)

    def loads(self) -> dict[str, EngineLoad]:
        """`EnginePool.loads`."""
        return self._runtime._do(self._pool.loads)

    def drain(self, name: str) -> None:
        """`EnginePool.drain`."""
        self._runtime._do(lambda: self._pool.drain(name))

    def resume(self, name: str) -> None:
        """`EnginePool.resume`."""
        self._runtime._do(lambda: self._pool.resume(name))

    def add_replica(self, *, load_share: float = 1.0) -> str:
        """`EnginePool.add_replica`, waited for in this thread."""
        return self._runtime._wait(lambda: self._pool.add_replica(load_share=load_share))

    def remove_replica(self, name: str, *, drain_s: float | None = None) -> None:
        """`EnginePool.remove_replica`, waited for in this thread."""
        self._runtime._wait(lambda: self._pool.remove_replica(name, drain_s=drain_s))


class BlockingTrajectories(Iterator[Trajectory]):
    """Trajectories of `BlockingRollout.stream`, in the order in which they end."""

    def __init__(
        self,
        stream: MemoryObjectReceiveStream[Trajectory],
        leave: Callable[[], None],
        runtime: BlockingRollout,
    ) -> None:
        self._stream, self._leave, self._runtime = stream, leave, runtime

    def __next__(self) -> Trajectory:
        """The next one, once it has ended; a RolloutError where the stream is over."""
        try:
            return self._runtime._wait(self._stream.receive)
        except anyio.EndOfStream:
            raise StopIteration from None
        except (anyio.ClosedResourceError, RolloutError):
            self._leave()  # the runtime may have been closed, and says so
            raise RolloutError("the stream has been left") from None


class BlockingGroupStream(Iterator[Group]):
    """Groups of `BlockingRollout.stream_groups`, as they finish."""

    def __init__(self, stream: GroupStream, runtime: BlockingRollout) -> None:
        self._stream, self._runtime = stream, runtime

    def __next__(self) -> Group:
        """The next one, once it is accepted."""
        group = self._runtime._wait(self._stream.receive)
        if group is None:
            raise StopIteration
        return group

    def metrics(self) -> dict[str, float]:
        """`GroupStream.metrics`."""
        return self._runtime._do(self._stream.metrics)


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
