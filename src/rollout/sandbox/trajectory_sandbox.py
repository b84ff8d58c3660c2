"""The sandbox of one trajectory, opened when it is first used.

A trajectory's agent, its tools and its reward share one handle (`TrajectorySandbox`). Opening runs
in a task of the runtime, whoever asked for it: a tool that is cancelled meanwhile, or given up,
takes nothing with it.
"""

from __future__ import annotations

import functools
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import anyio

from rollout.config.sandbox_section import SandboxSpec
from rollout.errors import SandboxError, SandboxLost, SandboxUnavailable
from rollout.limits import paused_call
from rollout.sandbox.api import MIB, Sandbox
from rollout.sandbox.pool import SandboxPool, wrap_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

P = ParamSpec("P")
R = TypeVar("R")


def _open_first(
    method: Callable[Concatenate[Sandbox, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[TrajectorySandbox, P], Coroutine[Any, Any, R]]:
    """This method of the sandbox that a `TrajectorySandbox` opens."""

    @functools.wraps(method)
    async def call(self: TrajectorySandbox, /, *args: P.args, **options: P.kwargs) -> R:
        sandbox = await self._open()
        try:
            result: R = await getattr(sandbox, method.__name__)(*args, **options)
        except SandboxLost as error:
            if not self.is_closed:
                self.failure = self.failure or error
            raise
        return result

    return call


class TrajectorySandbox:
    """A sandbox that is opened at its first use; it is a `Sandbox`.

    A `SandboxLost` and a failure to open it end the trajectory as failed, whatever the code does
    that met them.

    Args:
        pool: Opens it; None where there is no runtime.
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
        pool: SandboxPool | None = None,
        spec: SandboxSpec | None = None,
        *,
        cleanup_s: float = 5.0,
        is_beside: bool = False,
    ) -> None:
        self._pool, self._cleanup_s, self._is_beside = pool, cleanup_s, is_beside
        self.spec = SandboxSpec() if spec is None else spec
        self.is_closed = False
        self.failure: SandboxError | None = None
        self.opens_since: float | None = None
        self._wait_s = 0.0
        self._sandbox: Sandbox | None = None
        #: Set once it is there, or will not be; None until somebody asks for it.
        self._is_over: anyio.Event | None = None
        self._scope: anyio.CancelScope  # of its opening
        self._judges: list[TrajectorySandbox] = []

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
            SandboxError: It cannot be opened, or an artifact is neither a file nor a directory, as
                a link.
        """
        if isinstance(artifacts, str):
            raise ValueError(f"artifacts = {artifacts!r:.80}: expected a sequence of paths")
        judge = TrajectorySandbox(self._pool, self.spec, cleanup_s=self._cleanup_s, is_beside=True)
        self._judges.append(judge)
        try:
            for path in artifacts:
                with tempfile.TemporaryDirectory(prefix="rollout-artifact-") as directory:
                    copy = Path(directory, "artifact")
                    await self.download(path, copy, max_bytes=max_bytes)
                    await judge.upload(copy, path)
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
        if self._is_over is not None:
            self._scope.cancel()
            with anyio.move_on_after(self._cleanup_s, shield=True):
                await self._is_over.wait()
        if self._sandbox is not None and self._pool is not None:
            await self._pool.release(self._sandbox)

    async def _open(self) -> Sandbox:
        if self._is_over is None and not self.is_closed:
            if self._pool is None or self._pool.tasks is None:
                raise SandboxUnavailable("there is no runtime that has sandboxes, or it is closed")
            self._is_over, self._scope = anyio.Event(), anyio.CancelScope()
            self.opens_since = anyio.current_time()
            self._pool.tasks.start_soon(self._acquire, self._pool, self._is_over)
        if self._is_over is not None and not self._is_over.is_set():
            with paused_call():  # the time is the trajectory's, not the call's
                await self._is_over.wait()
        if self._sandbox is None and self.failure is not None:
            raise type(self.failure)(str(self.failure)) from self.failure
        if self._sandbox is None or self.is_closed:
            raise SandboxLost("the sandbox of this trajectory is closed")
        return self._sandbox

    async def _acquire(self, pool: SandboxPool, is_over: anyio.Event) -> None:
        began = anyio.current_time()
        try:
            with self._scope:
                sandbox = await pool.acquire(self.spec, is_beside=self._is_beside)
                if self.is_closed:
                    await pool.release(sandbox)
                else:
                    self._sandbox = sandbox
        except Exception as error:
            self.failure = wrap_error(error)
        finally:
            self._wait_s, self.opens_since = anyio.current_time() - began, None
            is_over.set()
