"""Package exports that are imported on first use."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def lazy_exports(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """A module-level ``__getattr__`` that imports a name from its home when it is first asked for.

    Args:
        package: The package's ``__name__``.
        homes: Module names, each with the names that it is the home of.
    """
    home_of = {name: module for module, names in homes.items() for name in names}

    def getattr_of_package(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return getattr_of_package
