"""Sandboxes: programs that models write run here, out of reach of everything else."""

from rollout.tools.sandbox.process import (
    SandboxAnswer,
    SandboxProcess,
    SandboxProgram,
    SandboxSpec,
)
from rollout.tools.sandbox.sandbox_isolation import (
    METHODS,
    Isolation,
    IsolationReport,
    find_isolation,
)
from rollout.tools.sandbox.sandbox_limits import SandboxLimits

__all__ = [
    "METHODS",
    "Isolation",
    "IsolationReport",
    "SandboxAnswer",
    "SandboxLimits",
    "SandboxProcess",
    "SandboxProgram",
    "SandboxSpec",
    "find_isolation",
]
