"""What tests of engines share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import faulty_cores


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every core of `faulty_cores` that a test starts, in order."""
    made: list[Any] = []
    for name in ("MortalCore", "UpdatableCore"):
        real = getattr(faulty_cores, name)

        def make(real: Any = real, **options: Any) -> Any:
            made.append(real(**options))
            return made[-1]

        monkeypatch.setattr(faulty_cores, name, make)
    yield made
    assert all(not core._aborted for core in made if core.is_closed), "requests were left"
