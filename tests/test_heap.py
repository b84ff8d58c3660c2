"""Full garbage collections leave alone what lived before the runtime."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

import rollout
from rollout.config import SchedulingConfig
from rollout.lazy import importing
from rollout.runtime.heap import freeze_loaded, frozen_heap
from rollout.testing import Scenario

SILENT = Scenario(seed=1).reply("", "ok")


class Knot:
    """Refers to itself."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    assert gc.get_freeze_count() == 0
    yield
    assert gc.get_freeze_count() == 0


def test_frozen_heap_keeps_what_lives_and_gives_it_back() -> None:
    old = Knot()
    old_gone = weakref.ref(old)
    with frozen_heap():
        young = Knot()
        young_gone = weakref.ref(young)
        del old, young
        gc.collect()
        assert young_gone() is None
        assert old_gone() is not None
    gc.collect()
    assert old_gone() is None


def test_frozen_heap_lasts_until_the_last_block_is_left() -> None:
    with frozen_heap():
        with frozen_heap():
            pass
        assert gc.get_freeze_count() > 0


def test_frozen_heap_leaves_a_heap_alone_that_the_caller_has_frozen() -> None:
    gc.freeze()
    with frozen_heap():
        pass
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_frozen_heap_with_the_collector_disabled_does_nothing() -> None:
    gc.disable()
    try:
        with frozen_heap():
            assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_freeze_loaded_freezes_what_has_come_since_within_a_block_only() -> None:
    freeze_loaded()
    assert gc.get_freeze_count() == 0
    with frozen_heap():
        before = gc.get_freeze_count()
        knots = [Knot() for _ in range(1000)]
        freeze_loaded()
        assert gc.get_freeze_count() >= before + len(knots)
        with frozen_heap():  # another runtime's batches are alive: they end without it
            knots += [Knot() for _ in range(1000)]
            count = gc.get_freeze_count()
            freeze_loaded()
            assert gc.get_freeze_count() == count


def test_frozen_heap_is_frozen_while_the_collector_pauses_for_imports() -> None:
    with importing, frozen_heap():
        assert gc.get_freeze_count() > 0


@pytest.mark.anyio
@pytest.mark.parametrize("is_frozen", [True, False])
async def test_runtime_freezes_while_it_is_open_unless_told_not_to(is_frozen: bool) -> None:
    config = SILENT.config(scheduling=SchedulingConfig(freeze_heap=is_frozen))
    async with rollout.open_rollout(config):
        assert (gc.get_freeze_count() > 0) == is_frozen
