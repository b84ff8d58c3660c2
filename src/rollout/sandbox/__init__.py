"""Sandboxes: where agents' commands run and their files are.

A provider makes them (`open_provider`), a pool bounds and prepares them (`SandboxPool`), and every
tool that needs one is written on the protocol `Sandbox` alone.
"""

from rollout.config.sandbox_section import SandboxSpec
from rollout.errors import (
    SandboxError,
    SandboxLimit,
    SandboxLost,
    SandboxTimeout,
    SandboxUnavailable,
    SandboxUnsupported,
)
from rollout.sandbox.api import ExecResult, Sandbox, SandboxProvider
from rollout.sandbox.pool import PoolStatistics, SandboxPool
from rollout.sandbox.providers import open_provider

__all__ = [
    "ExecResult",
    "PoolStatistics",
    "Sandbox",
    "SandboxError",
    "SandboxLimit",
    "SandboxLost",
    "SandboxPool",
    "SandboxProvider",
    "SandboxSpec",
    "SandboxTimeout",
    "SandboxUnavailable",
    "SandboxUnsupported",
    "open_provider",
]
