"""`open_rollout` entered otherwise than by ``async with`` says how it is entered."""

from __future__ import annotations

from typing import Any

import pytest

import rollout
from rollout import RolloutError
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

CONFIG = Scenario(seed=1).reply("", "Well.").config()
WORDS = r"write `async with rollout\.open_rollout\(\.\.\.\) as runtime:`"


async def test_open_rollout_awaited_says_how_it_is_entered() -> None:
    opening: Any = rollout.open_rollout(CONFIG)
    with pytest.raises(RolloutError, match=WORDS):
        await opening


async def test_open_rollout_entered_by_with_says_how_it_is_entered() -> None:
    opening: Any = rollout.open_rollout(CONFIG)
    with pytest.raises(RolloutError, match=WORDS), opening:
        pass


@pytest.mark.parametrize("name", ["generate", "config"])
async def test_open_rollout_used_before_it_is_entered_says_how_it_is_entered(name: str) -> None:
    runtime: Any = rollout.open_rollout(CONFIG)
    with pytest.raises(RolloutError, match=WORDS) as caught:
        getattr(runtime, name)
    assert isinstance(caught.value, AttributeError)  # those who only look are told in their way
    assert name in str(caught.value)
    assert not hasattr(runtime, name)
