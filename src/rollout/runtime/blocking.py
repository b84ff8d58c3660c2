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
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    contextmanager,
    suppress,
)
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
from rollout.engine.pool.pool import EnginePool
from rollout.errors import ConfigError, RolloutError
from rollout.function_refs import refuse_while_imported
from rollout.runtime.calls import GroupStream
from rollout.runtime.opening import HOW_TO_OPEN, NotEnteredError, open_rollout
from rollout.runtime.runtime import RolloutRuntime
from rollout.scopes import find_propagating, open_task_group

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

    from rollout.agents.media_intake import MediaFetcher
    from rollout.batch import RolloutBatch
    from rollout.chat import ChatTemplate
    from rollout.config import RolloutConfig
    from rollout.engine.core import EngineInfo
    from rollout.engine.routing import Router
    from rollout.scheduling.rewards.functions import GroupRewardFunction, RewardFunction
    from rollout.tensor_layout import Layout, Trim
    from rollout.types import Prompt

T = TypeVar("T")
P = ParamSpec("P")
#: The loops of anyio.
Backend = Literal["trio", "asyncio"]

logger = logging.getLogger("rollout")


class _Call(Future[Any]):
    """A call on the runtime's loop; done when it has ended, or will not begin."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function
        self._scope: anyio.CancelScope | None = None

    async def perform(self) -> None:
        """Perform it, unless its caller has given it up: it would run to its first checkpoint."""
        if not self.set_running_or_notify_cancel():
            return
        with anyio.CancelScope() as self._scope:
            try:
                value = self._function()
                self.set_result(await value if inspect.isawaitable(value) else value)
            except BaseException as error:
                if find_propagating(error) is not None:
                    self.fail()
                    raise
                self.set_exception(error)

    def stop(self) -> None:
        """Cancel it once it has begun; on the loop."""
        if self._scope is not None:
            self._scope.cancel()

    def fail(self) -> None:
        """Report that no loop is going to perform it to its end."""
        if not self.done():
            self.set_exception(RolloutError("the runtime is closed"))


def _delegate(method: Callable[..., Any], *, is_ended: bool = True) -> Callable[..., Any]:
    """A method of what `self` stands for, performed on the loop and waited for in this thread."""

    @functools.wraps(method)
    def wait(self: BlockingRollout | BlockingEngines, /, *args: Any, **named: Any) -> Any:
        function = functools.partial(method, self._target, *args, **named)
        return self._host._wait(function, is_ended=is_ended)

    return wait


def _waited_for(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], *, is_ended: bool = True
) -> Callable[Concatenate[Any, P], T]:
    """Delegate to an async method.

    Args:
        is_ended: Whether an exception that reaches the thread meanwhile ends the call.
    """
    return _delegate(method, is_ended=is_ended)


def _called(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Delegate to a method that waits for nothing."""
    return _delegate(method)


def _entered(
    method: Callable[Concatenate[Any, P], AbstractAsyncContextManager[Any]],
    wrap: type[T],
) -> Callable[Concatenate[Any, P], AbstractContextManager[T]]:
    """Delegate to an async context manager; `wrap` makes what is waited for in any thread."""

    @functools.wraps(method)
    @contextmanager
    def enter(self: BlockingRollout, /, *args: P.args, **named: P.kwargs) -> Iterator[T]:
        manager = functools.partial(method, self._target, *args, **named)
        with self._hold_open(manager) as (value, leave):
            yield wrap(value, leave, self)  # type: ignore[call-arg]

    gives = f"Iterator[{wrap.__name__}]"
    shown = inspect.signature(method).replace(return_annotation=gives)
    enter.__signature__ = shown  # type: ignore[attr-defined]  # for `help`
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
    any thread but the runtime's own, on which async functions and `accept` run: what waits there
    is refused with a `RolloutError`. Ctrl-C, or any other exception
    that reaches a caller while it waits, ends that call's trajectories, leaves as itself, and
    leaves the runtime usable.
    """

    def __init__(
        self, open_runtime: Callable[[], AbstractAsyncContextManager[RolloutRuntime]], backend: str
    ) -> None:
        refuse_while_imported("open_rollout_blocking")
        self._host = self
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
            self._target: RolloutRuntime = stack.enter_context(self._hold_open(open_runtime))[0]
            self._stack = stack.pop_all()
        atexit.register(self.close)

    def __enter__(self) -> BlockingRollout:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    async def __aenter__(self) -> NoReturn:
        self._refuse("is entered by `async with`")

    async def __aexit__(self, *_error: object) -> None:
        pass

    def _refuse_await(self) -> NoReturn:
        self._refuse("is awaited")

    __await__ = _refuse_await

    def _refuse(self, how: str) -> NoReturn:
        self.close()
        raise NotEnteredError(
            f"open_rollout_blocking {how}; {HOW_TO_OPEN}, or `with` in code that is not async"
        )

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
            lambda: self._target.generate(
                prompts, samples=samples, step=step, validate=validate, layout=layout, trim=trim
            )
        )
        try:
            self._send(call)
            batch: RolloutBatch = await wait_future(call)
        except BaseException:  # the call's error, a cancellation, or a Ctrl-C in this thread
            if self._begin_end(call):
                with anyio.CancelScope(shield=True), suppress(Exception):
                    await wait_future(call)
            raise
        return batch

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

    def _wait(self, function: Callable[[], Any], *, is_ended: bool = True) -> Any:
        """What a function returns on the loop, awaited there where it can be.

        Args:
            is_ended: Whether an exception that reaches this thread meanwhile ends the call.
        """
        call = self._start(function)
        return self._finish(call) if is_ended else call.result()

    def _start(self, function: Callable[[], Any]) -> _Call:
        """Have a function called on the loop."""
        self._refuse_own_thread("a blocking method")
        call = _Call(function)
        try:
            self._send(call)
        except BaseException:
            self._end(call)
            raise
        return call

    def _finish(self, call: _Call) -> Any:
        """Wait for a call's end; an exception that reaches this thread meanwhile cancels it."""
        try:
            return call.result()
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

    def _send(self, call: _Call) -> None:
        """Have the loop perform a call; where the loop ends first, the call fails.

        The loop is not waited for, as `BlockingPortal` does: a thread that runs a loop of its own
        may not wait for trio, and the two loops may need each other.
        """
        with self._lock:
            if not self._is_running:
                raise RolloutError("the runtime is closed")
            self._calls.add(call)
        call.add_done_callback(lambda _: self._calls.discard(call))

        def begin() -> None:  # on the loop, but in no task of it, which alone could start one
            with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # the loop ends
                self._inbox.send_nowait(call)

        self._post(begin)

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
                tasks.start_soon(call.perform)

    def _stop(self) -> None:
        """End the thread."""
        self._post(self._inbox.close)
        self._thread.join()

    @contextmanager
    def _hold_open(
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
                is_given_up = ended.cancelled()
                closed = RolloutError("the runtime is closed")
                opened.set_exception(closed if is_given_up else ended.exception() or closed)

        call = self._start(hold_open)
        call.add_done_callback(report)
        try:
            value, leaving = opened.result()

            def leave() -> None:
                self._refuse_own_thread("a blocking method")
                self._post(leaving.set)
                self._finish(call)

            yield value, leave
        except BaseException:
            self._end(call)
            raise
        leave()

    def _refuse_own_thread(self, what: str) -> None:
        """There a wait would have no end."""
        if threading.current_thread() is self._thread:
            raise RolloutError(
                f"{what}: called on the runtime's own thread, on which async functions and accept "
                "run, and which it would wait for; expected another thread"
            )


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
