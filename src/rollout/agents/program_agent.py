"""Whole programs as agents: a command line for each trajectory, in a sandbox with one door."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args
from urllib.parse import urlsplit

import msgspec

from rollout.agents.agent_loop import AgentLoop
from rollout.agents.function_agent import AgentTask
from rollout.chat.messages import text_in
from rollout.errors import AgentError, LimitExceeded
from rollout.tools.sandbox import SandboxLimits, SandboxProcess, SandboxProgram, SandboxSpec
from rollout.tools.sandbox.sandbox_isolation import bubblewrap_program, find_isolation

if TYPE_CHECKING:
    from rollout.agents.context import AgentContext
    from rollout.agents.gateway_door import GatewayAddress
    from rollout.tools.sandbox import SandboxAnswer

T = TypeVar("T")

#: Methods that give programs a network of their own, which a door can lead out of.
Walls = Literal["auto", "namespaces", "bubblewrap", "none"]
_WITH_DOOR: tuple[Literal["namespaces", "bubblewrap"], ...] = ("namespaces", "bubblewrap")
_HOST = "127.0.0.1"
#: Bytes of files that go in: they travel as text in one frame of 64 MiB.
_MAX_FILES = 40 * 2**20
_WORD = "a text without NUL and lone surrogates"
_PLACEHOLDER = re.compile(r"\{(base_url|root_url|api_key|model|prompt|uid)\}")
#: What a program may use that works for minutes; its trajectory's deadline ends it before.
PROGRAM_LIMITS = SandboxLimits(
    timeout_s=24 * 3600,
    cpu_s=3600,
    memory_mb=4096,
    disk_mb=1024,
    file_mb=256,
    max_processes=256,
    max_output_bytes=2**20,
)

Texts = Mapping[str, str]
Contents = Mapping[str, "str | bytes | Path"]


class ProgramAgent(AgentLoop):
    """Runs a command for each trajectory, against the trajectory's endpoint of the gateway.

    Register an instance: ``register_agent("coder")(ProgramAgent(["coder", "--ask", "{prompt}"]))``.
    The program sees the system's programs and an empty directory, has no network but the
    gateway, and gets nothing of the driver's environment. It finds the gateway in
    ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL``, ``ANTHROPIC_API_KEY`` and
    ``ROLLOUT_MODEL``. When its first process ends, the trajectory does, and all its processes.

    Into the trajectory's `extra` go ``program``, a dict with ``exit_code``, ``output`` (standard
    output and errors, their end where they are long) and ``left_out`` (paths that were not
    collected: links, what is too long or cannot be read, and what of `collect` matched nothing),
    and ``files``: what was collected, by path; text where it is UTF-8, else bytes. A program that a
    deadline or a cancellation ends leaves neither.

    Args:
        command: The program and its arguments, or a text for ``/bin/sh``. In it and in `env`
            ``{base_url}``, ``{root_url}``, ``{api_key}``, ``{model}``, ``{uid}`` and ``{prompt}``
            (the text of the last message, its parts joined) are replaced, quoted in a text for the
            shell. Or a function of the `AgentTask`. Where the last message shows an image,
            ``{prompt}`` needs one of `command`, `env` and `files` to be such a function, which can
            hand the image over; else the trajectory fails.
        env: Variables; or a function of the task.
        files: Files that the program finds, by relative path: a text, bytes, or the path of a file
            or directory here; or a function of the task. What begins with ``#!`` can be run.
        collect: What is collected after it: relative paths of files or directories, or patterns of
            paths, in which ``*`` stands for any text.
        isolation: "auto" takes namespaces or bubblewrap; "none" lets the program do what the
            driver can.
        limits: What it may use. `memory_mb` bounds no address space, only what is used.
        python: An interpreter of Python 3.9 or newer that starts it, seen in it; None takes this.
        readable: Further paths that it may read.
        max_collected_bytes: Of all collected files together.
        check: Whether an exit code other than 0 fails the trajectory.

    Raises:
        AgentError: An argument is wrong.
    """

    needs_gateway = True
    is_shared = True

    def __init__(
        self,
        command: str | Sequence[str] | Callable[[AgentTask], str | Sequence[str]],
        env: Texts | Callable[[AgentTask], Texts] | None = None,
        files: Contents | Callable[[AgentTask], Contents] | None = None,
        collect: Sequence[str] = (),
        *,
        isolation: Walls = "auto",
        limits: SandboxLimits = PROGRAM_LIMITS,
        python: str | None = None,
        readable: Sequence[str | Path] = (),
        max_collected_bytes: int = 8 * 2**20,
        check: bool = True,
    ) -> None:
        if isolation not in get_args(Walls):
            known = ", ".join(map(repr, get_args(Walls)))
            raise AgentError(f"ProgramAgent: isolation = {isolation!r}; expected one of {known}")
        if isinstance(collect, str):
            raise AgentError(f"ProgramAgent: collect = {collect!r}; expected a list of paths")
        for path in collect:
            _check_path("collect", path)
        _check_words(
            () if callable(command) else _command_of(command),
            {} if callable(env) else _mapping("env", env or {}),
        )
        if not callable(files):
            for path in _mapping("files", files or {}):
                _check_path("files", path)
        for place in readable:
            if not Path(place).exists():
                raise AgentError(f"ProgramAgent: readable: {str(place)!r} does not exist")
        self._command, self._env, self._files = command, env or {}, files or {}
        self._collect = tuple(collect)
        self._isolation = isolation
        self._collected_bytes = max_collected_bytes
        self._check = check
        self._spec = SandboxSpec(
            method="none",
            limits=limits,
            python=python or sys.executable,
            readable=tuple(map(str, readable)),
            bubblewrap=bubblewrap_program(),
            bounds_address_space=False,
        )

    async def check(self) -> None:
        """Find the isolation.

        Raises:
            AgentError: There is none; it says what is missing.
        """
        await self._walled()

    async def run(self, context: AgentContext) -> None:
        """Run the program to its end; cancellation and deadlines kill all of its processes."""
        spec = await self._walled()
        async with context.door.open(context) as address:
            spec, inside = _through_door(spec, address)
            task = await AgentTask.of(context, inside)
            program = await context.services.threads.run("files of a program", self._program, task)
            sandbox = await SandboxProcess.start(spec)
            try:
                answer = await sandbox.run_program(program)
            finally:
                await sandbox.close()
            context.extra["program"] = {
                "exit_code": answer.code,
                "output": answer.output,
                "left_out": answer.left_out,
            }
            context.extra["files"] = {path: _text(body) for path, body in answer.files.items()}
            self._judge(answer)

    async def _walled(self) -> SandboxSpec:
        """With the method that holds here.

        Raises:
            AgentError: None does; it says what is missing.
        """
        if self._isolation == "none":
            return self._spec
        missing: dict[str, str] = {}
        for method in _WITH_DOOR if self._isolation == "auto" else (self._isolation,):
            report = await find_isolation(method, self._spec)
            if report.method is not None:
                return msgspec.structs.replace(self._spec, method=report.method)
            missing |= report.missing
        lacks = "; ".join(f"{method}: {fault}" for method, fault in missing.items())
        raise AgentError(
            f"ProgramAgent: no isolation with a door to the gateway: {lacks}; mend one of these, "
            'or accept isolation="none", where programs can do what the driver can'
        )

    def _program(self, task: AgentTask) -> SandboxProgram:
        """What runs; reads files."""
        env = _mapping("env", _given(self._env, task))
        files = _mapping("files", _given(self._files, task))
        values = _values(task)
        if _shows_media(task) and not any(map(callable, (self._command, self._env, self._files))):
            del values["prompt"]
        command = _filled_command(_given(self._command, task), values)
        own = {name: _filled(str(value), values) for name, value in env.items()}
        _check_words(command, own)
        return SandboxProgram(
            command=command,
            environment={**_own_environment(task), **own},
            files=_contents(files),
            collect=self._collect,
            collected_bytes=self._collected_bytes,
        )

    def _judge(self, answer: SandboxAnswer) -> None:
        """Let pass what ended well.

        Raises:
            LimitExceeded: It passed one of its limits.
            AgentError: It failed.
        """
        limits = self._spec.limits
        what = limits.describe(answer.reason)
        if answer.status == "stopped" and what != answer.reason:
            source = f"SandboxLimits.{_FIELDS[answer.reason]}"
            raise LimitExceeded(f"the program {what}", source=source, reason=answer.reason)
        if answer.status == "stopped" or (answer.status == "error" and self._check):
            end = answer.output.strip()[-400:]
            error = AgentError(f"the program failed: {what}" + (f": {end}" if end else ""))
            error.output = answer.output
            raise error


#: Which limit a sandbox means by a word.
_FIELDS = {
    "timeout": "timeout_s",
    "cpu": "cpu_s",
    "memory": "memory_mb",
    "disk": "disk_mb",
    "output": "max_output_bytes",
}


def _own_environment(task: AgentTask) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "ANTHROPIC_BASE_URL": task.root_url,
        "ANTHROPIC_API_KEY": task.api_key,
        "ROLLOUT_MODEL": task.model,
    }


def _through_door(spec: SandboxSpec, address: GatewayAddress) -> tuple[SandboxSpec, GatewayAddress]:
    """The sandbox with a door to this address, and the address as it is seen in it."""
    url = urlsplit(address.root_url)
    if spec.method == "none":
        return spec, address
    if url.scheme != "http" or url.hostname is None:
        raise AgentError(f"ProgramAgent: the gateway is at {address.root_url}; expected http")
    port = url.port or 80
    inside = url._replace(netloc=f"{_HOST}:{port}").geturl()
    return (
        msgspec.structs.replace(spec, door=(url.hostname, port)),
        msgspec.structs.replace(address, root_url=inside),
    )


def _given(value: T | Callable[[AgentTask], T], task: AgentTask) -> T:
    return value(task) if callable(value) else value


def _mapping(what: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise AgentError(f"ProgramAgent: {what} = {given!r:.80}; expected a mapping")
    return given


def _command_of(command: Any) -> tuple[str, ...]:
    if isinstance(command, str) and command.strip():
        return ("/bin/sh", "-c", command)
    is_list = isinstance(command, Sequence) and not isinstance(command, str | bytes)
    if not is_list or not command or not all(isinstance(each, str) for each in command):
        raise AgentError(
            f"ProgramAgent: command = {command!r:.80}; expected a text, or a list of a program "
            "and its arguments"
        )
    return tuple(command)


def _check_words(command: Sequence[str], env: Mapping[str, Any]) -> None:
    """Let pass what a system can start a program with."""
    for word in command:
        if not _is_word(word):
            raise AgentError(f"ProgramAgent: command: {word!r:.80}; expected {_WORD}")
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name or not _is_word(name):
            expected = "a variable's name, without '='"
            raise AgentError(f"ProgramAgent: env: {name!r:.80}; expected {expected}, as {_WORD}")
        if not _is_word(str(value)):
            raise AgentError(f"ProgramAgent: env[{name!r}] = {value!r:.80}; expected {_WORD}")


def _is_word(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _filled_command(command: Any, values: Texts) -> tuple[str, ...]:
    if isinstance(command, str):  # what is put in are words of the shell's, whatever they hold
        command = _filled(command, values, shlex.quote)
        return _command_of(command)
    return tuple(_filled(each, values) for each in _command_of(command))


def _filled(text: str, values: Texts, quoted: Callable[[str], str] = str) -> str:
    """The text with placeholders replaced.

    Raises:
        AgentError: It has ``{prompt}``, and the prompt is no text.
    """

    def value_of(found: re.Match[str]) -> str:
        if found.group(1) not in values:
            raise AgentError(
                "ProgramAgent: {prompt}: the last message shows an image or a video; expected a "
                "text, or a function of the task that hands the messages over, such as "
                "files=lambda task: {'messages.json': json.dumps(task.messages)}"
            )
        return quoted(values[found.group(1)])

    return _PLACEHOLDER.sub(value_of, text)


def _values(task: AgentTask) -> dict[str, str]:
    """What placeholders stand for."""
    return {
        "base_url": task.base_url,
        "root_url": task.root_url,
        "api_key": task.api_key,
        "model": task.model,
        "uid": task.uid,
        "prompt": text_in(task.messages[-1]["content"]),
    }


def _shows_media(task: AgentTask) -> bool:
    """Whether the last message has more than text."""
    content = task.messages[-1]["content"]
    return isinstance(content, list) and any(part["type"] != "text" for part in content)


def _check_path(what: str, path: Any) -> None:
    is_inside = isinstance(path, str) and path and not PurePosixPath(path).is_absolute()
    if not is_inside or ".." in PurePosixPath(path).parts:
        raise AgentError(f"ProgramAgent: {what}: {path!r}; expected a relative path without '..'")


def _contents(files: Contents) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    for path, given in files.items():
        _check_path("files", path)
        if isinstance(given, Path):
            contents |= _read(path, given)
        elif isinstance(given, str | bytes):
            contents[path] = given.encode() if isinstance(given, str) else given
        else:
            raise AgentError(
                f"ProgramAgent: files[{path!r}] = {given!r:.80}; expected text, bytes or a Path"
            )
    size = sum(map(len, contents.values()))
    if size > _MAX_FILES:
        raise AgentError(
            f"ProgramAgent: files have {size} bytes; expected at most {_MAX_FILES}: show larger "
            "ones through readable="
        )
    return contents


def _read(path: str, source: Path) -> dict[str, bytes]:
    if not source.is_dir():
        return {path: source.read_bytes()}
    found = sorted(each for each in source.rglob("*") if each.is_file())
    return {f"{path}/{each.relative_to(source).as_posix()}": each.read_bytes() for each in found}


def _text(content: bytes) -> str | bytes:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content
