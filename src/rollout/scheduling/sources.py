"""What gives prompts to calls: a caller's source, asked for one prompt at a time."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from typing import Any, Protocol

import anyio

from rollout.containment import Contained, enter_containment
from rollout.errors import RolloutError
from rollout.scheduling.members import SourceCallKey
from rollout.scopes import find_propagating
from rollout.types import Prompt
from rollout.worker_threads import WorkerThreads, may_leave_loop

logger = logging.getLogger("rollout.scheduling")

#: The name of a source in messages about threads and code that do not end.
WHAT = "the source of prompts"
_END: Any = object()


class Numbered(Protocol):
    """A map-style dataset: has its prompts by index, from 0 on."""

    def __getitem__(self, number: int, /) -> Prompt: ...


Source = Iterable[Prompt] | AsyncIterable[Prompt] | Numbered


class PromptSource:
    """A caller's source, with its position.

    One task, a contained one, asks it whenever a call wants a prompt, and closes it. The task
    outlives the calls: a prompt that comes late is for the next one. What an async generator has
    open where it yields, such as a task group that prefetches, belongs to the task that asked; in
    another one, its scopes would be left out of order.

    Args:
        data: What the caller gave; a reference, so that no other object gets the same `id`.
        scheduler: A `Scheduler`, whose module imports this one.

    Attributes:
        data: That.
        count: Prompts that were pulled.
        is_over: Whether it has no more, or was closed.
        failure: What it raised, until a call ends with that.
        is_pulling: Whether a pull is under way.
        asked_by: The call that pulled last.
    """

    def __init__(self, data: Any, scheduler: Any) -> None:
        self.data, self._scheduler = data, scheduler
        self.count, self.asked_by = 0, SourceCallKey(0)
        self.is_over = self.is_pulling = False
        self.failure: BaseException | None = None
        self._is_async = isinstance(data, AsyncIterable)
        self._iterator: Any = None
        self._has_task = False
        self._task: Contained[None] | None = None
        self._wanted = anyio.Event()  # has the task pull once more, or end

    def ask(self, call: SourceCallKey) -> None:
        """Start a pull of one prompt for a call, unless one is under way."""
        if self.is_pulling:
            return
        self.is_pulling, self.asked_by = True, call
        self._wanted.set()
        if not self._has_task:
            self._has_task = True
            self._scheduler.start(self._run_task)

    def close(self) -> None:
        """Pull no more, and drop the reference to what the caller gave."""
        self.is_over = True
        self._wanted.set()
        if self._task is not None:
            self._task.cancel()  # it closes the iterator
        if self._task is None or not self._is_async:  # else it may be open until the end
            self.data = ()

    async def _run_task(self) -> None:
        enter_containment(self._scheduler.services.containment)
        task = self._task = Contained[None](self._scheduler.services.containment, WHAT)
        try:
            await task.run(self._pull_until_over)
        finally:
            if task.unresponsive is not None:
                self._scheduler.tally.unresponsive += 1
                logger.warning("%s", task.unresponsive)
            self._task = self._iterator = None
            self._has_task = self.is_pulling = False
            self._scheduler.change()
        if task.error is not None:
            raise task.error

    async def _pull_until_over(self) -> None:
        # Entered before any scope of the source's, which may be open wherever we are below.
        with anyio.CancelScope() as all_of_it:
            try:
                while not self.is_over:
                    await self._pull()
                    # A scope that an async one has open may be cancelled meanwhile, as by a task of
                    # its own that failed: the source meets that at its next pull.
                    with anyio.CancelScope(shield=self._is_async):
                        while not (self.is_pulling or self.is_over):
                            await self._wanted.wait()
                            self._wanted = anyio.Event()
            finally:
                all_of_it.shield = True
                await self._close_iterator()

    async def _pull(self) -> None:
        """Pull one prompt."""
        try:
            prompt, is_last = await self._next()
            self.is_over = self.is_over or is_last
            if prompt is not _END:
                self.count += 1
                self._scheduler.add_prompt(prompt, self)
        except BaseException as error:  # loaders in other languages raise what is no Exception
            is_own = not self._is_async and isinstance(error, GeneratorExit)  # nothing closes it
            if not is_own and find_propagating(error) is not None:
                raise
            self.failure = error
            if isinstance(error, anyio.get_cancelled_exc_class()):  # it would look like its call's
                what = "source: it was cancelled by itself, and not by the call that asked it"
                self.failure = RolloutError(what)
                self.failure.__cause__ = error
        finally:
            self.is_pulling = False
            self._scheduler.change()

    async def _next(self) -> tuple[Any, bool]:
        """Return one prompt, or `_END`, and whether it is known to be the last."""
        if self._is_async:
            self._iterator = aiter(self.data) if self._iterator is None else self._iterator
            prompt = await anext(self._iterator, _END)
            return prompt, prompt is _END
        # A list cannot block; and time would run away from a thread where it is virtual.
        if type(self.data) in (list, tuple) or not may_leave_loop():
            return self._next_sync()
        threads: WorkerThreads = self._scheduler.threads
        return await threads.run_beside(WHAT, self._next_sync)

    def _next_sync(self) -> tuple[Any, bool]:
        if self._iterator is None:
            if self._length() == 0:
                return _END, True
            self._iterator = iter(self.data)
        prompt = next(self._iterator, _END)
        return prompt, prompt is _END or self.count + 1 >= self._length()

    def _length(self) -> float:
        """How many prompts it has, where it is a sequence or a dataset with a length; else inf.

        Such a dataset may give items beyond that too.
        """
        if isinstance(self.data, Iterable) and not isinstance(self.data, Sequence):
            return math.inf
        try:
            return len(self.data)
        except Exception:  # a dataset that has none, or cannot say
            return math.inf

    async def _close_iterator(self) -> None:
        """Close an async generator, which may have something open; others are their owners'."""
        if not isinstance(self._iterator, AsyncGenerator):
            return
        try:
            await self._iterator.aclose()
        except BaseException as error:
            if find_propagating(error) is not None:
                raise
            # Of a task group that it has open, what closes it comes back in a group.
            is_closed = (
                isinstance(error, BaseExceptionGroup) and error.split(GeneratorExit)[1] is None
            )
            if not is_closed:
                logger.warning("%s could not be closed", WHAT, exc_info=error)
