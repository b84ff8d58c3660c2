"""Starts pieces of foreign code, sees that they end in time, and gives up those that do not."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import anyio

from rollout.bridge import loop_clock
from rollout.expiries import Expiries
from rollout.loop_tasks import can_enclose, open_apart
from rollout.scopes import open_task_group
from rollout.supervised import driving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from rollout.drives import MainDrive
    from rollout.loop_tasks import StartTask
    from rollout.supervised import Supervised


class Supervision:
    """Gives up foreign code that does not end; made by `open_supervision`.

    Attributes:
        cleanup_s: How long after its deadline, or its cancellation, code is given up.
        clock: The loop's.
        scopes_are_late: Whether code has a scope only once it is cancelled, on trio. Elsewhere it
            has one from its start, which ends it at its deadline.
    """

    def __init__(self, start: StartTask, cleanup_s: float) -> None:
        self.cleanup_s, self.clock = cleanup_s, loop_clock()
        self.scopes_are_late = can_enclose()
        self._expiries = Expiries(self.clock)
        self._start = start
        self._running: dict[Supervised[Any], None] = {}  # in a fixed order
        self._alarm, self._watching = anyio.CancelScope(), anyio.CancelScope(shield=True)
        self._all_ended: anyio.Event | None = None

    def start(self, work: Supervised[Any], drive: MainDrive[Supervised[Any]], what: str) -> None:
        """Start the task of a piece of code."""
        self._running[work] = None
        context = copy_context()
        own = None if self.scopes_are_late else drive
        if own is not driving.get():  # on trio it is found by its task
            context.run(driving.set, own)
        self._start(drive, what, context)

    @property
    def running(self) -> Collection[Supervised[Any]]:
        """What was started and has not ended, in the order in which it began."""
        return self._running

    def end(self, work: Supervised[Any]) -> None:
        """Nobody waits for a piece of code any longer."""
        del self._running[work]
        self._expiries.note_end()
        try:
            work.ended()  # which may start another one
        finally:
            if self._all_ended is not None and not self._running:
                self._all_ended.set()

    def end_at(self, work: Supervised[Any], at: float) -> None:
        """Have a piece of code `expire` at that time, where its scope does not end it then."""
        if self.scopes_are_late:
            self._expiries.expect(work, at)
        self.look_at(at)

    def look_at(self, at: float) -> None:
        """Something is to have ended at that time."""
        if at + self.cleanup_s < self._alarm.deadline:
            self._alarm.deadline = at + self.cleanup_s

    async def watch(self) -> None:
        """End what is to end, in time or by force; until `stop`, whatever is cancelled."""
        with self._watching:
            async with open_task_group() as tasks:
                tasks.start_soon(self._expiries.run)
                await self._give_up()

    async def _give_up(self) -> None:
        """Give up what should have ended long ago."""
        while True:
            first = min((work.earliest for work in self._running), default=math.inf)
            with anyio.CancelScope(deadline=first + self.cleanup_s) as self._alarm:
                await anyio.sleep_forever()
            now = self.clock()
            for work in tuple(self._running):
                work.give_up(now)

    def stop(self) -> None:
        """Wait for nothing any longer."""
        for work in tuple(self._running):
            work.give_up(math.inf)
        self._watching.cancel()

    async def cancel_all(self) -> None:
        """Cancel what runs, and wait until that has ended or was given up; shielded."""
        for work in tuple(self._running):
            work.cancel()
        with anyio.CancelScope(shield=True):
            while self._running:
                self._all_ended = anyio.Event()
                await self._all_ended.wait()


@asynccontextmanager
async def open_supervision(cleanup_s: float) -> AsyncIterator[Supervision]:
    """A supervision; at the end of the block nothing that it runs is waited for any longer."""
    async with open_apart() as start, open_task_group() as tasks:
        supervision = Supervision(start, cleanup_s)
        tasks.start_soon(supervision.watch)
        try:
            yield supervision
        finally:
            try:
                await supervision.cancel_all()
            finally:  # on asyncio a second Task.cancel waits for nothing
                supervision.stop()
