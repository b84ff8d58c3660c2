"""Imports torch and tensordict, and torch's compiler only where somebody compiles.

tensordict marks a few of its functions for the compiler, and torch loads all of it to take a mark:
that takes almost as long as the rest of torch, 80 MB, and 200,000 objects for the collector to look
at. The marks are kept here until the compiler is loaded.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

from rollout.lazy import importing
from rollout.runtime.heap import freeze_loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

COMPILER = "torch._dynamo"
#: Functions of ``torch.compiler``, and of the compiler itself, that mark what they are given.
MARKS = ("allow_in_graph", "assume_constant_result")
#: What is left is a function, and the name of its mark.
Pending = list[tuple[str, Any]]


def import_tensors() -> None:
    """Import what makes batches of tensors: one to two seconds, where nobody has done it yet."""
    if "rollout.batch" in sys.modules:
        return
    with importing:
        import torch  # noqa: F401

        with kept_marks():
            import rollout.batch  # noqa: F401
        freeze_loaded()  # before the collector looks at all of it


@contextmanager
def kept_marks() -> Iterator[None]:
    """What is marked for torch's compiler inside gets its marks when the compiler is loaded."""
    import torch.compiler as face

    if COMPILER in sys.modules:
        yield
        return
    pending: Pending = []
    originals = {name: getattr(face, name) for name in MARKS}
    sys.meta_path.insert(0, _MarkingFinder(pending))
    try:
        for name, original in originals.items():
            setattr(face, name, partial(_keep, pending, name, original))
        yield
    finally:
        for name, original in originals.items():
            setattr(face, name, original)


def _keep(pending: Pending, name: str, mark: Callable[[Any], Any], function: Any) -> Any:
    """In the place of a mark; who has imported it meanwhile may call it at any time."""
    if COMPILER in sys.modules:
        return mark(function)
    pending.append((name, function))
    return function


class _MarkingFinder(MetaPathFinder):
    """Finds the compiler where it always is, and makes the marks once it is loaded."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != COMPILER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = partial(self._load, loader.exec_module)
        return spec

    def _load(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        sys.meta_path.remove(self)  # who only asked where it is has not loaded it
        for name, function in self._pending:
            getattr(module, name)(function)
