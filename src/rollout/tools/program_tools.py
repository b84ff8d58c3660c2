"""Python and a shell that models can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.tools.sandbox.sandbox_tool import SandboxTool

if TYPE_CHECKING:
    from typing import Unpack

    from rollout.tools.sandbox.sandbox_tool import SandboxOptions

_STATEFUL = (
    "Run Python code and read what it prints. Variables and files stay until the next call. The "
    "value of a last expression is shown. There is no network."
)
_ONE_SHOT = (
    "Run a Python program and read what it prints. Every call is independent. The value of a last "
    "expression is shown. There is no network."
)
_SHELL = (
    "Run a shell command and read what it prints. Files stay until the next call; variables and "
    "the working directory do not. There is no network."
)


class PythonTool(SandboxTool):
    """Runs Python in a sandbox: one interpreter for a trajectory, or a new one for each call.

    Args:
        name: What the model calls it.
        is_stateful: Variables and files stay from call to call of a trajectory; else every call
            has a new process and an empty directory. A stateful one shares its directory with the
            trajectory's `ShellTool`.
        description: What the model reads about it; None takes ours.
        options: `isolation`, `limits`, `python` and `readable`; see `SandboxTool`.

    Raises:
        ToolError: The isolation has no such name, or a path does not exist.
    """

    language = "python"
    parameter = "code"
    parameter_description = "The Python code to run."

    def __init__(
        self,
        name: str = "python",
        *,
        is_stateful: bool = True,
        description: str | None = None,
        **options: Unpack[SandboxOptions],
    ) -> None:
        description = description or (_STATEFUL if is_stateful else _ONE_SHOT)
        super().__init__(name, description=description, is_fresh=not is_stateful, **options)


class ShellTool(SandboxTool):
    """Runs shell commands in the sandbox that the trajectory's stateful `PythonTool` runs in.

    Each command is a new shell (bash where there is one) in the sandbox's directory, whose files
    stay for the trajectory; what it leaves running ends with the call. A command that fails is an
    error observation that ends with its exit code.

    Args:
        name: What the model calls it.
        description: What the model reads about it; None takes ours.
        options: `isolation`, `limits`, `python` and `readable`; see `SandboxTool`. Where they equal
            those of the `PythonTool`, the two share one sandbox.

    Raises:
        ToolError: The isolation has no such name, or a path does not exist.
    """

    language = "shell"
    parameter = "command"
    parameter_description = "The command line."

    def __init__(
        self,
        name: str = "shell",
        *,
        description: str | None = None,
        **options: Unpack[SandboxOptions],
    ) -> None:
        super().__init__(name, description=description or _SHELL, is_fresh=False, **options)
