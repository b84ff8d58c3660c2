"""What all events have in common."""

from __future__ import annotations

import re

import msgspec


def _kind(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    tag=_kind,
    tag_field="kind",
    gc=False,
):
    """Something that happened at a time.

    Attributes:
        at: When, in seconds since the start of the run.
    """

    at: float


class TrajectoryEvent(Event, frozen=True, kw_only=True):
    """Something that happened to one trajectory.

    Attributes:
        trajectory: Its number in the run, from 1.
    """

    trajectory: int
