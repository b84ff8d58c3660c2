"""The sandboxes of a runtime's trajectories: one for each, opened when it is first used.

A trajectory's agent, its tools and its reward share one handle (`TrajectorySandbox`). Opening runs
in a task of the runtime, whoever asked for it: a tool that is cancelled meanwhile, or given up,
takes nothing with it.
"""

from __future__ import annotations

import functools
import logging
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import anyio
import attrs

from rollout.config.sandbox_section import SandboxSpec
from rollout.errors import ConfigError, SandboxError, SandboxLost, SandboxUnavailable
from rollout.limits import paused_call
from rollout.sandbox.api import MIB, Sandbox
from rollout.sandbox.pool import PoolStatistics, SandboxPool
from rollout.sandbox.providers import open_provider
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence

    from anyio.abc import TaskGroup

    from rollout.config import SandboxConfig

logger = logging.getLogger("rollout.sandbox")
P = ParamSpec("P")
R = TypeVar("R")


class Sandboxes:
    """The provider and the pool of a runtime; nothing of them is there before the first use.

    Args:
        config: Says who makes sandboxes, what they are, and how many.
        cleanup_s: How long closing one may take.

    Attributes:
        spec: What they are unless a prompt says otherwise.
        pool: None until somebody needs it.
        tasks: Where they are opened; None while nothing is served.
    """

    def __init__(self, config: SandboxConfig, cleanup_s: float) -> None:
        self._config, self._cleanup_s = config, cleanup_s
        names = [field.name for field in attrs.fields(SandboxSpec)]
        self.spec = SandboxSpec(**{name: getattr(config, name) for name in names})
        self.pool: SandboxPool | None = None
        self.tasks: TaskGroup | None = None
        self._failure: Exception | None = None

    @asynccontextmanager
    async def serving(self, *, is_needed: bool) -> AsyncIterator[None]:
        """Sandboxes may be opened within the block; at its end none is left.

        Args:
            is_needed: Whether it is known that one will be: the provider is looked for at once
                then, as where the configuration names one or keeps some warm.

        Raises:
            SandboxUnavailable: It cannot be used here.
            ConfigError: Its options are wrong.
        """
        async with AsyncExitStack() as stack, open_task_group() as tasks:
            self._stack, self.tasks, self._finding = stack, tasks, anyio.Lock()
            try:
                if is_needed or self._config.warm or self._config.provider != "auto":
                    await self.find_pool()
                yield
            finally:
                self.tasks = None

    def spec_for(self, extra: Mapping[str, Any]) -> SandboxSpec:
        """What the sandbox of a prompt with this `extra` is to be: ``extra["sandbox"]`` differs.

        Raises:
            ConfigError: A key is unknown, or a value wrong.
        """
        values = extra.get("sandbox")
        return self.spec if values is None else self.spec.merge(values)

    def statistics(self) -> PoolStatistics | None:
        """The counts of this moment; None where none was ever asked for."""
        return None if self.pool is None else self.pool.statistics()

    async def find_pool(self) -> SandboxPool:
        """The pool, which is open until the runtime closes; a failure is one for everybody.

        Raises:
            SandboxUnavailable: The provider cannot be used here.
            ConfigError: Its options are wrong.
        """
        async with self._finding:
            if self.pool is None and self._failure is None:
                try:
                    self.pool = await self._open_pool(self._config)
                except Exception as error:
                    self._failure = error if isinstance(error, ConfigError) else _wrap(error)
        if self._failure is not None:
            raise type(self._failure)(str(self._failure)) from self._failure
        assert self.pool is not None
        return self.pool

    async def _open_pool(self, config: SandboxConfig) -> SandboxPool:
        opening = open_provider(config.provider, **config.provider_options)
        pool = SandboxPool(
            await self._stack.enter_async_context(opening),
            spec=self.spec,
            max_open=config.max_open,
            max_creating=config.max_creating,
            creations_per_min=config.creations_per_min,
            warm=config.warm,
            cleanup_s=self._cleanup_s,
        )
        self._stack.push_async_callback(pool.close)
        if self.tasks is not None:
            self.tasks.start_soon(pool.keep_warm)
        return pool


def _wrap(error: Exception) -> SandboxError:
    """Why there is no sandbox, which is a provider's own error unless it is one of ours."""
    if isinstance(error, SandboxError):
        return error
    logger.warning("the provider of sandboxes failed", exc_info=error)
    return SandboxUnavailable(f"no sandbox: {type(error).__name__}: {error}")


def _open_first(
    method: Callable[Concatenate[Sandbox, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[TrajectorySandbox, P], Coroutine[Any, Any, R]]:
    """This method of the sandbox that a `TrajectorySandbox` opens."""

    async def call(self: TrajectorySandbox, /, *args: P.args, **options: P.kwargs) -> R:
        sandbox = await self._open()
        try:
            result: R = await getattr(sandbox, method.__name__)(*args, **options)
        except SandboxLost as error:
            if not self.is_closed:
                self.failure = self.failure or error
            raise
        return result

    functools.update_wrapper(call, method)
    return call


class TrajectorySandbox:
    """A sandbox that is opened at its first use; it is a `Sandbox`.

    A `SandboxLost` and a failure to open it end the trajectory as failed, whatever the code does
    that met them.

    Args:
        source: Opens it; None where there is no runtime.
        spec: What it is to be.
        cleanup_s: How long closing it may take.
        is_beside: Whether it waits for no room: whoever opens it has one already.

    Attributes:
        failure: Why it was not opened, or was lost.
        is_closed: Whether it was closed.
        opens_since: Since when somebody waits for it, on the loop's clock; None where nobody does.
    """

    def __init__(
        self,
        source: Sandboxes | None = None,
        spec: SandboxSpec | None = None,
        *,
        cleanup_s: float = 5.0,
        is_beside: bool = False,
    ) -> None:
        self._source, self._cleanup_s, self._is_beside = source, cleanup_s, is_beside
        self.spec = SandboxSpec() if spec is None else spec
        self.is_closed = False
        self.failure: SandboxError | None = None
        self.opens_since: float | None = None
        self._wait_s = 0.0
        self._sandbox: Sandbox | None = None
        #: Set once it is there, or will not be; None until somebody asks for it.
        self._is_over: anyio.Event | None = None
        self._scope: anyio.CancelScope | None = None
        self._judges: tuple[TrajectorySandbox, ...] = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id or 'not opened'}>"

    @property
    def id(self) -> str:
        """Its name; empty until it is open."""
        return "" if self._sandbox is None else self._sandbox.id

    @property
    def workdir(self) -> str:
        """What relative paths are relative to; "." where nobody knows until it is open."""
        return (self.spec.workdir or ".") if self._sandbox is None else self._sandbox.workdir

    @property
    def opened(self) -> int:
        """How many were opened, with those of `fresh`."""
        return (self._sandbox is not None) + sum(judge.opened for judge in self._judges)

    @property
    def wait_s(self) -> float:
        """Seconds from asking for them until they were open."""
        return self._wait_s + sum(judge.wait_s for judge in self._judges)

    @property
    def was_used(self) -> bool:
        """Whether there may be something to close."""
        return self._is_over is not None or bool(self._judges)

    @property
    def is_open(self) -> bool:
        """Whether it is there."""
        return self._sandbox is not None and not self.is_closed

    exec = _open_first(Sandbox.exec)
    read_file = _open_first(Sandbox.read_file)
    write_file = _open_first(Sandbox.write_file)
    upload = _open_first(Sandbox.upload)
    download = _open_first(Sandbox.download)
    expose_port = _open_first(Sandbox.expose_port)
    host_url = _open_first(Sandbox.host_url)
    snapshot = _open_first(Sandbox.snapshot)

    @asynccontextmanager
    async def fresh(
        self, *, artifacts: Sequence[str] = (), max_bytes: int = 64 * MIB
    ) -> AsyncIterator[TrajectorySandbox]:
        """Another sandbox of the same kind for the block, in which no agent has been.

        It waits for no room in the pool, since its trajectory has one already.

        Args:
            artifacts: Files and directories that are copied into it, to the same paths.
            max_bytes: Of one of them.

        Raises:
            FileNotFoundError: There is no such file.
            SandboxLimit: One is larger than `max_bytes`.
            SandboxError: It cannot be opened, or an artifact is neither a file nor a directory.
        """
        if isinstance(artifacts, str):
            raise ValueError(f"artifacts = {artifacts!r:.80}: expected a sequence of paths")
        judge = TrajectorySandbox(
            self._source, self.spec, cleanup_s=self._cleanup_s, is_beside=True
        )
        self._judges = (*self._judges, judge)
        try:
            for path in artifacts:
                with tempfile.TemporaryDirectory(prefix="rollout-artifact-") as directory:
                    local = anyio.Path(directory, "artifact")
                    await self.download(path, Path(local), max_bytes=max_bytes)
                    if await local.is_file():
                        result = await self.exec(["test", "-x", path])
                        await local.chmod(0o644 if result.exit_code else 0o755)
                    await judge.upload(Path(local), path)
            yield judge
        finally:
            await judge.close()

    async def close(self) -> None:
        """End it, and those of `fresh`; nothing can be done in it any more.

        Idempotent, shielded and bounded. What has not been opened by then will not be.
        """
        self.is_closed = True
        for judge in self._judges:
            await judge.close()
        if self._scope is not None and self._is_over is not None:
            self._scope.cancel()
            with anyio.move_on_after(self._cleanup_s, shield=True):
                await self._is_over.wait()
        if self._sandbox is not None and self._source is not None and self._source.pool is not None:
            await self._source.pool.release(self._sandbox)

    async def _open(self) -> Sandbox:
        if self._is_over is None and not self.is_closed:
            if self._source is None or self._source.tasks is None:
                raise SandboxUnavailable("there is no runtime that has sandboxes, or it is closed")
            self._is_over, self._scope = anyio.Event(), anyio.CancelScope()
            self.opens_since = anyio.current_time()
            self._source.tasks.start_soon(self._acquire, self._source, self._scope, self._is_over)
        if self._is_over is not None and not self._is_over.is_set():
            with paused_call():  # the time is the trajectory's, not the call's
                await self._is_over.wait()
        if self._sandbox is None and self.failure is not None:
            raise type(self.failure)(str(self.failure)) from self.failure
        if self._sandbox is None or self.is_closed:
            raise SandboxLost("the sandbox of this trajectory is closed")
        return self._sandbox

    async def _acquire(
        self, source: Sandboxes, scope: anyio.CancelScope, is_over: anyio.Event
    ) -> None:
        began = anyio.current_time()
        try:
            with scope:
                pool = await source.find_pool()
                sandbox = await pool.acquire(self.spec, is_beside=self._is_beside)
                if self.is_closed:
                    await pool.release(sandbox)
                else:
                    self._sandbox = sandbox
        except Exception as error:
            self.failure = _wrap(error)
        finally:
            self._wait_s, self.opens_since = anyio.current_time() - began, None
            is_over.set()
