"""The gateway's benchmark: what it counts as recognised."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
matching: Any = importlib.import_module("gateway_cases.matching")


def test_changed_turns_are_the_same_or_others_as_the_table_says() -> None:
    assert matching.errors() == {"forks_false": 0, "matches_false": 0, "wrong": []}
