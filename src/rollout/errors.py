"""The errors that leave this library, one flat type for each boundary.

Errors raised before any work (`ConfigError`, `PromptError`) leave nothing behind. An error that
ends a running batch carries what had been collected as `partial`.
"""

from __future__ import annotations

from typing import Any

from rollout.types import Outcome


class RolloutError(Exception):
    """Base of every error that this library raises on purpose.

    `partial` is the `RolloutBatch` collected so far where the error ended a running batch, else
    None.
    """

    partial: Any = None

    def __init__(self, *args: object) -> None:  # a signature, which `Exception` has none of
        super().__init__(*args)


class ConfigError(RolloutError):
    """A configuration is wrong; every fault is listed, each with path, value and expectation."""

    def __init__(self, message: str, faults: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults


class PromptError(RolloutError):
    """The arguments of a call are unusable: unreadable file, wrong types, equal uids, no step."""


class SourceEnded(RolloutError):
    """The source of `collect` has no more prompts; `partial` has the groups that there were."""


class EngineError(RolloutError):
    """An engine could not start, refused a request or lost it.

    `reason` is that of a trajectory that fails by it: "engine", after which its member may run
    again; "lost_engines", since too many engines were lost with its requests; "no_engine", since
    none is left; or "sampling", since an agent asked for what no engine can read.
    """

    reason: str = "engine"  # of a subclass whose `__init__` does not call this one

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or self.reason


class ChannelError(EngineError):
    """The connection to an engine broke, or its peer is not the expected one."""


class ToolError(RolloutError):
    """A tool is defined wrongly, or could not be opened."""


class SandboxError(RolloutError):
    """A sandbox could not be opened or used; the base of the five below."""


class SandboxLost(SandboxError):
    """The sandbox has ended or is closed: its files and processes are gone."""


class SandboxTimeout(SandboxError, TimeoutError):
    """A command ran out of time and was killed with all that it had started.

    Attributes:
        stdout, stderr: What it had written until then, as far as it was kept.
        seconds: How long it ran.
    """

    def __init__(
        self, message: str, *, stdout: bytes = b"", stderr: bytes = b"", seconds: float = 0.0
    ) -> None:
        super().__init__(message)
        self.stdout = stdout
        self.stderr = stderr
        self.seconds = seconds


class SandboxLimit(SandboxError):
    """Something is larger than it may be: a file that is read, an input, an archive."""


class SandboxUnsupported(SandboxError):
    """The provider cannot do what was asked of it."""


class SandboxUnavailable(SandboxError):
    """No sandbox can be had now: the provider does not answer, or has no room. Worth a retry."""


class TemplateError(RolloutError):
    """A chat template cannot render the messages given, or cannot be used append-only."""


class MediaError(ToolError, TemplateError):
    """An image, a video or audio stands where only text can stand yet.

    In a message, or in what a tool or a simulated user answered.
    """


class AgentError(RolloutError):
    """An agent loop is unknown, registered twice or used in the wrong order, or its program failed.

    `output` is what that program printed; None of any other error.
    """

    output: str | None = None


class JournalError(RolloutError):
    """A journal cannot be read, written or resumed from, or something cannot stand in it."""


class LimitExceeded(RolloutError):
    """A trajectory reached one of its limits; the runtime makes it the trajectory's outcome.

    Attributes:
        source: Path of the limit in the configuration, e.g. ``lengths.response``.
        reason: The limit in a word, e.g. ``response``.
        outcome: `Outcome.LENGTH`, `Outcome.LIMIT` or `Outcome.DEADLINE`.
    """

    source = reason = ""
    outcome = Outcome.LIMIT

    def __init__(
        self, message: str, *, source: str, reason: str, outcome: Outcome = Outcome.LIMIT
    ) -> None:
        super().__init__(message)
        self.source, self.reason, self.outcome = source, reason, outcome
