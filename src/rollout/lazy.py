"""What is imported only when it is needed."""

from __future__ import annotations

import ast
import importlib
import threading
from pathlib import Path
from typing import Any

#: Held while a large library is imported. Two threads that import libraries which import each other
#: could otherwise find modules that are half made: so Python breaks the deadlock.
importing = threading.RLock()


def export_stub(namespace: dict[str, Any]) -> None:
    """Have a package export what its stub imports, each name on its first use.

    Args:
        namespace: The package's ``globals()``; ``__init__.pyi`` lies beside its ``__init__.py``.
    """
    file = Path(namespace["__file__"]).with_suffix(".pyi")
    homes: dict[str, str] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            homes |= dict.fromkeys((alias.name for alias in node.names), str(node.module))

    def import_name(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        with importing:
            value = namespace[name] = getattr(importlib.import_module(homes[name]), name)
        return value

    namespace["__all__"], namespace["__getattr__"] = sorted(homes), import_name
    namespace["__dir__"] = lambda: [*namespace, *homes]


def import_extra(module: str, extra: str, user: str, kind: type[Exception]) -> Any:
    """A module of an optional dependency.

    Args:
        module: Its name.
        extra: The extra of `rollout-rl` that has it.
        user: What needs it, for the message.
        kind: The error that says which package is missing, and how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise kind(
            f"{user} needs the package {error.name or module}: pip install 'rollout-rl[{extra}]'"
        ) from error


def derives_from(kind: type, module: str, name: str) -> bool:
    """Whether `kind` is this class of a library, or a subclass; nothing is imported to find out.

    Args:
        kind: The class in question.
        module: Where the library defines its class, such as ``pydantic.main``.
        name: The name that it has there.
    """
    return any(each.__module__ == module and each.__name__ == name for each in kind.__mro__)
