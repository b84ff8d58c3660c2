"""How the calls of one tool are run: its own time limit, retries, rate, cache and breaker."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from rollout.errors import ToolError

if TYPE_CHECKING:
    from collections.abc import Callable


class TransientError(ToolError):
    """A failure that may be gone a moment later; raised by a tool, its call is tried again."""


class ToolPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How calls of a tool are run; its counts are shared by all trajectories of a runtime.

    Attributes:
        timeout_s: Seconds of one call with its retries; None takes ``limits.tool_s``. Waiting for
            `max_concurrency` and `rate_limit_per_s` does not count: the turn's deadline bounds it.
        max_concurrency: Calls that run at once; further ones wait.
        rate_limit_per_s: Calls that start in a second, evenly spaced; further ones wait.
        retries: How often a call that failed with a transient error is tried again.
        backoff_s: Pause before the first retry; it doubles with each further one.
        transient: Exception types that are transient beside `TransientError`.
        cache_size: Results kept, the most recently used, by arguments and prompt kwargs; errors
            are not. 0 keeps none.
        breaker_failures: Calls in a row that raised or timed out, after which calls are answered
            at once with an error, for `breaker_s`; then one is let through to see whether the
            tool is back. None never refuses. Answers with `is_error` and refused arguments are no
            failures. "auto" waits for 64 failures, from 8 trajectories, and takes exceptions that
            speak of the call (see `speaks_of_call`) for answers too: a model that only makes bad
            calls does not take the tool from others.
        breaker_s: See `breaker_failures`.

    Raises:
        ToolError: It lists every value that is out of bounds.
    """

    timeout_s: float | None = None
    max_concurrency: int | None = None
    rate_limit_per_s: float | None = None
    retries: int = 0
    backoff_s: float = 0.5
    transient: tuple[type[Exception], ...] = ()
    cache_size: int = 0
    breaker_failures: int | Literal["auto"] | None = "auto"
    breaker_s: float = 30.0

    def __post_init__(self) -> None:
        faults = [
            f"{name} = {value!r}: expected {wanted}"
            for name, wanted, is_right in _RULES
            if not is_right(value := getattr(self, name))
        ]
        if faults:
            raise ToolError(f"ToolPolicy: {'; '.join(faults)}")

    def is_transient(self, error: BaseException) -> bool:
        """Whether a call that failed with `error` is worth another try."""
        return isinstance(error, (TransientError, *self.transient))


def speaks_of_call(error: BaseException) -> bool:
    """Whether what a tool raised says that the call was wrong, rather than that the tool is down.

    So do a `ToolError`, which a tool raises to tell the model something, and exceptions about
    values and about files that there are or are not. A `TransientError` does not.
    """
    if isinstance(error, OSError):
        return isinstance(error, _ABOUT_FILES)
    return isinstance(error, _ABOUT_VALUES) and not isinstance(error, TransientError)


_ABOUT_VALUES = (ToolError, ValueError, TypeError, LookupError, ArithmeticError, SyntaxError)
_ABOUT_FILES = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def _is_natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_count(value: Any) -> bool:
    return _is_natural(value) and value > 0


def _are_exceptions(value: Any) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(kind, type) and issubclass(kind, Exception) for kind in value
    )


_RULES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("timeout_s", "a number > 0 or None", lambda v: v is None or _is_positive(v)),
    ("max_concurrency", "an integer ≥ 1 or None", lambda v: v is None or _is_count(v)),
    ("rate_limit_per_s", "a number > 0 or None", lambda v: v is None or _is_positive(v)),
    ("retries", "an integer ≥ 0", _is_natural),
    ("backoff_s", "a number > 0", _is_positive),
    ("transient", "a tuple of exception types", _are_exceptions),
    ("cache_size", "an integer ≥ 0", _is_natural),
    (
        "breaker_failures",
        'an integer ≥ 1, "auto" or None',
        lambda v: v is None or v == "auto" or _is_count(v),
    ),
    ("breaker_s", "a number > 0", _is_positive),
)
