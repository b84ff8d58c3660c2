"""The classes of remote providers' SDKs that the adapters use, over processes of this machine."""

from __future__ import annotations

import asyncio  # noqa: TID251  (the SDKs run on it)
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any


async def run(argv: Any, data: bytes | None, stdout: Any, stderr: Any) -> int:
    """Run a command, and hand its output on as it comes."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )

    async def read(stream: Any, give: Any) -> None:
        while part := await stream.read(65536):
            give(part)

    async def feed() -> None:
        process.stdin.write(data or b"")  # type: ignore[union-attr]
        process.stdin.close()  # type: ignore[union-attr]

    await asyncio.gather(feed(), read(process.stdout, stdout), read(process.stderr, stderr))
    return await process.wait()


def method(function: Any) -> Any:
    """As Modal's: both blocking and, as `aio`, async."""
    return SimpleNamespace(aio=function)


# --------------------------------------------------------------------------------------- e2b


class SandboxException(Exception):
    pass


class SandboxNotFoundException(SandboxException):
    pass


class SandboxNotRunningException(SandboxException):
    pass


class CommandExitException(SandboxException):
    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code


class AsyncSandbox:
    """With `commands` and `files` of its own."""

    made: list[AsyncSandbox]

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.sandbox_id, self.is_alive = settings, "i1", True
        self.commands = self.files = self
        self.made.append(self)

    @classmethod
    async def create(cls, template: str | None, **settings: Any) -> AsyncSandbox:
        return cls({"template": template, **settings})

    async def run(self, cmd: str, *, on_stdout: Any, on_stderr: Any, timeout: int) -> Any:
        assert timeout == 0
        if not self.is_alive:
            raise SandboxNotFoundException("gone")
        give = [lambda b, g=g: g(b.decode(errors="replace")) for g in (on_stdout, on_stderr)]
        code = await run(["/bin/sh", "-c", cmd], None, *give)
        if code:
            raise CommandExitException(code)
        return SimpleNamespace(exit_code=0)

    async def write(self, path: str, data: bytes) -> None:
        Path(path).write_bytes(data)

    async def read(self, path: str, *, format: str) -> bytearray:
        assert format == "bytes"
        return bytearray(Path(path).read_bytes())

    def get_host(self, port: int) -> str:
        return f"{port}-{self.sandbox_id}.e2b.app"

    async def create_snapshot(self) -> Any:
        return SimpleNamespace(snapshot_id="s1")

    async def kill(self) -> None:
        self.is_alive = False


# ------------------------------------------------------------------------------------- modal


class Error(Exception):
    pass


class NotFoundError(Error):
    pass


exception = SimpleNamespace(
    Error=Error,
    NotFoundError=NotFoundError,
    SandboxTerminatedError=NotFoundError,
    SandboxTimeoutError=NotFoundError,
)
Image = SimpleNamespace(from_registry=lambda name: f"registry:{name}")


async def _lookup(name: str, *, create_if_missing: bool) -> str:
    return f"app:{name}:{create_if_missing}"


App = SimpleNamespace(lookup=method(_lookup))


class Box:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.object_id, self.is_alive = settings, "o1", True
        self.exec, self.terminate = method(self._exec), method(self._terminate)
        self.tunnels = method(self._tunnels)
        AsyncSandbox.made.append(self)  # type: ignore[arg-type]

    async def _exec(self, *argv: str, text: bool) -> Any:
        assert text is False
        if not self.is_alive:
            raise NotFoundError("gone")
        return Process(argv)

    async def _terminate(self) -> None:
        self.is_alive = False

    async def _tunnels(self) -> Any:
        return {8000: SimpleNamespace(url="https://t.modal.host")}


class Process:
    def __init__(self, argv: Any) -> None:
        self._argv, self._data = argv, b""
        self._parts: tuple[Any, Any] = (asyncio.Queue(), asyncio.Queue())
        self.stdin = SimpleNamespace(
            write=self._write, write_eof=self._start, drain=method(self._drain)
        )
        self.stdout, self.stderr = map(self._read, self._parts)
        self.wait = method(self._wait)

    def _write(self, data: bytes) -> None:
        self._data += data

    def _start(self) -> None:
        give = [queue.put_nowait for queue in self._parts]
        self._task = asyncio.ensure_future(run(self._argv, self._data, *give))
        self._task.add_done_callback(lambda _: [each(b"") for each in give])

    async def _drain(self) -> None:
        pass

    async def _read(self, parts: Any) -> Any:
        while part := await parts.get():
            yield part

    async def _wait(self) -> int:
        return await self._task


async def _create(**settings: Any) -> Box:
    return Box(settings)


Sandbox = SimpleNamespace(create=method(_create))


# ----------------------------------------------------------------------------------- inspect


class SandboxUserUnsupportedError(Exception):
    pass


class OutputLimitExceededError(Exception):
    pass


class Environment:
    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.is_alive = True
        self.settings: dict[str, Any] = {}
        AsyncSandbox.made.append(self)  # type: ignore[arg-type]

    @classmethod
    async def task_init(cls, task: str, config: Any) -> None:
        pass

    task_cleanup_calls = 0

    @classmethod
    async def task_cleanup(cls, task: str, config: Any, cleanup: bool) -> None:
        cls.task_cleanup_calls += 1

    @classmethod
    async def sample_init(cls, task: str, config: Any, metadata: Any) -> dict[str, Environment]:
        return {"default": cls(os.environ["STUB_DIRECTORY"])}

    @classmethod
    async def sample_cleanup(cls, task: str, config: Any, environments: Any, _: bool) -> None:
        environments["default"].is_alive = False

    async def exec(
        self, cmd: list[str], input: Any = None, user: Any = None, timeout_retry: bool = True
    ) -> Any:
        assert timeout_retry is False
        if user is not None:
            raise SandboxUserUnsupportedError(user)
        texts: list[bytearray] = [bytearray(), bytearray()]
        script = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', self.directory, *cmd]
        code = await run(script, input, texts[0].extend, texts[1].extend)
        stdout, stderr = (text.decode(errors="replace") for text in texts)
        return SimpleNamespace(returncode=code, stdout=stdout, stderr=stderr)

    async def read_file(self, path: str, text: bool) -> bytes:
        assert text is False
        return Path(path).read_bytes()


def registry_find_sandboxenv(name: str) -> type[Environment]:
    if name != "stub":
        raise ValueError(f"type {name!r} not recognized")
    return Environment
