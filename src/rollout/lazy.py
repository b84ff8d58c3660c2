"""What is imported only when it is needed, and never by two threads at once."""

from __future__ import annotations

import gc
import importlib
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class _Importing:
    """Held while a large library is imported.

    Two threads that import libraries which import each other would otherwise find modules that are
    not whole yet: Python breaks the deadlock in that way. The collector pauses meanwhile: a quarter
    of the time that large libraries take is its own, and what they load stays.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._was_collecting = False

    @property
    def is_pausing(self) -> bool:
        """Whether the collector is disabled for this, and by nobody else."""
        return self._depth > 0 and self._was_collecting

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._was_collecting = gc.isenabled()
            gc.disable()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._was_collecting:
            gc.enable()
        self._lock.release()


importing = _Importing()


def lazy_exports(
    namespace: dict[str, Any], homes: Mapping[str, Sequence[str]]
) -> Callable[[str], Any]:
    """A module-level ``__getattr__`` that imports a name from its home when it is first asked for.

    Args:
        namespace: The package's ``globals()``.
        homes: Module names, each with the names that it is the home of.
    """
    home_of = {name: module for module, names in homes.items() for name in names}

    def getattr_of_package(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        with importing:
            value = getattr(importlib.import_module(home_of[name]), name)
        namespace[name] = value
        return value

    return getattr_of_package


def derives_from(kind: type, module: str, name: str) -> bool:
    """Whether `kind` is this class of a library, or a subclass; nothing is imported to find out.

    Args:
        kind: The class in question.
        module: Where the library defines its class, such as ``pydantic.main``.
        name: The name that it has there.
    """
    return any(each.__module__ == module and each.__name__ == name for each in kind.__mro__)
