"""A coroutine that can be stopped, whatever it does with its cancellation."""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rollout.loop_tasks import Interruptible
from rollout.wait_places import await_frames, describe_place

if TYPE_CHECKING:
    from collections.abc import Coroutine


#: How many waits of its clean-up a coroutine that was given up is thrown out of: each task group
#: that it leaves has one. Loops complain of async generators that are left running.
CLOSINGS = 16


class Ends:
    """Whose code a coroutine is."""

    __slots__ = ()

    @property
    def activity(self) -> object:
        """What the code is, for who finds it running; None where it says that by itself."""
        return None

    def following(self, how: BaseException) -> Coroutine[Any, Any, Any] | None:
        """What the task runs after a coroutine that has ended so, as `end` says; None: nothing."""
        return None

    def end(self, how: BaseException) -> None:
        """It has ended, by this error or with the value in a StopIteration."""

    def closed(self) -> None:
        """The coroutine of its task was given up, and has left its own blocks."""


Owner = TypeVar("Owner", bound=Ends)


class UnresponsiveError(Exception):
    """Foreign code did not end when it was cancelled, and was given up."""


class Drive(Interruptible, Generator[Any, Any, Any], Generic[Owner]):
    """Runs a coroutine in place of ``await``, until it is given up.

    Attributes:
        owner: Whose code the coroutine is.
        unresponsive: Why it was given up.
    """

    __slots__ = ("_coroutine", "owner", "unresponsive")

    def __init__(
        self,
        owner: Owner,
        coroutine: Coroutine[Any, Any, Any],
        unresponsive: UnresponsiveError | None = None,
    ) -> None:
        super().__init__()
        self.owner = owner
        self.unresponsive = unresponsive
        self._coroutine = coroutine

    def __await__(self) -> Drive[Owner]:
        return self

    def send(self, value: Any) -> Any:
        if self.unresponsive is not None:
            self._leave(self.unresponsive)
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        if self.unresponsive is not None:
            self._leave(self.unresponsive)
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def give_up(self, unresponsive: UnresponsiveError) -> None:
        """Resume it never again; its task leaves at once where that is possible."""
        self.unresponsive = unresponsive
        self.interrupt(unresponsive, lambda child: Drive(self.owner, child, unresponsive))

    def place(self) -> str:
        """Where the coroutine waits; see `describe_place`."""
        return describe_place(await_frames(self._coroutine))

    @property
    def cr_frame(self) -> Any:
        """For tools that print where tasks wait."""
        if self._task is None:
            return self  # trio asks whether there is one; a real one would be kept from then on
        return getattr(self._coroutine, "cr_frame", None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cr_"):  # what else loops ask of a coroutine
            return getattr(self._coroutine, name, None)
        raise AttributeError(name)

    def _leave(self, unresponsive: UnresponsiveError) -> None:
        chain = self._chain()
        with suppress(BaseException):  # a clean-up failed
            self._coroutine.close()
            self._closed()
        for _ in range(CLOSINGS):  # it waits again: `close` would leave its async generators there
            if getattr(self._coroutine, "cr_frame", None) is None:
                break
            with suppress(BaseException):
                self._coroutine.throw(UnresponsiveError(*unresponsive.args))
        for coroutine in chain:
            if coroutine.cr_frame is not None:  # it swallowed this too and waits again
                keep_for_ever(coroutine)
        self.disown_children()
        raise unresponsive

    def _closed(self) -> None:
        """The coroutine has left its blocks."""

    def _chain(self) -> list[Any]:
        """The coroutines that wait for each other, the outermost first."""
        chain: list[Any] = []
        inner: Any = self._coroutine
        while hasattr(inner, "cr_await"):
            chain.append(inner)
            inner = inner.cr_await
        return chain


class MainDrive(Drive[Owner]):
    """Runs a coroutine as a task's own, and what follows: whatever they raise, the task ends well.

    What follows has no frame that waits for the first one meanwhile.
    """

    __slots__ = ()

    def become(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run this one in place of what has prepared it."""
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        activity = self.owner.activity  # noqa: F841  (see observe.loop_lag)
        while True:
            try:
                if self.unresponsive is not None:
                    self._leave(self.unresponsive)
                return self._coroutine.send(value)
            except BaseException as how:
                is_over = self._is_over(how)
            if is_over:
                raise StopIteration
            value = None

    def throw(self, *error: Any) -> Any:
        activity = self.owner.activity  # noqa: F841  (see observe.loop_lag)
        try:
            return super().throw(*error)
        except BaseException as how:
            is_over = self._is_over(how)
        if is_over:
            raise StopIteration
        return self.send(None)

    def _is_over(self, how: BaseException) -> bool:
        """Whether nothing follows a coroutine that has ended so."""
        following = None if self.unresponsive is not None else self.owner.following(how)
        if following is None:
            self.owner.end(how)
            return True
        self._coroutine = following
        return False

    def _closed(self) -> None:
        self.owner.closed()


def keep_for_ever(coroutine: Any) -> None:
    """Never let it be collected as garbage.

    It would be closed again then, at the exit of the process where no loop runs; code that catches
    whatever happens and tries again would never let the process go.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(coroutine))
