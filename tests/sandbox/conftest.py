"""The walls of this machine are tried by the first test of a process that needs them."""

from __future__ import annotations

import pytest

from rollout.sandbox.bubblewrap import BubblewrapProvider

_check = BubblewrapProvider.check
_holding: set[str] = set()


async def check_once(provider: BubblewrapProvider) -> None:
    if provider._bwrap not in _holding:
        await _check(provider)
        _holding.add(provider._bwrap)


@pytest.fixture(autouse=True)
def walls_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BubblewrapProvider, "check", check_once)
