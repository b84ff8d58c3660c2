"""The sources of prompts: pulled one prompt at a time, of which none is lost."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from rollout.containment import Contained, UnresponsiveError
from rollout.errors import PromptError, RolloutError
from rollout.scopes import find_propagating
from rollout.types import Prompt
from rollout.worker_threads import may_leave_loop

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.containment import Containment
    from rollout.observe.tally import Tally
    from rollout.scheduling.member_group import MemberGroup
    from rollout.worker_threads import WorkerThreads

_END: Any = object()
#: The name of a source in messages about threads and code that do not end.
THREAD_NAME = "the source of prompts"


class Numbered(Protocol):
    """A map-style dataset: has its prompts by index, from 0 on."""

    def __getitem__(self, number: int, /) -> Prompt: ...


Source = Iterable[Prompt] | AsyncIterable[Prompt] | Numbered

logger = logging.getLogger("rollout.scheduling")


def check_source(source: Any) -> None:
    """Check that an argument is a source.

    Raises:
        PromptError: It is not; nothing has been pulled.
    """
    is_iterable = isinstance(source, AsyncIterable | Iterable)
    if not is_iterable:
        with suppress(TypeError):
            iter(source)  # asks for nothing, where it has its items by number
            is_iterable = True
    if isinstance(source, Prompt | str | bytes | Mapping) or not is_iterable:
        raise PromptError(
            f"source: expected an iterable or async iterable of Prompt, got {type(source).__name__}"
        )


class PromptSource:
    """A caller's source, with its position.

    Args:
        given: What the caller gave; a reference, so that no other object gets the same `id`.
        threads: Where a source that may block is pulled.
        read: Makes a group of a prompt, or None where the journal has it; raises
            `PromptError` where that is no prompt.
        changed: Called after each pull.

    Attributes:
        count: Prompts that it has given.
        pulled: Prompts that no call has taken yet, as groups.
        users: Open calls that have it.
        is_over: Whether it has given all that it has.
        failure: What it raised, until a call ends with that.
        is_pulling: Whether a pull is under way.
        step: Of the call that asked it last.
    """

    def __init__(
        self,
        given: Any,
        threads: WorkerThreads,
        read: Callable[[Any, PromptSource], MemberGroup | None],
        changed: Callable[[PromptSource], object],
    ) -> None:
        self.given = given
        self.count = 0
        self.pulled: deque[MemberGroup] = deque()
        self.users: dict[Any, None] = {}
        self.is_over = self.is_pulling = False
        self.failure: BaseException | None = None
        self.step = 0
        self._threads, self._read, self._changed = threads, read, changed
        self._iterator: Any = None
        #: Of an async source: what runs its task, and is set to have that pull once more.
        self._task: Contained[None] | None = None
        self._asked = anyio.Event()

    @property
    def can_pull(self) -> bool:
        """Whether it may have more, and no pull is under way."""
        return not (self.is_over or self.is_pulling)

    def ask(self, start: Callable[..., object], containment: Containment, tally: Tally) -> None:
        """Start a pull of one prompt: of an async source, in the task that did so before.

        Args:
            start: Starts a task of the runtime's.
            containment: Has the task of an async source.
            tally: Counts those that do not end.
        """
        self.is_pulling = True
        if self._task is not None:
            self._asked.set()
        elif isinstance(self.given, AsyncIterable):
            start(lambda: self._run_task(containment, tally))
        else:
            start(self.pull)

    def close(self) -> None:
        """Pull no more, and drop the reference to what the caller gave."""
        self.given = ()
        self._end()

    async def pull(self) -> None:
        """Pull one prompt, in a task that nothing but the runtime's end cancels."""
        try:
            prompt, is_last = await self._next()
            if prompt is _END:
                self._end()
                return
            self.count += 1
            group = self._read(prompt, self)
            if group is not None:
                self.pulled.append(group)
            if is_last:
                self._end()
        except BaseException as error:  # loaders in other languages raise what is no Exception
            is_sync = not isinstance(self.given, AsyncIterable)
            is_own = is_sync and isinstance(error, GeneratorExit)  # of nothing that is closed here
            if not is_own and find_propagating(error) is not None:
                raise
            self.failure = _explain_cancellation(error)
        finally:
            self.is_pulling = False
            self._changed(self)

    async def _next(self) -> tuple[Any, bool]:
        """Return one prompt, and whether it is known to be the last."""
        if isinstance(self.given, AsyncIterable):
            self._iterator = aiter(self.given) if self._iterator is None else self._iterator
            return await anext(self._iterator, _END), False
        # A list cannot block; and time would run away from a thread where it is virtual.
        if type(self.given) in (list, tuple) or not may_leave_loop():
            return self._next_sync()
        return await self._threads.run_beside(THREAD_NAME, self._next_sync, patience_s=0.0)

    def _next_sync(self) -> tuple[Any, bool]:
        if self._iterator is None:
            if self._length() == 0:
                return _END, True
            self._iterator = iter(self.given)
        prompt = next(self._iterator, _END)
        return prompt, prompt is not _END and self.count + 1 >= self._length()

    def _length(self) -> float:
        """How many prompts it has, where it is a sequence or a dataset with a length; else inf.

        Such a dataset may give items beyond that too.
        """
        if isinstance(self.given, Iterable) and not isinstance(self.given, Sequence):
            return math.inf
        try:
            return len(self.given)
        except Exception:  # a dataset that has none, or cannot say
            return math.inf

    def _end(self) -> None:
        """Note that it is over, and close its task."""
        self.is_over = True
        if self._task is None:
            self._iterator = None
        else:  # the task closes it
            self._task.cancel()

    def stop_pulling(self) -> None:
        """Have the task of an async source pull no more, and close the source."""
        self.is_over = True
        self._asked.set()

    # The task of an async source. It pulls whenever that is wanted, and closes the source: what an
    # async generator has open where it yields, such as a task group that prefetches, belongs to the
    # task that pulled. In another one, its scopes would be left out of order.

    async def _run_task(self, containment: Containment, tally: Tally) -> None:
        """Run the task, a contained one, as the source is foreign code."""
        task = self._task = _SourceTask(containment, self)
        try:
            await task.run(self._pull_until_over)
        except UnresponsiveError as error:
            tally.unresponsive += 1
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
                    await self.pull()
                    # A scope that the source has open may be cancelled meanwhile, as by a task of
                    # its own that failed: the source meets that at its next pull.
                    with anyio.CancelScope(shield=True):
                        await self._asked.wait()
                    self._asked = anyio.Event()
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
            if isinstance(error, BaseExceptionGroup) and error.split(GeneratorExit)[1] is None:
                return
            logger.warning("%s could not be closed", THREAD_NAME, exc_info=error)


class _SourceTask(Contained[None]):
    """The task of an async source, which waits shielded: its cancellation wakes it."""

    def __init__(self, containment: Containment, source: PromptSource) -> None:
        super().__init__(containment, THREAD_NAME)
        self._source = source

    def cancel(self) -> None:
        """Have the task close the source, and end."""
        self._source.stop_pulling()
        super().cancel()


def _explain_cancellation(error: BaseException) -> BaseException:
    """Replace a source's own cancellation, which would look like that of its call."""
    if not isinstance(error, anyio.get_cancelled_exc_class()):
        return error
    what = "source: it was cancelled by itself, and not by the call that asked it"
    explained = RolloutError(what)
    explained.__cause__ = error
    return explained
