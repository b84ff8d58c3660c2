"""Python, a shell and an editor in the trajectory's sandbox, the same on every provider.

They need nothing of a sandbox but ``exec``, ``read_file`` and ``write_file``.
"""

from __future__ import annotations

import io
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar

import anyio

from rollout.config.checks import Natural
from rollout.errors import SandboxError, SandboxLimit, SandboxTimeout, ToolError
from rollout.sandbox.local import read_program
from rollout.tools.results import NO_OUTPUT, ToolResult, error_result
from rollout.tools.tool import Tool, ToolContext, ToolSession, check_options
from rollout.utf8 import encodable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
    from rollout.types import ToolCall

#: Bytes of output that a call answers with.
CAP = 65536
_START_S, _KILL_S = 60.0, 5.0
_GONE = "what earlier calls had left in Python is gone"
#: Where a tool keeps its own; hidden, for it may be the working directory.
_MAKE = (
    'd=$(mktemp -d "${TMPDIR:-/tmp}/.rollout-XXXXXX" 2>/dev/null || '
    'mktemp -d "$PWD/.rollout-XXXXXX") || exit; '
)
# What podman is sent and nobody reads costs what a command that ends at once has written.
_START = _MAKE + 'w=$PWD; cd "$d" && cat >program && "$1" - "$d" "$w" <program && echo "$d"'
# Reading `done` fails once no session has it open, and is never the first to open it. `answer` is
# empty until the cell has ended, whatever its code writes into `done`.
_CELL = (
    'cd "$1" 2>/dev/null && exec 3<>done 4<done 3>&- || exit 111; cat >cell; : >answer; '
    "echo 1<>go; while read -r _ <&4; do [ -s answer ] && exec cat answer; done; "
    'head -c "$2" out; exit 111'
)
# Nothing that needs a process of its own comes before all have ended: the code may have taken as
# many as there may be.
_KILL = (
    'cd "$1" && read -r p <pid; i=0; [ "$p" ] && { '
    'while kill -9 "-$p" && [ $((i+=1)) -lt 50000 ]; do :; done; kill -9 "$p"; } 2>/dev/null; '
    'head -c "$2" out; rm -rf "$1"'
)
_SHELL = (
    'cat >"$1/command"; exec </dev/null 2>&1; s=$(command -v bash || command -v sh); '
    'exec "$s" -c "$2" "${s##*/}" "$1"'
)
# The variable that marks what a call has started, by which it is killed, is never an earlier one's.
_SHELL_CALL = r"""
__rollout=$1; shift
if [ -f "$__rollout/state" ]; then
  cd -- "$(cat "$__rollout/cwd")"
  unset $(env | sed -n 's/^\([A-Za-z_][A-Za-z0-9_]*\)=.*/\1/p' | grep -vx ROLLOUT_EXEC) 2>/dev/null
  . "$__rollout/state"
fi
trap '{ __rollout_code=$?; set +x; } 2>/dev/null; unset ROLLOUT_EXEC
pwd >"$__rollout/cwd"
{ export -p; [ -z "${BASH_VERSION-}" ] || declare -f; } >"$__rollout/new" &&
mv -f "$__rollout/new" "$__rollout/state"
exit $__rollout_code' EXIT
eval "$(cat "$__rollout/command")"
"""
_PICTURES = (
    r"find . -type f \( -name '*.png' -o -name '*.jpg' -o -name '*.jpeg' -o -name '*.webp' \) "
    "-exec stat -c '%i %s %y %z %n' {} +"
)
# From within: what the path itself is called, and that it is a link, does not count.
_LIST = (
    "cd -- \"$1\" && find . -maxdepth 2 ! -path '*/.*' ! -path '*/node_modules/*' "
    "\\( -type d -exec printf '%s/\\n' {} + -o -exec printf '%s\\n' {} + \\)"
)


class SandboxTool(Tool, ToolSession):
    """A tool in the trajectory's sandbox; the session of a trajectory is a copy that has it.

    Calls of all tools of one sandbox run one after another.

    Args:
        name, description: What the model calls it, and reads about it; None takes ours.
        timeout_s: Seconds of one call, after which all that it has started is killed and the model
            reads what it printed until then; None: only ``limits.tool_s`` bounds it, after which
            the model reads nothing of it.
        max_pictures: So many of the pictures (PNG, JPEG, WEBP) that a call writes to the sandbox's
            directory are shown to the model, which must read images.
    """

    needs_sandbox = True
    description: str
    parameters: ClassVar[dict[str, Any]]  # of which the first two are required
    sandbox: TrajectorySandbox
    #: Answers one call, without pictures.
    _answer: Callable[..., Coroutine[Any, Any, ToolResult]]
    #: Where the tool keeps its own, in the sandbox; None until it is made.
    directory: str | None = None

    def __init__(
        self,
        name: str | None = None,
        *,
        description: str | None = None,
        timeout_s: float | None = None,
        max_pictures: int = 0,
    ) -> None:
        self.name, self.timeout_s, self.max_pictures = name or self.name, timeout_s, max_pictures
        check_options(f"tool {self.name!r}", max_pictures=(Natural, max_pictures))
        text = description or self.description
        if max_pictures:
            text += " Pictures that it saves as .png or .jpg in its directory are shown."
        parameters: dict[str, Any] = {"type": "object", "properties": self.parameters}
        parameters |= {"required": [*self.parameters][:2], "additionalProperties": False}
        function = {"name": self.name, "description": text, "parameters": parameters}
        self.schema = {"type": "function", "function": function}

    async def open(self, context: ToolContext) -> ToolSession:
        """See `Tool.open`; nothing is started yet."""
        session = copy(self)
        session.serial = session.sandbox = context.sandbox
        return session

    async def execute(self, call: ToolCall) -> Any:
        """See `ToolSession.execute`."""
        before, pictures = await self._list_pictures(), list[bytes]()
        texts = {n: encodable(each) for n, each in call.arguments.items() if isinstance(each, str)}
        result = await self._answer(**{**call.arguments, **texts})
        written = await self._list_pictures() - before
        for path in sorted(line.partition(" ./")[2] for line in written):
            if not result.is_error and len(pictures) < self.max_pictures:
                with suppress(OSError, SandboxLimit):  # gone by now, or no picture for a model
                    pictures.append(await self.sandbox.read_file(path))
        if not pictures:
            return result
        return ToolResult("" if result.text == NO_OUTPUT else result.text, images=pictures)

    async def _list_pictures(self) -> set[str]:
        """A line for each picture in the sandbox's directory, new where it was written since."""
        if not self.max_pictures:
            return set()
        result = await self.sandbox.exec(_PICTURES)
        return set(result.stdout.decode(errors="surrogateescape").splitlines())

    async def _make_directory(self, script: str, *words: str, program: str = "") -> str:
        """The directory that the script makes and prints."""
        command = ["/bin/sh", "-c", script, "sh", *words]
        result = await self.sandbox.exec(command, input=program, timeout_s=_START_S)
        printed = result.stdout.decode(errors="replace").strip()
        if result.exit_code or not printed:
            why = result.stderr.decode(errors="replace").strip() or printed
            raise ToolError(f"cannot start in {self.sandbox.id}: {why}")
        self.directory = printed
        return printed


class PythonTool(SandboxTool):
    """Runs Python code in one interpreter for the trajectory, whose variables stay.

    A call that takes too long, or that ends the interpreter, costs the variables; the next call has
    a new one. ``sys.exit`` only ends its own call. What child processes print is shown too.

    `python` is the interpreter in the sandbox, 3.8 or newer; see `SandboxTool` for the others.
    """

    name = "python"
    description = (
        "Run Python code and read what it prints. Variables and files stay until the next call. "
        "The value of a last expression is shown."
    )
    parameters: ClassVar = {"code": {"type": "string", "description": "The Python code to run."}}
    _is_lost = False  # whether an interpreter has ended since the model last read so

    def __init__(self, name: str | None = None, *, python: str = "python3", **options: Any) -> None:
        super().__init__(name, **options)
        self.python = python

    async def _answer(self, code: str) -> ToolResult:
        directory = self.directory or await self._make_directory(
            _START, self.python, program=read_program("python_session")
        )
        note = f"[{_GONE}]\n" if self._is_lost else ""
        self._is_lost, printed = True, b""  # until it has answered
        try:
            result = await self.sandbox.exec(
                ["/bin/sh", "-c", _CELL, "sh", directory, str(CAP)],
                input=code,
                timeout_s=self.timeout_s,
                max_output_bytes=CAP + 64,
                keep="head",
            )
            self._is_lost, printed = bool(result.exit_code), result.stdout
            reason = "the interpreter has ended"
        except SandboxTimeout as error:
            reason = f"timed out after {error.seconds:g} s"
        finally:
            if self._is_lost:  # end it, with what is in its process group
                self.directory, kill = None, ["/bin/sh", "-c", _KILL, "sh", directory, str(CAP)]
                with anyio.CancelScope(shield=True), suppress(SandboxError):
                    killed = await self.sandbox.exec(kill, timeout_s=_KILL_S)
                    printed = killed.stdout or printed
        if self._is_lost:
            return _report_failure(printed, f"{reason}; {_GONE}")
        head, _, output = printed.partition(b"\n")
        is_ok, size = map(int, head.split())
        text = note + output.decode(errors="replace")
        if size > CAP:
            text = f"{text.rstrip()}\n[only the first {CAP} bytes of the output are shown]"
        return ToolResult(text or NO_OUTPUT) if is_ok else error_result(text.rstrip("\n"))


class ShellTool(SandboxTool):
    """Runs shell commands: bash where the sandbox has it, else sh.

    The working directory, exported variables and, with bash, functions stay from call to call;
    other variables do not. What a command leaves in the background goes on. A command that fails is
    an error observation that ends with its exit code. Its arguments are those of `SandboxTool`.
    """

    name = "shell"
    description = (
        "Run a shell command and read what it prints. Files, the working directory, exported "
        "variables and functions stay until the next call. A command that goes on in the "
        "background needs its output in a file: command >log 2>&1 &"
    )
    parameters: ClassVar = {"command": {"type": "string", "description": "The command line."}}

    async def _answer(self, command: str) -> ToolResult:
        directory = self.directory or await self._make_directory(_MAKE + 'echo "$d"')
        try:
            result = await self.sandbox.exec(
                ["/bin/sh", "-c", _SHELL, "sh", directory, _SHELL_CALL],
                input=command,
                timeout_s=self.timeout_s,
                max_output_bytes=CAP,
            )
        except SandboxTimeout as error:
            return _report_failure(error.stdout, f"timed out after {error.seconds:g} s")
        note = f"[only the last {CAP} bytes of the output are shown]\n" if result.truncated else ""
        output = note.encode() + result.stdout
        if result.exit_code:
            return _report_failure(output, f"exit code {result.exit_code}")
        return ToolResult(output.decode(errors="replace") or NO_OUTPUT)


def _report_failure(output: bytes, reason: str) -> ToolResult:
    text = output.decode(errors="replace").rstrip("\n")
    return error_result(f"{text}\n[{reason}]" if text else f"[{reason}]")


class EditTool(SandboxTool):
    """Shows and changes files; `name` and `description` are those of `SandboxTool`."""

    name = "edit"
    description = (
        "View, create and edit files. `view` shows a file with line numbers, or what a directory "
        "holds; `create` writes a file, also over an existing one; `str_replace` replaces "
        "`old_str`, which must occur exactly once, with `new_str`; `insert` puts `new_str` after "
        "line `insert_line`."
    )
    parameters: ClassVar = {
        "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
        "path": {"type": "string", "description": "The file, or a directory to view."},
        "file_text": {"type": "string", "description": "What `create` writes."},
        "old_str": {"type": "string", "description": "The text that `str_replace` replaces."},
        "new_str": {"type": "string", "description": "What stands there afterwards."},
        "insert_line": {
            "type": "integer",
            "description": "Line to insert after; 0: at the start.",
        },
        "view_range": {
            "type": "array",
            "items": {"type": "integer"},
            "minItems": 2,
            "maxItems": 2,
            "description": "The first and the last line to view; -1 for the end.",
        },
    }

    def __init__(self, name: str | None = None, *, description: str | None = None) -> None:
        super().__init__(name, description=description)

    async def _answer(self, command: str, path: str, **arguments: Any) -> ToolResult:
        sandbox = self.sandbox
        try:
            if command == "view":
                return ToolResult(await _view(sandbox, path, arguments.get("view_range")))
            if command == "create":
                text = arguments["file_text"]
                await sandbox.write_file(path, text)
                return ToolResult(f"{path} is written: {len(_split(text))} lines")
            text = (await sandbox.read_file(path)).decode(errors="surrogateescape")
            find = _find_insertion if command == "insert" else _find_replaced
            start, end, new = find(text, arguments)
            changed = text[:start] + new + text[end:]
            await sandbox.write_file(path, changed.encode(errors="surrogateescape"))
        except KeyError as error:
            raise ToolError(f"{command} needs {error.args[0]}") from error
        except IsADirectoryError as error:
            raise ToolError(f"{path} is a directory, which only `view` takes") from error
        except OSError as error:
            raise ToolError(f"{path}: {error.strerror or error}") from error
        line = text.count("\n", 0, start) + 1
        shown = _number(_split(changed), line - 3, line + new.count("\n") + 4)
        return ToolResult(f"{path} is changed:\n{shown}")


async def _view(sandbox: TrajectorySandbox, path: str, lines: list[int] | None) -> str:
    try:
        data = await sandbox.read_file(path)
    except IsADirectoryError:
        result = await sandbox.exec(["/bin/sh", "-c", _LIST, "sh", path])
        found = sorted(result.stdout.decode(errors="replace").splitlines())
        return "\n".join(path.rstrip("/") + each.removeprefix(".") for each in found)
    text = _split(data.decode(errors="surrogateescape"))
    first, last = map(int, lines or (1, -1))
    last = len(text) if last == -1 else last
    if lines and not 1 <= first <= min(last, len(text)):
        raise ToolError(f"view_range = {lines}: {path} has {len(text)} lines")
    return _number(text, first, last) or "(the file is empty)"


def _split(text: str) -> list[str]:
    """Lines as editors and compilers count them, with their ends."""
    return list(io.StringIO(text, newline="\n"))


def _number(lines: list[str], first: int, last: int) -> str:
    first = max(1, first)
    shown = enumerate(lines[first - 1 : last], first)
    text = "\n".join(f"{number:6}\t{line.rstrip(chr(13) + chr(10))}" for number, line in shown)
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _find_insertion(text: str, arguments: dict[str, Any]) -> tuple[int, int, str]:
    """Where `insert` inserts: start, end and what stands there afterwards, as lines of its own."""
    new, after, lines = arguments["new_str"], int(arguments["insert_line"]), _split(text)
    if not 0 <= after <= len(lines):
        raise ToolError(f"insert_line = {after}: the file has {len(lines)} lines")
    start = sum(map(len, lines[:after]))
    new = _fit_line_ends(new if new.endswith("\n") else f"{new}\n", text)
    return start, start, f"\n{new}" if start and text[start - 1] != "\n" else new


def _find_replaced(text: str, arguments: dict[str, Any]) -> tuple[int, int, str]:
    """Start and end of the one `old_str`, and what stands there afterwards."""
    old, new = arguments["old_str"], _fit_line_ends(arguments.get("new_str", ""), text)
    old = old if old in text else _fit_line_ends(old, text)
    start, last = text.find(old), text.rfind(old)
    if start < 0 or not old:
        raise ToolError("old_str does not occur in the file, which is unchanged")
    if start < last:
        first_line, last_line = (text.count("\n", 0, at) + 1 for at in (start, last))
        raise ToolError(
            f"old_str occurs more than once, first in line {first_line} and last in line "
            f"{last_line}; the file is unchanged: give enough of what is around it that it occurs "
            "once"
        )
    return start, start + len(old), new


def _fit_line_ends(new: str, text: str) -> str:
    """What models write, with the line ends of the file: they write no carriage returns."""
    return new.replace("\n", "\r\n") if "\r\n" in text and "\r" not in new else new
