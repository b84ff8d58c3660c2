"""The calls of groups for callers outside the runtime's loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rollout.chat.group import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from rollout.batch import RolloutBatch
    from rollout.config import GroupPolicy
    from rollout.runtime.blocking_views import Wait
    from rollout.runtime.group_calls import GroupStream
    from rollout.runtime.runtime import RolloutRuntime
    from rollout.scheduling.prompt_source import Source
    from rollout.tensor_layout import Layout, Trim

    Enter = Callable[
        [Callable[[], AbstractAsyncContextManager[GroupStream]]],
        AbstractContextManager[tuple[GroupStream, Callable[[], None]]],
    ]


class BlockingGroupStream(Iterator[Group]):
    """Groups of `BlockingRollout.stream_groups`, as they finish."""

    def __init__(self, stream: GroupStream, wait: Wait) -> None:
        self._stream, self._wait = stream, wait

    def __next__(self) -> Group:
        """The next one, once it is accepted."""
        group = self._wait(self._stream.receive)
        if group is None:
            raise StopIteration
        return group

    def metrics(self) -> dict[str, float]:
        """`GroupStream.metrics`."""

        async def metrics() -> dict[str, float]:
            return self._stream.metrics()

        return self._wait(metrics)


class BlockingGroups:
    """The part of a `BlockingRollout` that takes groups of its caller's choice."""

    _runtime: RolloutRuntime
    _wait: Wait
    _entered: Enter

    def collect(
        self,
        source: Source,
        groups: int,
        *,
        policy: GroupPolicy | None = None,
        step: int | None = None,
        layout: Layout = "padded",
        trim: Trim = False,
    ) -> RolloutBatch:
        """`RolloutRuntime.collect`, waited for in this thread.

        The source is asked in a thread of the runtime's, or, an async one, on its loop.
        """
        return self._wait(
            lambda: self._runtime.collect(
                source, groups, policy=policy, step=step, layout=layout, trim=trim
            )
        )

    @contextmanager
    def stream_groups(
        self,
        source: Source,
        *,
        policy: GroupPolicy | None = None,
        step: int | None = None,
        max_staleness: int | None = None,
        groups_per_step: int | None = None,
    ) -> Iterator[BlockingGroupStream]:
        """`RolloutRuntime.stream_groups`: ``with … as groups``, an iterator of any thread."""
        with self._entered(
            lambda: self._runtime.stream_groups(
                source,
                policy=policy,
                step=step,
                max_staleness=max_staleness,
                groups_per_step=groups_per_step,
            )
        ) as (stream, _):
            yield BlockingGroupStream(stream, self._wait)

    def batch_of(
        self, groups: Sequence[Group], *, layout: Layout = "padded", trim: Trim = False
    ) -> RolloutBatch:
        """`RolloutRuntime.batch_of`, waited for in this thread."""
        return self._wait(lambda: self._runtime.batch_of(groups, layout=layout, trim=trim))

    def discard_carried(self) -> int:
        """`RolloutRuntime.discard_carried`, waited for in this thread."""
        return self._wait(self._runtime.discard_carried)
