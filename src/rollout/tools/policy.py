"""How the calls of one tool are run: time limit, retries, concurrency, rate, cache and breaker."""

from __future__ import annotations

import typing
from typing import Annotated, Any

import msgspec

from rollout.config.checks import Count, Natural, Positive, Rule, validate
from rollout.errors import ToolError

ExceptionTypes = Annotated[
    object,
    Rule(
        "a tuple of exception types",
        lambda kinds: all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds),
    ),
]


def check_options(what: str, **options: tuple[Any, Any]) -> None:
    """Check values, each given with its rule.

    Raises:
        ToolError: It begins with `what`, and lists every value that is out of bounds.
    """
    found = {name: validate(rule, value)[1] for name, (rule, value) in options.items()}
    if faults := [str(each.below(name)) for name, faults in found.items() for each in faults]:
        raise ToolError(f"{what}: {'; '.join(faults)}")


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
            at once with an error, for `breaker_s`; the next failure after that time begins another
            such pause. None never refuses. Answers with `is_error` and refused arguments are no
            failures.
        breaker_s: See `breaker_failures`.

    Raises:
        ToolError: It lists every value that is out of bounds.
    """

    timeout_s: Positive | None = None
    max_concurrency: Count | None = None
    rate_limit_per_s: Positive | None = None
    retries: Natural = 0
    backoff_s: Positive = 0.5
    transient: tuple[type[Exception], ...] = ()
    cache_size: Natural = 0
    breaker_failures: Count | None = None
    breaker_s: Positive = 30.0

    def __post_init__(self) -> None:
        rules = typing.get_type_hints(type(self), include_extras=True)
        rules["transient"] = ExceptionTypes
        check_options("ToolPolicy", **{n: (rule, getattr(self, n)) for n, rule in rules.items()})

    def is_transient(self, error: BaseException) -> bool:
        """Whether a call that failed with `error` is worth another try."""
        return isinstance(error, (TransientError, *self.transient))
