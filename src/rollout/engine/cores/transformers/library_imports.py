"""Imports torch and transformers in half of the time that they take by themselves.

An engine serves when they are loaded. A fifth of that time is the collector's, which looks again
and again at objects that stay. A seventh goes into reading the sources of all models that
transformers knows, line by line, for the names in them; the package and its part `models` each do.
A fifth goes into torch's compiler and distributed tensors, which transformers loads to mark some
functions for the one and to know the types of the other; nothing is compiled or distributed here.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rollout.media.torchvision_operators import declare_missing_operators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Where transformers reads the names in its sources.
READER = "transformers.utils.import_utils"
COMPILER = "torch._dynamo"
#: Parts of it that transformers imports, and that need nothing else of it.
STANDALONE = (f"{COMPILER}._trace_wrapped_higher_order_op",)


def import_libraries(*, leave_out_compiler: bool, reads_media: bool = False) -> None:
    """Import what a `SlotModel` needs.

    In a process that collects no garbage yet, what is loaded is left out of collections for good.

    Args:
        leave_out_compiler: Do not load torch's compiler unless somebody uses it, and have
            transformers take torch to be not distributed; for a process that runs models of
            transformers' own, one in each process.
        reads_media: Whether the model takes images or videos. Where it takes none, and the compiler
            is left out, so is torchvision, which transformers imports wherever it is installed, and
            which takes a second and the compiler with it.
    """
    is_first = "transformers" not in sys.modules
    with _without_collections(), _names_read_quickly():
        import torch  # noqa: F401

        declare_missing_operators()  # transformers imports torchvision where it is installed
        is_lean = is_first and leave_out_compiler
        with nullcontext() if reads_media or not is_lean else _without_torchvision():
            if is_lean:
                _leave_out_compiler()
            from rollout.engine.cores.transformers import slot_model, stepping  # noqa: F401


@contextmanager
def _without_collections() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:  # it is somebody's process, not the engine's
            gc.enable()
        else:
            gc.freeze()


@contextmanager
def _without_torchvision() -> Iterator[None]:
    """Have it not be found in the block; transformers remembers what it found."""
    name = "torchvision"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # so that a search finds nothing
    try:
        yield
    finally:
        del sys.modules[name]


def _leave_out_compiler() -> None:
    import torch
    import torch.distributed

    spec = PathFinder.find_spec(COMPILER, torch.__path__)
    if COMPILER in sys.modules or spec is None or spec.loader is None:
        return
    sys.modules[COMPILER] = stand_in = _CompilerStandIn(spec)
    sys.meta_path.insert(0, _CompilerFinder(stand_in))
    from transformers.utils import import_utils

    remember = getattr(import_utils, "is_torch_distributed_available", None)
    if remember is None:  # earlier versions ask in many places
        return
    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        remember()
    finally:
        torch.distributed.is_available = is_available


class _CompilerStandIn(ModuleType):
    """Takes marks, and becomes the compiler itself when it is asked for anything else."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name, "")
        self.__spec__ = spec
        self.__file__ = spec.origin
        self.__path__ = list(spec.submodule_search_locations or ())
        self.__package__ = spec.name
        self.is_loaded = False

    def __getattr__(self, name: str) -> Any:
        if self.is_loaded or name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.load()
        return getattr(self, name)

    def load(self) -> None:
        """Become the compiler."""
        self.is_loaded = True
        loader: Any = self.__spec__ and self.__spec__.loader
        loader.exec_module(self)

    def allow_in_graph(self, function: Any) -> Any:
        return function

    def assume_constant_result(self, function: Any) -> Any:
        return function

    def disable(self, function: Any = None, *_: Any, **options: Any) -> Any:
        return self.disable if function is None else function


class _CompilerFinder(MetaPathFinder):
    """Has the stand-in become the compiler before a part of it is imported by itself."""

    def __init__(self, stand_in: _CompilerStandIn) -> None:
        self._stand_in = stand_in

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{COMPILER}.") or fullname in STANDALONE:
            return None
        sys.meta_path.remove(self)
        if not self._stand_in.is_loaded:
            self._stand_in.load()
        if fullname in sys.modules:
            return ModuleSpec(fullname, _Loaded())
        return None


class _Loaded(Loader):
    """Of a module that has been loaded since it was looked for."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def _names_read_quickly() -> Iterator[None]:
    finder = _ReaderFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:  # there is no such module
            sys.meta_path.remove(finder)


class _ReaderFinder(MetaPathFinder):
    """Finds the reader where it always is, and wraps two of its functions once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != READER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = partial(_load, loader.exec_module)
        return spec


def _load(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    for name, wrap in _WRAPPERS.items():
        function = getattr(module, name, None)
        if function is not None:
            setattr(module, name, wrap(function))


def _remembering(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`read` of a directory, or of the directory that a file is in, once for each."""
    known: dict[str, Any] = {}

    def remembered(module_path: Any) -> Any:
        path = os.fspath(module_path)
        directory = os.path.dirname(path) if os.path.isfile(path) else path
        if directory not in known:
            known[directory] = read(directory)
        return known[directory]

    return remembered


def _skipping(names_in: Callable[[str], Any]) -> Callable[[str], Any]:
    """`names_in` of a source, which looks for the last line that begins so."""

    def skipped(source: str) -> Any:
        return names_in(source[source.rfind("\n__all__") + 1 :])

    return skipped


_WRAPPERS = {"create_import_structure_from_path": _remembering, "fetch__all__": _skipping}
