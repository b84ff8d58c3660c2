"""The library's functions without what they tell: every emitting call taken out of their code."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What asks whether anybody reads: attributes, or a teller that is None where nobody does.
ASKED, TELLER = ("is_on", "tells_all"), "told"
#: The stream and its readers, which stay as they are.
READERS = "rollout.observe"


class Silence:
    """Swaps the code of functions that tell something for the same without that, and back."""

    def __init__(self) -> None:
        self._pairs: list[tuple[FunctionType, CodeType, CodeType]] = []
        for name, module in list(sys.modules.items()):
            if name.startswith("rollout.") and not name.startswith(READERS):
                self._pairs += _pairs_of(module)

    @property
    def functions(self) -> int:
        """How many tell something."""
        return len(self._pairs)

    def begin(self) -> None:
        """They tell nothing, and do not ask whether anybody reads."""
        for function, _, silent in self._pairs:
            function.__code__ = silent

    def end(self) -> None:
        """They are as they were."""
        for function, telling, _ in self._pairs:
            function.__code__ = telling


class _Silencer(ast.NodeTransformer):
    """Takes out what depends on whether anybody reads."""

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        if not _asks(node.test):
            return node
        return node.orelse or ast.copy_location(ast.Pass(), node)

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        self.generic_visit(node)
        return node.orelse if _asks(node.test) else node


def _asks(test: ast.expr) -> bool:
    if isinstance(test, ast.Attribute):
        return test.attr in ASKED
    return isinstance(test, ast.Compare) and ast.unparse(test).split(".")[-1].startswith(
        f"{TELLER} is not None"
    )


def _pairs_of(module: ModuleType) -> Iterator[tuple[FunctionType, CodeType, CodeType]]:
    path = getattr(module, "__file__", None)
    if path is None or not path.endswith(".py"):
        return
    text = Path(path).read_text(encoding="utf-8")
    if not any(name in text for name in (*ASKED, TELLER)):
        return
    silent = compile(ast.fix_missing_locations(_Silencer().visit(ast.parse(text))), path, "exec")
    codes = {_place(code): code for code in _codes_of(silent)}
    for function in _functions_of(module):
        code = codes.get(_place(function.__code__))
        if code is not None and code.co_code != function.__code__.co_code:
            yield function, function.__code__, code


def _place(code: CodeType) -> tuple[str, int]:
    """Of a function; the line tells a property's getter from its setter."""
    return code.co_qualname, code.co_firstlineno


def _codes_of(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes_of(each)


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """Those that it defines, at its top level and in its classes, under their decorators too."""
    found: dict[int, FunctionType] = {}
    values = list(vars(module).values())
    for value in vars(module).values():
        if isinstance(value, type) and value.__module__ == module.__name__:
            values += vars(value).values()
    for value in values:
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)
        function = getattr(function, "__wrapped__", function)
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            found[id(function)] = function
    yield from found.values()
