"""The sandboxes of a runtime's trajectories: one for each, opened when it is first used.

A trajectory has a handle (`TrajectorySandbox`), which its agent, its tools and its reward share.
Opening runs in a task of the runtime, whoever asked for it: a tool that is cancelled meanwhile, or
given up, takes nothing with it.
"""

from __future__ import annotations

import logging
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import attrs

from rollout.errors import ConfigError, SandboxError, SandboxLost, SandboxUnavailable
from rollout.limits import paused_call
from rollout.sandbox.api import MIB
from rollout.sandbox.pool import SandboxPool
from rollout.sandbox.providers import open_provider
from rollout.sandbox.spec import SandboxSpec
from rollout.scopes import open_task_group

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from rollout.config import SandboxConfig
    from rollout.sandbox.api import ExecResult, Keep, Sandbox
    from rollout.sandbox.pool import PoolStatistics

logger = logging.getLogger("rollout.sandbox")

#: Where a prompt says what differs in its sandboxes.
SANDBOX_KEY = "sandbox"
_SPEC_FIELDS = tuple(field.name for field in attrs.fields(SandboxSpec))


class Sandboxes:
    """The provider and the pool of a runtime; nothing of them is there before the first use.

    Args:
        config: Says who makes sandboxes, what they are, and how many.
        cleanup_s: How long closing one may take.
    """

    def __init__(self, config: SandboxConfig, cleanup_s: float) -> None:
        self._config, self._cleanup_s = config, cleanup_s
        self._pool: SandboxPool | None = None
        self._failure: Exception | None = None
        self._tasks: Any = None
        self._served: anyio.Event | None = None
        self.spec = SandboxSpec(**{name: getattr(config, name) for name in _SPEC_FIELDS})

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
        async with open_task_group() as tasks:
            self._tasks = tasks
            try:
                if is_needed or self._config.warm or self._config.provider != "auto":
                    await self._find_pool()
                yield
            finally:
                self._tasks = None

    def spec_for(self, extra: Mapping[str, Any]) -> SandboxSpec:
        """What the sandbox of a prompt with this `extra` is to be; None there says nothing.

        Raises:
            ConfigError: A key is unknown, or a value wrong.
        """
        given = extra.get(SANDBOX_KEY)
        if given is None:
            return self.spec
        if isinstance(given, dict):
            given = {key: v for key, v in given.items() if v is not None or key not in _SPEC_FIELDS}
        return self.spec.merge(given)

    def statistics(self) -> PoolStatistics | None:
        """The counts of this moment; None where none was ever asked for."""
        return None if self._pool is None else self._pool.statistics()

    def start(self, handle: TrajectorySandbox) -> Opening:
        """Begin to open a sandbox.

        Raises:
            SandboxLost: The runtime is closed.
        """
        if self._tasks is None:
            raise SandboxLost("the runtime is closed")
        opening = Opening()
        self._tasks.start_soon(self._open, handle, opening)
        return opening

    async def release(self, sandbox: Sandbox) -> None:
        """Close a sandbox."""
        assert self._pool is not None
        await self._pool.release(sandbox)

    async def _open(self, handle: TrajectorySandbox, opening: Opening) -> None:
        try:
            with opening.scope:
                pool = await self._find_pool()
                sandbox = await pool.acquire(handle.spec, is_beside=handle.is_beside)
                if handle.is_closed:
                    await pool.release(sandbox)
                else:
                    opening.sandbox = sandbox
        except SandboxError as error:
            opening.failure = error
        except Exception as error:  # a provider's own
            opening.failure = _unavailable(error)
        finally:
            opening.seconds = anyio.current_time() - opening.since
            opening.is_over.set()

    async def _find_pool(self) -> SandboxPool:
        if self._served is None:
            self._served = anyio.Event()
            self._tasks.start_soon(self._serve, self._served)
        await self._served.wait()
        if self._failure is not None:
            raise type(self._failure)(str(self._failure)) from self._failure
        assert self._pool is not None
        return self._pool

    async def _serve(self, served: anyio.Event) -> None:
        """Hold the provider and the pool open until the runtime closes."""
        config = self._config
        try:
            async with open_provider(config.provider, **config.provider_options) as provider:
                self._pool = pool = SandboxPool(
                    provider,
                    spec=self.spec,
                    max_open=config.max_open,
                    max_creating=config.max_creating,
                    creations_per_min=config.creations_per_min,
                    warm=config.warm,
                    cleanup_s=self._cleanup_s,
                )
                served.set()
                try:
                    await pool.keep_warm()
                finally:
                    await pool.close()
        except (SandboxError, ConfigError) as error:
            self._failure = error
        except Exception as error:  # a provider's own
            logger.warning("the provider of sandboxes failed", exc_info=error)
            self._failure = _unavailable(error)
        finally:
            served.set()


def _unavailable(error: Exception) -> SandboxUnavailable:
    unavailable = SandboxUnavailable(f"no sandbox: {type(error).__name__}: {error}")
    unavailable.__cause__ = error
    return unavailable


class Opening:
    """A sandbox on its way.

    Attributes:
        since: When it was asked for, on the loop's clock.
        seconds: How long it took, waiting for room included.
        scope: Cancels it.
        is_over: Set once it is there, or will not be.
    """

    __slots__ = ("failure", "is_over", "sandbox", "scope", "seconds", "since")

    def __init__(self) -> None:
        self.since, self.seconds = anyio.current_time(), 0.0
        self.scope, self.is_over = anyio.CancelScope(), anyio.Event()
        self.sandbox: Sandbox | None = None
        self.failure: SandboxError | None = None


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
    """

    __slots__ = (
        "_cleanup_s",
        "_judges",
        "_opening",
        "_source",
        "failure",
        "is_beside",
        "is_closed",
        "spec",
    )

    def __init__(
        self,
        source: Sandboxes | None = None,
        spec: SandboxSpec | None = None,
        *,
        cleanup_s: float = 5.0,
        is_beside: bool = False,
    ) -> None:
        self._source, self._cleanup_s = source, cleanup_s
        self.spec = SandboxSpec() if spec is None else spec
        self.is_beside, self.is_closed = is_beside, False
        self.failure: SandboxError | None = None
        self._opening: Opening | None = None
        self._judges: tuple[TrajectorySandbox, ...] = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id or 'not opened'}>"

    @property
    def id(self) -> str:
        """Its name; empty until it is open."""
        opened = self._opened
        return "" if opened is None else opened.id

    @property
    def workdir(self) -> str:
        """What relative paths are relative to; "." where nobody knows until it is open."""
        opened = self._opened
        return (self.spec.workdir or ".") if opened is None else opened.workdir

    @property
    def opened(self) -> int:
        """How many were opened, with those of `fresh`."""
        return (self._opened is not None) + sum(judge.opened for judge in self._judges)

    @property
    def wait_s(self) -> float:
        """Seconds from asking for them until they were open."""
        own = 0.0 if self._opening is None else self._opening.seconds
        return own + sum(judge.wait_s for judge in self._judges)

    @property
    def opens_since(self) -> float | None:
        """Since when somebody waits for it, on the loop's clock; None where nobody does."""
        opening = self._opening
        return None if opening is None or opening.is_over.is_set() else opening.since

    @property
    def was_used(self) -> bool:
        """Whether there may be something to close."""
        return self._opening is not None or bool(self._judges)

    @property
    def is_open(self) -> bool:
        """Whether it is there."""
        return self._opened is not None and not self.is_closed

    @property
    def _opened(self) -> Sandbox | None:
        return None if self._opening is None else self._opening.sandbox

    async def exec(
        self,
        command: Sequence[str] | str,
        *,
        input: bytes | str = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int = MIB,
        keep: Keep = "tail",
    ) -> ExecResult:
        """See `Sandbox.exec`."""
        async with self._using() as sandbox:
            return await sandbox.exec(
                command,
                input=input,
                cwd=cwd,
                env=env,
                user=user,
                timeout_s=timeout_s,
                max_output_bytes=max_output_bytes,
                keep=keep,
            )

    async def read_file(self, path: str, *, max_bytes: int = 10 * MIB) -> bytes:
        """See `Sandbox.read_file`."""
        async with self._using() as sandbox:
            return await sandbox.read_file(path, max_bytes=max_bytes)

    async def write_file(self, path: str, data: bytes | str, *, mode: int | None = None) -> None:
        """See `Sandbox.write_file`."""
        async with self._using() as sandbox:
            await sandbox.write_file(path, data, mode=mode)

    async def upload(self, local: str | Path, path: str) -> None:
        """See `Sandbox.upload`."""
        async with self._using() as sandbox:
            await sandbox.upload(local, path)

    async def download(self, path: str, local: str | Path, *, max_bytes: int = 64 * MIB) -> None:
        """See `Sandbox.download`."""
        async with self._using() as sandbox:
            await sandbox.download(path, local, max_bytes=max_bytes)

    async def expose_port(self, port: int) -> str:
        """See `Sandbox.expose_port`."""
        async with self._using() as sandbox:
            return await sandbox.expose_port(port)

    async def host_url(self, url: str) -> str:
        """See `Sandbox.host_url`."""
        async with self._using() as sandbox:
            return await sandbox.host_url(url)

    async def snapshot(self) -> str:
        """See `Sandbox.snapshot`."""
        async with self._using() as sandbox:
            return await sandbox.snapshot()

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
                await self._copy(path, judge, max_bytes)
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
        opening = self._opening
        if opening is None:
            return
        if not opening.is_over.is_set():
            opening.scope.cancel()
            with anyio.move_on_after(self._cleanup_s, shield=True):
                await opening.is_over.wait()
        if opening.sandbox is not None:
            assert self._source is not None
            await self._source.release(opening.sandbox)

    @asynccontextmanager
    async def _using(self) -> AsyncIterator[Sandbox]:
        sandbox = await self._open()
        try:
            yield sandbox
        except SandboxLost as error:
            if not self.is_closed:
                self.failure = self.failure or error
            raise

    async def _open(self) -> Sandbox:
        if self.is_closed:
            raise SandboxLost("the sandbox of this trajectory is closed")
        if self._source is None:
            raise SandboxUnavailable("there is no runtime that has sandboxes")
        if self._opening is None:
            self._opening = self._source.start(self)
        opening = self._opening
        if not opening.is_over.is_set():
            with paused_call():  # the time is the trajectory's, not the call's
                await opening.is_over.wait()
        if opening.failure is not None:
            self.failure = self.failure or opening.failure
            raise type(opening.failure)(str(opening.failure)) from opening.failure
        if opening.sandbox is None or self.is_closed:
            raise SandboxLost("the sandbox of this trajectory is closed")
        return opening.sandbox

    async def _copy(self, path: str, other: TrajectorySandbox, max_bytes: int) -> None:
        with tempfile.TemporaryDirectory(prefix="rollout-artifact-") as directory:
            local = anyio.Path(directory, "artifact")
            await self.download(path, Path(local), max_bytes=max_bytes)
            if await local.is_file():
                result = await self.exec(["test", "-x", path])
                await local.chmod(0o644 if result.exit_code else 0o755)
            await other.upload(Path(local), path)
