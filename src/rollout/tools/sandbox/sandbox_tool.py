"""What the tools that run programs have in common."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TypedDict

from rollout.errors import ToolError
from rollout.tools.policy import ToolPolicy
from rollout.tools.results import error_result
from rollout.tools.sandbox.process import SandboxSpec
from rollout.tools.sandbox.sandbox_isolation import (
    Isolation,
    bubblewrap_program,
    check_isolation_name,
    find_isolation,
)
from rollout.tools.sandbox.sandbox_limits import SandboxLimits
from rollout.tools.sandbox.trajectory_sandbox import TrajectorySandbox, sandbox_of
from rollout.tools.tool import Tool, ToolContext, ToolSession

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.tools.sandbox.process import Language
    from rollout.tools.sandbox.sandbox_isolation import IsolationReport
    from rollout.types import ToolCall


#: Programs wait now and then; somewhat more of them than processors keeps these busy.
_CALLS_PER_CPU = 4


class SandboxOptions(TypedDict, total=False):
    """How the sandbox of a tool is made; see `SandboxTool`."""

    isolation: Isolation
    limits: SandboxLimits | None
    python: str | None
    readable: Sequence[str | os.PathLike[str]]
    max_pictures: int


#: Added to the description of a tool that shows pictures.
PICTURES_SHOWN = "Pictures that it saves as .png or .jpg in its directory are shown to you."


class SandboxTool(Tool):
    """A tool that runs what the model writes, out of reach of everything else.

    Args:
        name: What the model calls it.
        description: What the model reads about it.
        is_fresh: Every call has a new process and an empty directory.
        isolation: "auto" takes the best that holds here; a method's name insists on it; "none"
            lets programs do what the driver can.
        limits: What programs may use.
        python: The interpreter, of Python 3.9 or newer, whose packages programs can import; None
            takes this one.
        readable: Further paths that programs may read, if every user may: where the driver is
            root, they run as a user of their own.
        max_pictures: Pictures (PNG, JPEG, WEBP) that a call writes to its directory, such as plots,
            of which the model is shown so many. More than 0 needs a model that reads images.

    Raises:
        ToolError: The isolation has no such name, or a path does not exist.
    """

    language: Language
    parameter: str
    parameter_description: str

    def __init__(
        self,
        name: str,
        *,
        description: str,
        is_fresh: bool,
        isolation: Isolation = "auto",
        limits: SandboxLimits | None = None,
        python: str | None = None,
        readable: Sequence[str | os.PathLike[str]] = (),
        max_pictures: int = 0,
    ) -> None:
        if type(max_pictures) is not int or max_pictures < 0:
            raise ToolError(f"max_pictures = {max_pictures!r}: expected an integer ≥ 0")
        if max_pictures:
            description += " " + PICTURES_SHOWN
        self.max_pictures = max_pictures
        self.name = name
        self.isolation = check_isolation_name(isolation)
        self.is_fresh = is_fresh
        # More at once would only take one another's time; the wait counts against no limit of the
        # call's own.
        self.policy = ToolPolicy(max_concurrency=_CALLS_PER_CPU * (os.cpu_count() or 1))
        self.schema = _schema(name, description, self.parameter, self.parameter_description)
        self._spec = SandboxSpec(
            method="none",
            limits=limits or SandboxLimits(),
            python=python or sys.executable,
            readable=tuple(_existing(path) for path in readable),
            bubblewrap=bubblewrap_program(),
        )

    async def find_isolation(self) -> IsolationReport:
        """What isolates its programs here, or what every method lacks."""
        return await find_isolation(self.isolation, self._spec)

    async def prepare(self) -> None:
        """See `Tool.prepare`.

        Raises:
            ToolError: No isolation holds here; it says what is missing.
        """
        report = await self.find_isolation()
        if report.method is None:
            raise ToolError(f"tool {self.name!r}: {report.error()}")

    async def open(self, context: ToolContext) -> ToolSession:
        """See `Tool.open`; no process is started yet."""
        report = await self.find_isolation()
        if report.method is None:
            raise report.error()
        spec = SandboxSpec(
            method=report.method,
            limits=self._spec.limits,
            python=self._spec.python,
            readable=self._spec.readable,
            bubblewrap=self._spec.bubblewrap,
        )
        purpose = f"fresh {self.name}" if self.is_fresh else "kept"
        return _SandboxSession(self, sandbox_of(context.state, spec, purpose))


class _SandboxSession(ToolSession):
    def __init__(self, tool: SandboxTool, sandbox: TrajectorySandbox) -> None:
        self._tool = tool
        self._sandbox = sandbox
        self.serial = sandbox

    async def execute(self, call: ToolCall) -> Any:
        """Run the call's program."""
        code = call.arguments.get(self._tool.parameter)
        if not isinstance(code, str) or len(call.arguments) != 1:
            return error_result(f"expected one argument: {self._tool.parameter}, a text")
        return await self._sandbox.run(
            self._tool.language,
            code,
            is_fresh=self._tool.is_fresh,
            max_pictures=self._tool.max_pictures,
        )

    async def close(self) -> None:
        """End the trajectory's sandbox, unless another of its tools still uses it."""
        await self._sandbox.release()


def _schema(name: str, description: str, parameter: str, what: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {parameter: {"type": "string", "description": what}},
        "required": [parameter],
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _existing(path: str | os.PathLike[str]) -> str:
    if not os.path.exists(path):
        raise ToolError(f"readable: {os.fspath(path)!r} does not exist")
    return os.fspath(path)
