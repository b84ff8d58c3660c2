"""A shell that models can use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.tools.sandbox.tool import SandboxTool

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from rollout.tools.sandbox.isolation import Isolation
    from rollout.tools.sandbox.limits import SandboxLimits

_DESCRIPTION = (
    "Run a shell command and read what it prints. Files stay until the next call; variables and "
    "the working directory do not. There is no network."
)


class ShellTool(SandboxTool):
    """Runs shell commands in the sandbox that the trajectory's stateful `PythonTool` runs in.

    Each command is a new shell (bash where there is one) in the sandbox's directory, whose files
    stay for the trajectory; what it leaves running ends with the call. A command that fails is an
    error observation that ends with its exit code.

    Args:
        name: What the model calls it.
        isolation, limits, python, readable: See `SandboxTool`; where they equal those of the
            `PythonTool`, the two share one sandbox.
        description: What the model reads about it; None takes ours.

    Raises:
        ToolError: The isolation has no such name, or a path does not exist.
    """

    language = "shell"
    parameter = "command"

    def __init__(
        self,
        name: str = "shell",
        *,
        isolation: Isolation = "auto",
        limits: SandboxLimits | None = None,
        python: str | None = None,
        readable: Sequence[str | os.PathLike[str]] = (),
        description: str | None = None,
    ) -> None:
        super().__init__(
            name,
            description=description or _DESCRIPTION,
            is_fresh=False,
            isolation=isolation,
            limits=limits,
            python=python,
            readable=readable,
        )

    def _what(self) -> str:
        return "The command line."
