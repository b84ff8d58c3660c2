"""The task group whose errors leave as themselves."""

from __future__ import annotations

import anyio
import pytest

from rollout.scopes import open_task_group, unwrap_group

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both backends."""
    return str(request.param)


async def test_task_group_body_fails_error_leaves_as_itself() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with open_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            raise KeyError("mine")


async def test_task_group_task_fails_error_leaves_as_itself_and_ends_body() -> None:
    async def fail() -> None:
        raise LookupError("task")

    ended = False
    with pytest.raises(LookupError, match="task"):
        async with open_task_group() as tasks:
            tasks.start_soon(fail)
            try:
                await anyio.sleep_forever()
            finally:
                ended = True
    assert ended


async def test_task_group_body_ends_tasks_are_cancelled_and_awaited() -> None:
    cleaned = []

    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cleaned.append(True)

    async with open_task_group() as tasks:
        tasks.start_soon(work)
        await anyio.lowlevel.checkpoint()
    assert cleaned == [True]


async def test_task_group_cancelled_from_outside_cancellation_passes() -> None:
    reached = False
    with anyio.CancelScope() as outer:
        async with open_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            outer.cancel()
            await anyio.sleep_forever()
        reached = True
    assert outer.cancelled_caught
    assert not reached


async def test_task_group_cleanup_fails_while_cancelled_error_leaves() -> None:
    async def work() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise OSError("cleanup")

    with pytest.raises(OSError, match="cleanup"):
        async with open_task_group() as tasks:
            tasks.start_soon(work)
            await anyio.lowlevel.checkpoint()


def test_leaf_of_nested_group_prefers_an_ordinary_error() -> None:
    wanted = ValueError("deep")
    group = BaseExceptionGroup("a", [KeyboardInterrupt(), ExceptionGroup("b", [wanted])])
    assert unwrap_group(group) is wanted
