"""Where the groups of calls come from: the journal, what earlier calls left, and sources.

Each pull of a source is a task of the runtime's, which outlives the call that wanted it: a prompt
that comes late is for the next call, and none is lost.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from rollout.containment import Contained, UnresponsiveError
from rollout.errors import RolloutError
from rollout.scheduling.member_group import MemberGroup
from rollout.scheduling.prompts import check_prompt
from rollout.scopes import find_propagating
from rollout.types import Prompt, name_prompt
from rollout.worker_threads import may_leave_loop

if TYPE_CHECKING:
    from rollout.containment import Containment
    from rollout.scheduling.member_group import RecordedGroup
    from rollout.worker_threads import WorkerThreads

logger = logging.getLogger("rollout.scheduling")

#: Sources whose position is known; of more, the one used longest ago is closed.
MAX_SOURCES = 16
#: The name of a source in messages about threads and code that do not end.
WHAT = "the source of prompts"
_END: Any = object()


class Numbered(Protocol):
    """A map-style dataset: has its prompts by index, from 0 on."""

    def __getitem__(self, number: int, /) -> Prompt: ...


Source = Iterable[Prompt] | AsyncIterable[Prompt] | Numbered


class GroupQueue:
    """Groups that were pulled and that no call has, and the sources of more.

    Args:
        scheduler: A `Scheduler`, whose module imports this one: has the journal, the calls and the
            tasks.
        threads: Where sources that may block are pulled.
        containment: Has the tasks of async sources.

    Attributes:
        leftovers: First those that the journal gives back to the call that delivered them, in that
            order; then the others, as they were pulled. The next call takes them first, whatever
            its source is.
    """

    def __init__(self, scheduler: Any, threads: WorkerThreads, containment: Containment) -> None:
        self.leftovers: list[MemberGroup] = []
        self.scheduler, self.threads, self.containment = scheduler, threads, containment
        self._pulled = scheduler.log.pull_count
        self._sources: dict[int, PromptSource] = {}

    def restore(self, recorded: Iterable[RecordedGroup]) -> None:
        """Queue the groups that the journal has for a call that begins."""
        for each in recorded:
            prompt = each.prompt
            if each.call is None:  # no member of it began
                prompt = name_prompt(prompt, f"prompt-{each.number}")
            before = None if each.call is None else each
            self.keep([MemberGroup(each.number, prompt, before, each.version)])

    def keep(self, groups: Iterable[MemberGroup]) -> None:
        """Queue groups for the next call."""
        for group in groups:
            group.call = None
            self.leftovers.append(group)
        self.leftovers.sort(key=lambda each: -1 if each.was_delivered else each.number)

    def pop_group(self, call: Any) -> MemberGroup | None:
        """Take the first group that a `Call` may have.

        What an open call's source gave is for calls with that source. A group with a uid of its own
        that the call has already is left for a later call. What the call delivered in an earlier
        process is accepted first: another group must not come between.
        """
        others = {each.source for each in self.scheduler.calls} - {call.source, None}
        must_wait = call.is_replayed or any(group.was_delivered for group in call.groups.open)
        for at, group in enumerate(self.leftovers):
            if group.before is not None and group.was_delivered:
                may_take = group.before.delivered_in == call.step
            else:
                is_named = group.is_begun or group.waiting or group.before is not None
                is_taken = is_named and group.uid in call.taken_names
                may_take = not (must_wait or is_taken or group.source in others)
            if may_take:
                return self.leftovers.pop(at)
        return None

    # Sources.

    def find_source(self, data: Any) -> PromptSource:
        """Return a caller's source where it was left; one that is over begins again."""
        source = self._sources.pop(id(data), None) or PromptSource(data, self)
        used = {each.source for each in self.scheduler.calls}
        idle = [each for each in self._sources.values() if not (each in used or each.is_pulling)]
        self._sources[id(data)] = source  # the last of them
        for each in idle[: max(0, len(self._sources) - MAX_SOURCES)]:
            self.forget(each)
        return source

    def forget(self, source: PromptSource) -> None:
        """Close a source and forget its position: a call that names it again begins it again."""
        if self._sources.get(id(source.data)) is source:  # else it has begun again already
            del self._sources[id(source.data)]
        source.close()

    def close(self) -> None:
        """Close all sources."""
        for source in tuple(self._sources.values()):
            self.forget(source)

    def read(self, prompt: Any, source: PromptSource) -> None:
        """Queue the group of a prompt that was pulled, unless the journal has it.

        Raises:
            PromptError: It is none, or cannot be recorded.
        """
        number, where = self._pulled, f"source: prompt {source.count - 1}"
        check_prompt(prompt, where)
        if self.scheduler.log.note_pull(number, prompt, source.step, where):
            self._pulled += 1
            group = MemberGroup(number, name_prompt(prompt, f"prompt-{number}"))
            group.source = source
            self.leftovers.append(group)


class PromptSource:
    """A caller's source, with its position.

    Args:
        data: What the caller gave; a reference, so that no other object gets the same `id`.

    Attributes:
        data: That.
        count: Prompts that were pulled.
        is_over: Whether it has no more, or was closed.
        failure: What it raised, until a call ends with that.
        is_pulling: Whether a pull is under way.
        step: Of the call that pulled last.
    """

    def __init__(self, data: Any, queue: GroupQueue) -> None:
        self.data, self._queue = data, queue
        self.count = self.step = 0
        self.is_over = self.is_pulling = False
        self.failure: BaseException | None = None
        self._is_async = isinstance(data, AsyncIterable)
        self._iterator: Any = None
        #: Of an async source: its task, and what has that pull once more.
        self._task: Contained[None] | None = None
        self._wanted = anyio.Event()

    def ask(self, step: int) -> None:
        """Start a pull of one prompt for a call of this step, unless one is under way."""
        if self.is_pulling:
            return
        self.is_pulling, self.step = True, step
        if self._task is not None:
            self._wanted.set()
        else:
            self._queue.scheduler.start(self._run_task if self._is_async else self._pull)

    def close(self) -> None:
        """Pull no more, and drop the reference to what the caller gave."""
        self.is_over = True
        self._wanted.set()
        if self._task is not None:
            self._task.cancel()  # it closes the iterator
        else:
            self.data, self._iterator = (), None

    async def _pull(self) -> None:
        """Pull one prompt."""
        try:
            prompt, is_last = await self._next()
            self.is_over = self.is_over or is_last
            if prompt is not _END:
                self.count += 1
                self._queue.read(prompt, self)
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
            self._queue.scheduler.change()

    async def _next(self) -> tuple[Any, bool]:
        """Return one prompt, or `_END`, and whether it is known to be the last."""
        if self._is_async:
            self._iterator = aiter(self.data) if self._iterator is None else self._iterator
            prompt = await anext(self._iterator, _END)
            return prompt, prompt is _END
        # A list cannot block; and time would run away from a thread where it is virtual.
        if type(self.data) in (list, tuple) or not may_leave_loop():
            return self._next_sync()
        return await self._queue.threads.run_beside(WHAT, self._next_sync, patience_s=0.0)

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

    # The task of an async source pulls whenever that is wanted, and closes the source: what an
    # async generator has open where it yields, such as a task group that prefetches, belongs to the
    # task that pulled. In another one, its scopes would be left out of order.

    async def _run_task(self) -> None:
        """Run the task, a contained one, as the source is foreign code."""
        task = self._task = Contained[None](self._queue.containment, WHAT)
        try:
            await task.run(self._pull_until_over)
        except UnresponsiveError as error:
            self._queue.scheduler.tally.unresponsive += 1
            logger.warning("%s", error)
        finally:
            self._task = self._iterator = None
        if task.error is not None:
            raise task.error

    async def _pull_until_over(self) -> None:
        # Entered before any scope of the source's, which may be open wherever we are below.
        with anyio.CancelScope() as all_of_it:
            try:
                while not self.is_over:
                    await self._pull()
                    # A scope that the source has open may be cancelled meanwhile, as by a task of
                    # its own that failed: the source meets that at its next pull.
                    with anyio.CancelScope(shield=True):
                        while not (self.is_pulling or self.is_over):
                            await self._wanted.wait()
                            self._wanted = anyio.Event()
            finally:
                all_of_it.shield = True
                await self._close_iterator()

    async def _close_iterator(self) -> None:
        """Close a generator, which may have something open; other iterators are their owners'."""
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
