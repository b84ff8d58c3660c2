"""How long things may take."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import attrs

from rollout.config.checks import Positive
from rollout.config.config_faults import Fault
from rollout.config.section_type import Section

#: Each limit with the wider ones around it, nearest first.
WIDER_LIMITS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "generation_s": ("turn_s", "trajectory_s", "batch_s"),
        "tool_s": ("turn_s", "trajectory_s", "batch_s"),
        "turn_s": ("trajectory_s", "batch_s"),
        "trajectory_s": ("batch_s",),
    }
)


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _brief(seconds: float) -> float:
    """Whole seconds as an int, for messages."""
    return int(seconds) if seconds.is_integer() else seconds


@attrs.frozen(kw_only=True)
class LimitsConfig(Section):
    """How long things may take, each at most as long as the next wider one.

    generation ≤ turn and tool ≤ turn ≤ trajectory ≤ batch; None is no limit of its own, and then
    the next wider one holds. A limit that is not given is at most as long as the wider ones that
    are.
    """

    section: ClassVar[str] = "limits"
    #: One generation: its waiting, and all its requests to engines.
    generation_s: Positive | None = 600.0
    #: One tool call.
    tool_s: Positive | None = 60.0
    #: One generation and its tool calls.
    turn_s: Positive | None = 900.0
    #: From the admission past the limiter to the agent's end.
    trajectory_s: Positive | None = 3600.0
    #: From the call of `generate`, `stream` or `collect`.
    batch_s: Positive | None = 7200.0
    #: One call of the reward function.
    reward_s: Positive | None = 300.0
    #: How long tools stay open while their trajectory is carried from one call to the next
    #: (`scheduling.groups.surplus`).
    carry_s: Positive | None = 1800.0
    #: Closing a tool, an interaction or a request, shielded from cancellation; and what cancelled
    #: code, or a killed process, has to end.
    cleanup_s: Positive = 5.0

    @classmethod
    def derived_defaults(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Limits not given, no longer than the wider ones that are."""
        derived = {}
        for inner, wider in WIDER_LIMITS.items():
            bounds = [values[name] for name in wider if _is_seconds(values.get(name))]
            default = getattr(attrs.fields(cls), inner).default
            if inner not in values and bounds:
                derived[inner] = min(default, *bounds)
        return derived

    def relation_faults(self, sound: Collection[str]) -> Iterator[Fault]:
        """Each limit fits into the wider ones.

        The nearest that is too short is named; of equal ones the widest, which the others, where
        they were not given, have their length from.
        """
        seconds = {name: getattr(self, name) for name in sound}
        for inner, wider in WIDER_LIMITS.items():
            length = seconds.get(inner)
            if length is None:
                continue
            bounds = {outer: seconds[outer] for outer in wider if seconds.get(outer) is not None}
            short = [bound for bound in bounds.values() if length > bound]
            if short:
                outer = [name for name, bound in bounds.items() if bound == short[0]][-1]
                expected = f"expected at most limits.{outer} = {_brief(short[0])}"
                yield Fault(inner, expected, _brief(length))


def limits_set(limits: LimitsConfig) -> dict[str, float | None]:
    """The limits that differ from their defaults: an override of one may narrow the others."""
    return {
        field.name: value
        for field in attrs.fields(LimitsConfig)
        if (value := getattr(limits, field.name)) != field.default
    }
