"""Whole programs as agents: a command line for each trajectory, in the trajectory's sandbox."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rollout.agents.agent_loop import AgentLoop
from rollout.agents.function_agent import AgentTask
from rollout.chat.messages import text_in
from rollout.errors import (
    AgentError,
    LimitExceeded,
    SandboxLimit,
    SandboxTimeout,
    SandboxUnsupported,
)
from rollout.sandbox.api import ExecResult
from rollout.utf8 import is_encodable

if TYPE_CHECKING:
    from rollout.agents.context import AgentContext
    from rollout.agents.services import GatewayAddress
    from rollout.sandbox.trajectory_sandbox import TrajectorySandbox

T = TypeVar("T")

_PLACEHOLDER = re.compile(r"\{(base_url|root_url|api_key|model|prompt|uid)\}")
_RUN = ("/bin/sh", "-c", 'exec "$@" 2>&1', "sh")
#: Prints each path with a letter: f for a file that can be read, x for what is left out.
_KIND = r"""for p; do
  if [ -L "$p" ]; then k=x
  elif [ -f "$p" ] && [ -r "$p" ]; then k=f
  elif [ -d "$p" ] && [ -r "$p" ] && [ -x "$p" ]; then continue
  else k=x; fi
  printf '%s%s\0' "$k" "$p"
done"""
_LIST = ("find", ".", "!", "-name", ".", "-exec", "sh", "-c", _KIND, "sh", "{}", "+")
_MAX_LIST = 64 * 2**20

Texts = Mapping[str, str]
Contents = Mapping[str, "str | bytes | Path"]


class ProgramAgent(AgentLoop):
    """Runs a command for each trajectory, against the trajectory's endpoint of the gateway.

    Register an instance: ``register_agent("coder")(ProgramAgent(["coder", "--ask", "{prompt}"]))``.
    The program runs in the trajectory's sandbox, in its working directory. It finds the gateway in
    ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL``, ``ANTHROPIC_API_KEY`` and
    ``ROLLOUT_MODEL``. When its first process ends, the agent does; what it leaves in the background
    ends with the sandbox, after the reward.

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
        max_collected_bytes: Of all collected files together.
        check: Whether an exit code other than 0 fails the trajectory.
        timeout_s: Seconds after which it is killed, and the trajectory ends as `limit` with what
            was printed and written until then; None: only the trajectory's limits bound it.

    Raises:
        AgentError: An argument is wrong.
    """

    needs_gateway = True
    needs_sandbox = True
    is_shared = True

    def __init__(
        self,
        command: str | Sequence[str] | Callable[[AgentTask], str | Sequence[str]],
        env: Texts | Callable[[AgentTask], Texts] | None = None,
        files: Contents | Callable[[AgentTask], Contents] | None = None,
        collect: Sequence[str] = (),
        *,
        max_collected_bytes: int = 8 * 2**20,
        check: bool = True,
        timeout_s: float | None = None,
    ) -> None:
        if isinstance(collect, str):
            raise AgentError(f"ProgramAgent: collect = {collect!r}; expected a list of paths")
        for path in collect:
            _check_path("collect", path)
        if not callable(command):
            _split_command(command)
        if not callable(env):
            _check_mapping("env", env or {})
        if not callable(files):
            for path in _check_mapping("files", files or {}):
                _check_path("files", path)
        self._command, self._env, self._files = command, env or {}, files or {}
        self._collect = tuple(collect)
        self._collected_bytes = max_collected_bytes
        self._check, self._timeout_s = check, timeout_s

    async def run(self, context: AgentContext) -> None:
        """Run the program to its end; cancellation and deadlines kill all of its processes."""
        sandbox, in_thread = context.sandbox, context.services.threads.run
        async with context.gateway.open(context) as address:
            task = await AgentTask.of(context, await _map_address(context, address))
            with tempfile.TemporaryDirectory(prefix="rollout-files-") as directory:
                args = self._prepare, task, Path(directory)
                command, env = await in_thread("files of a program", *args)
                await sandbox.upload(directory, ".")
            is_late = False
            try:
                result = await sandbox.exec([*_RUN, *command], env=env, timeout_s=self._timeout_s)
            except SandboxTimeout as error:
                result, is_late = ExecResult(exit_code=137, stdout=error.stdout), True
            output = result.stdout.decode(errors="replace")
            files, left_out = await self._collect_files(sandbox)
            said = {"exit_code": result.exit_code, "output": output, "left_out": left_out}
            context.extra.update(program=said, files=files)
            if is_late:
                late, source = f"timed out after {self._timeout_s:g} s", "ProgramAgent.timeout_s"
                raise LimitExceeded(f"the program {late}", source=source, reason="timeout")
            if result.exit_code and self._check:
                end = (output or result.stderr.decode(errors="replace")).strip()[-400:]
                end = f": {end}" if end else ""
                failure = AgentError(f"the program failed: exit code {result.exit_code}{end}")
                failure.output = output
                raise failure

    def _prepare(self, task: AgentTask, directory: Path) -> tuple[tuple[str, ...], Texts]:
        """Make what runs, and its variables; write its files to the directory."""
        env = _check_mapping("env", _resolve(self._env, task))
        files = _check_mapping("files", _resolve(self._files, task))
        names = ("base_url", "root_url", "api_key", "model", "uid")
        values: dict[str, str] = {name: getattr(task, name) for name in names}
        content = task.messages[-1]["content"]
        shows = isinstance(content, list) and any(part["type"] != "text" for part in content)
        if not shows or any(map(callable, (self._command, self._env, self._files))):
            values["prompt"] = text_in(content)
        given = _resolve(self._command, task)
        if isinstance(given, str):  # what is put in are words of the shell's, whatever they hold
            command = _split_command(_fill(given, values, shlex.quote))
        else:
            command = tuple(_fill(each, values) for each in _split_command(given))
        own = {name: _fill(str(value), values) for name, value in env.items()}
        for path, data in _read_files(files):
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod(0o755 if data.startswith(b"#!") else 0o644)
        gateway = {
            "OPENAI_BASE_URL": task.base_url,
            "OPENAI_API_KEY": task.api_key,
            "ANTHROPIC_BASE_URL": task.root_url,
            "ANTHROPIC_API_KEY": task.api_key,
            "ROLLOUT_MODEL": task.model,
        }
        return command, {**gateway, **own}

    async def _collect_files(
        self, sandbox: TrajectorySandbox
    ) -> tuple[dict[str, str | bytes], list[str]]:
        """Read what is collected; also return what of it is left out."""
        files: dict[str, str | bytes] = {}
        left_out: list[str] = []
        unmatched = dict.fromkeys(self._collect)
        room, listed = self._collected_bytes, b""
        if self._collect:
            listed = (await sandbox.exec(_LIST, max_output_bytes=_MAX_LIST, keep="head")).stdout
        entries = listed.decode(errors="surrogateescape").split("\0")[:-1]
        for path, kind in sorted((each[3:], each[:1]) for each in entries if is_encodable(each)):
            matching = [pattern for pattern in self._collect if _matches(path, pattern)]
            if not matching:
                continue
            for pattern in matching:
                unmatched.pop(pattern, None)
            content = None
            if kind == "f":
                with suppress(OSError, SandboxLimit):
                    content = await sandbox.read_file(path, max_bytes=room)
            if content is None:
                left_out.append(path)
                continue
            room -= len(content)
            files[path] = content
            with suppress(UnicodeDecodeError):
                files[path] = content.decode()
        return files, [*left_out, *unmatched]


def _matches(path: str, pattern: str) -> bool:
    return path.startswith(pattern.rstrip("/") + "/") or fnmatchcase(path, pattern)


async def _map_address(context: AgentContext, address: GatewayAddress) -> GatewayAddress:
    """The address as programs in the sandbox see it.

    Raises:
        AgentError: They can reach no server here, and the gateway has no public address.
    """
    try:
        root_url = await context.sandbox.host_url(address.root_url)
    except SandboxUnsupported as error:
        if context.services.config.gateway.public_url is None:
            raise AgentError(
                f"ProgramAgent: {error}: set gateway.public_url to an address of the gateway that "
                "programs there reach"
            ) from None
        return address
    return msgspec.structs.replace(address, root_url=root_url)


def _resolve(value: T | Callable[[AgentTask], T], task: AgentTask) -> T:
    return value(task) if callable(value) else value


def _check_mapping(what: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise AgentError(f"ProgramAgent: {what} = {value!r:.80}; expected a mapping")
    return value


def _split_command(command: Any) -> tuple[str, ...]:
    if isinstance(command, str) and command.strip():
        return ("/bin/sh", "-c", command)
    is_list = isinstance(command, Sequence) and not isinstance(command, str | bytes)
    if not is_list or not command or not all(isinstance(each, str) for each in command):
        raise AgentError(
            f"ProgramAgent: command = {command!r:.80}; expected a text, or a list of a program "
            "and its arguments"
        )
    return tuple(command)


def _fill(text: str, values: Texts, quoted: Callable[[str], str] = str) -> str:
    """Replace placeholders.

    Raises:
        AgentError: It has ``{prompt}``, and the prompt is no text.
    """

    def replace(found: re.Match[str]) -> str:
        if found.group(1) not in values:
            raise AgentError(
                "ProgramAgent: {prompt}: the last message shows an image or a video; expected a "
                "text, or a function of the task that hands the messages over, such as "
                "files=lambda task: {'messages.json': json.dumps(task.messages)}"
            )
        return quoted(values[found.group(1)])

    return _PLACEHOLDER.sub(replace, text)


def _check_path(what: str, path: Any) -> None:
    is_inside = isinstance(path, str) and path and not PurePosixPath(path).is_absolute()
    if not is_inside or ".." in PurePosixPath(path).parts:
        raise AgentError(f"ProgramAgent: {what}: {path!r}; expected a relative path without '..'")


def _read_files(files: Contents) -> Iterator[tuple[str, bytes]]:
    for path, given in files.items():
        _check_path("files", path)
        if isinstance(given, Path):
            if not given.is_dir():
                yield path, given.read_bytes()
                continue
            for each in sorted(each for each in given.rglob("*") if each.is_file()):
                yield f"{path}/{each.relative_to(given).as_posix()}", each.read_bytes()
        elif isinstance(given, str | bytes):
            yield path, given.encode() if isinstance(given, str) else given
        else:
            raise AgentError(
                f"ProgramAgent: files[{path!r}] = {given!r:.80}; expected text, bytes or a Path"
            )
