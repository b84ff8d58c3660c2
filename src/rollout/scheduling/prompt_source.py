"""Where the prompts of groups come from: pulled one at a time, and never lost."""

from __future__ import annotations

import gc
import logging
import sys
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from rollout.containment import UnresponsiveError
from rollout.errors import PromptError, RolloutError
from rollout.scheduling.source_task import SourceTask
from rollout.scopes import find_propagating
from rollout.types import Prompt
from rollout.worker_threads import may_leave_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from rollout.containment import Containment
    from rollout.observe.tally import Tally
    from rollout.scheduling.pulled_group import PulledGroup
    from rollout.worker_threads import WorkerThreads

_END: Any = object()
#: What iterators consist of, beside their data and short tuples of variables.
_PARTS = (AsyncIterator, Iterator, CellType, FunctionType, MethodType)
#: Names it to those who look at threads that were left behind.
THREAD_NAME = "the source of prompts"


class Numbered(Protocol):
    """Has its prompts by number, from 0 on, as map-style datasets do."""

    def __getitem__(self, number: int, /) -> Prompt: ...


Source = Iterable[Prompt] | AsyncIterable[Prompt] | Numbered

logger = logging.getLogger("rollout.scheduling")


def check_source(source: Any) -> None:
    """Let a source pass.

    Raises:
        PromptError: It is none; nothing has been pulled.
    """
    if isinstance(source, Prompt | str | bytes | Mapping) or not _can_be_iterated(source):
        raise PromptError(
            f"source: expected an iterable or async iterable of Prompt, got {type(source).__name__}"
        )


def _can_be_iterated(source: Any) -> bool:
    if isinstance(source, AsyncIterable | Iterable):
        return True
    try:
        iter(source)  # asks for nothing, where it has its items by number
    except TypeError:
        return False
    return True


class PromptSource:
    """A caller's source, where it was left.

    Args:
        source: What the caller gave.
        threads: Where a source that may block is asked.
        made: Makes a group of what it gave, or nothing of what is known already; raises
            `PromptError` where that is no prompt.

    Attributes:
        given: What the caller gave; kept, so that nothing else gets its identity.
        kept: Pulled and not used, in the order in which they were.
        count: Prompts that it has given.
        is_over: Whether it has given all that it has.
        failure: What it raised, until somebody was told.
        is_pulling: Whether it is being asked.
        users: Called whenever it has given something.
        number: Its own in a journal; None where it has none.
        is_replayed: It stands for one whose end an earlier process told the caller: what that had
            is all that there is.
        is_beyond: Whether it has given what the journal does not have.
        is_used_up: Whether it has given all of it, and is a sequence, or has items by number.
    """

    def __init__(
        self,
        source: Any,
        threads: WorkerThreads,
        made: Callable[[Any, PromptSource], PulledGroup | None],
    ) -> None:
        self.given = source
        self.kept: list[PulledGroup] = []
        self.is_over = self.is_pulling = False
        self.failure: BaseException | None = None
        self.users: dict[Callable[[], object], None] = {}
        self.number: int | None = None
        self.is_replayed = self.is_beyond = self.is_used_up = False
        self._threads = threads
        self._made = made
        self._iterator: Iterator[Any] | AsyncIterator[Any] | None = None
        self.count = 0
        self._task: SourceTask | None = None

    def ask(
        self,
        pull: Callable[[], Coroutine[Any, Any, object]],
        start: Callable[..., object],
        containment: Containment,
        tally: Tally,
    ) -> None:
        """Have it pulled soon: where it is async, in the task that did so before.

        Args:
            pull: Calls `pull`, and what comes after it.
            start: Starts a task of the runtime's.
            containment: Has that task.
            tally: Counts those that do not.
        """
        if self._task is not None:
            self._task.ask()
        elif isinstance(self.given, AsyncIterable):
            start(partial(self._serve, pull, containment, tally))
        else:
            start(pull)

    async def _serve(self, pull: Callable[[], Any], containment: Containment, tally: Tally) -> None:
        task = self._task = SourceTask(containment, THREAD_NAME)
        try:
            await task.run(partial(task.ask_until_cancelled, pull, self._close))
        except UnresponsiveError as error:
            tally.unresponsive += 1
            logger.warning("%s", error)
        finally:
            self._task = self._iterator = None
        if task.error is not None:
            raise task.error

    async def _close(self) -> None:
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

    async def pull(self) -> None:
        """Ask it for one prompt, in a task that nothing but the runtime's end cancels."""
        try:
            given = await self._next()
            if given is _END:
                self._end()
            else:
                self.count += 1
                group = self._made(given, self)
                if group is not None:
                    self.kept.append(group)
                self._look_for_end()
        except BaseException as error:  # also what is no Exception, of a loader in another language
            if find_propagating(error) is not None:
                raise
            self.failure = _told(error)
        finally:
            self.is_pulling = False
            for tell in tuple(self.users):
                tell()

    def _look_for_end(self) -> None:
        """Where it is known beforehand."""
        length = self._length()
        if length is not None and self.count >= length:
            self.is_used_up = True
            self._end()

    def _length(self) -> int | None:
        """How many prompts it has: a sequence, or what has items by number and a length.

        Such a dataset may give items beyond that too.
        """
        is_sequence = isinstance(self.given, Sequence)
        if isinstance(self.given, Iterable | AsyncIterable) and not is_sequence:
            return None
        try:
            return len(self.given)
        except Exception:  # a dataset that has none, or cannot say
            return None

    def _end(self) -> None:
        """It is not asked again."""
        self.is_over = True
        if self._task is None:
            self._iterator = None
        else:  # it closes that
            self._task.cancel()

    @property
    def keeps_its_own(self) -> bool:
        """Whether what it gave waits for a call with it.

        A list does not have that: as a rule the next call has another one.
        """
        return not (self.is_over or isinstance(self.given, Sequence))

    def is_unreachable(self) -> bool:
        """Whether nobody can give it again: all that refers to it is ours.

        Such is a list, a generator or a loader that a caller made for one call. Not known is what
        tasks and threads refer to that it has started.
        """
        if self.users or self.is_pulling:
            return False
        own = 1 + (self._iterator is self.given)
        if sys.getrefcount(self._iterator) == 2:  # else others may come from it to its source
            own += _references(self._iterator, self.given)
        return sys.getrefcount(self.given) - 1 <= own  # one is the argument's

    def abandon(self) -> None:
        """Nobody will ask it again: let go of what the caller gave."""
        self.given = ()
        self._end()

    @property
    def can_be_asked(self) -> bool:
        """Whether it may have more, and is not being asked."""
        return not (self.is_over or self.is_pulling)

    async def _next(self) -> Any:
        if self._iterator is None:
            if self._length() == 0:
                return _END
            is_async = isinstance(self.given, AsyncIterable)
            self._iterator = aiter(self.given) if is_async else await self._ask(iter, self.given)
        if isinstance(self._iterator, AsyncIterator):
            return await anext(self._iterator, _END)
        return await self._ask(next, self._iterator, _END)

    async def _ask(self, function: Callable[..., Any], *args: Any) -> Any:
        """A source may block; time would run away from a thread where it is virtual."""
        if isinstance(self.given, Sequence) or not may_leave_loop():
            return function(*args)
        return await self._threads.run_beside(THREAD_NAME, function, *args, patience_s=0.0)


def _references(iterator: object, given: object) -> int:
    """How many references to a source would go with its iterator, and with what that alone has."""
    gone, rest = Counter[int](), [iterator]
    while rest:
        referents = gc.get_referents(rest.pop())
        here = Counter(map(id, referents))
        gone.update(here)
        for each in {id(each): each for each in referents}.values():
            # Three more are ours: the mapping's, the variable's and the argument's.
            is_alone = sys.getrefcount(each) - here[id(each)] - 3 == gone[id(each)]
            if is_alone and each is not given and _is_part(each):
                rest.append(each)
    return gone[id(given)]


def _is_part(each: object) -> bool:
    return issubclass(type(each), _PARTS) or (type(each) is tuple and len(each) < 100)


def _told(error: BaseException) -> BaseException:
    """What its caller is told: the cancellation of a source would be taken for the caller's own."""
    if isinstance(error, anyio.get_cancelled_exc_class()):
        told = RolloutError("source: it was cancelled by itself, and not by the call that asked it")
        told.__cause__ = error
        return told
    return error
