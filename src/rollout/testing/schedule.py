"""The order in which trio runs its tasks, made repeatable.

trio shuffles the tasks that are ready, so that no program comes to rely on their order. A *schedule
seed* fixes the shuffle: one seed gives one order, and trying many seeds searches for races.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import trio
import trio.testing

from rollout.testing.ceiling import CEILING_S, run_below_ceiling
from rollout.testing.clock import virtual_threads

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

T = TypeVar("T")

# No public name leads there; Hypothesis and pytest-trio use the same two.
_scheduler: Any = trio._core._run


@contextmanager
def schedule_seed(seed: int) -> Iterator[None]:
    """Within the block, trio runs tasks in an order that `seed` determines."""
    allowed, state = _scheduler._ALLOW_DETERMINISTIC_SCHEDULING, _scheduler._r.getstate()
    _scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    reseed(seed)
    try:
        yield
    finally:
        _scheduler._ALLOW_DETERMINISTIC_SCHEDULING = allowed
        _scheduler._r.setstate(state)


def reseed(seed: int) -> None:
    """Begin the order of `seed` here; only within `schedule_seed`."""
    _scheduler._r.seed(seed)


def run_virtual(
    function: Callable[..., Awaitable[T]],
    *args: Any,
    seed: int = 0,
    ceiling_s: float = CEILING_S,
) -> T:
    """What ``await function(*args)`` returns, run by trio in virtual time under a schedule seed.

    The clock starts at 0 and jumps to the next deadline whenever every task waits.

    Args:
        seed: The schedule seed.
        ceiling_s: Virtual seconds after which the run is taken for hanging.

    Raises:
        VirtualCeilingError: The run passed `ceiling_s`; the text holds the tree of its tasks.
    """

    async def main() -> T:
        return await run_below_ceiling(lambda: function(*args), ceiling_s)

    with schedule_seed(seed), virtual_threads():
        return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
