"""Public names, signatures and configuration keys are those of a text file: changes are seen."""

from __future__ import annotations

import difflib

import pytest

from golden.public_surface import PATH, public_surface


def differences(recorded: str, now: str) -> list[str]:
    """Lines that went ("-") and came ("+")."""
    lines = difflib.ndiff(recorded.splitlines(), now.splitlines())
    return [line for line in lines if line[0] in "-+"]


def test_public_surface_is_what_the_file_says() -> None:
    now = public_surface()
    for line in (
        "rollout.Prompt.uid: str | None = None",
        "rollout.Outcome.COMPLETED = 'completed'",
        "rollout.Trajectory.answer: str, a property",
        "rollout.tools.Tool = rollout.Tool",
        "key limits.tool_s: a number > 0 or None = 60.0",
        "key engine[simulated].scenario: a mapping = {}",
        "key seed: an integer ≥ 0 or None = None",
    ):
        assert line in now.splitlines()
    assert " at 0x" not in now
    found = differences(PATH.read_text(encoding="utf-8"), now)
    if found:
        shown = "\n".join(found)
        pytest.fail(f"{shown}\nwhere that is meant: python tests/golden/public_surface.py", False)
