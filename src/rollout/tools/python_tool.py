"""Python that models can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.tools.sandbox.tool import SandboxTool

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from rollout.tools.sandbox.isolation import Isolation
    from rollout.tools.sandbox.limits import SandboxLimits

_STATEFUL = (
    "Run Python code and read what it prints. Variables and files stay until the next call. The "
    "value of a last expression is shown. There is no network."
)
_ONE_SHOT = (
    "Run a Python program and read what it prints. Every call starts anew. The value of a last "
    "expression is shown. There is no network."
)


class PythonTool(SandboxTool):
    """Runs Python in a sandbox: one interpreter for a trajectory, or a new one for each call.

    Args:
        name: What the model calls it.
        is_stateful: Variables and files stay from call to call of a trajectory; else every call
            has a new process and an empty directory. A stateful one shares its directory with the
            trajectory's `ShellTool`.
        isolation, limits, python, readable: See `SandboxTool`.
        description: What the model reads about it; None takes ours.

    Raises:
        ToolError: The isolation has no such name, or a path does not exist.
    """

    language = "python"
    parameter = "code"

    def __init__(
        self,
        name: str = "python",
        *,
        is_stateful: bool = True,
        isolation: Isolation = "auto",
        limits: SandboxLimits | None = None,
        python: str | None = None,
        readable: Sequence[str | os.PathLike[str]] = (),
        description: str | None = None,
    ) -> None:
        super().__init__(
            name,
            description=description or (_STATEFUL if is_stateful else _ONE_SHOT),
            is_fresh=not is_stateful,
            isolation=isolation,
            limits=limits,
            python=python,
            readable=readable,
        )

    def _what(self) -> str:
        return "The Python code to run."
