"""The public names with their signatures, and the configuration's keys, a line each.

``python tests/golden/public_surface.py`` writes them to ``public_surface.txt``.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from rollout.config.reference import configuration_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

PATH = Path(__file__).with_name("public_surface.txt")
#: What is in several of them stands where it comes first.
PACKAGES = (
    "rollout",
    "rollout.agents",
    "rollout.agents.programs",
    "rollout.batch",
    "rollout.chat",
    "rollout.config",
    "rollout.engine",
    "rollout.environments",
    "rollout.interactions",
    "rollout.media",
    "rollout.observe",
    "rollout.runtime",
    "rollout.sandbox",
    "rollout.scheduling",
    "rollout.testing",
    "rollout.tools",
)
#: The library makes these; how is its own affair.
MADE_BY_US = (
    "AgentContext",
    "BlockingRollout",
    "Conversation",
    "RolloutRuntime",
    "TrajectoryTools",
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MODULES = re.compile(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])")
_ROW = re.compile(r"^\| `(\w+)` \| (.+) \| (.+) \| .* \|$")


def public_surface() -> str:
    """The text."""
    homes: dict[int, str] = {}
    lines: list[str] = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value, path = getattr(module, name), f"{package}.{name}"
            home = homes.setdefault(id(value), path) if _has_members(value) else path
            lines += _lines_of(path, value) if home == path else [f"{path} = {home}"]
    return "".join(f"{line}\n" for line in (*sorted(lines), *sorted(_key_lines())))


def _has_members(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isfunction(value)


def _lines_of(path: str, value: Any) -> Iterator[str]:
    if inspect.ismodule(value):
        yield f"{path}: a module"
    elif inspect.isclass(value):
        yield from _class_lines(path, value)
    elif callable(value) and not hasattr(value, "__args__"):
        yield _signature(path, value)
    else:
        yield f"{path} = {_plain(value)}"


def _class_lines(path: str, cls: type) -> Iterator[str]:
    ours = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == "rollout"]
    fields: set[str] = set()
    if attrs.has(cls):  # what can be given are its keys, below
        yield f"{path}: a section of the configuration"
        return
    if issubclass(cls, msgspec.Struct):
        yield f"{path}: a class{_bases(cls)}"  # whose parameters are its fields
        for parameter in inspect.signature(cls).parameters.values():
            fields.add(parameter.name)
            yield f"{path}.{_plain(parameter)}"
    elif issubclass(cls, enum.Enum):
        yield f"{path}: an enumeration"
        yield from (f"{path}.{each.name} = {each.value!r}" for each in cls)
        return
    else:
        is_protocol = getattr(cls, "_is_protocol", False)
        is_made_by_user = cls.__name__ not in MADE_BY_US and "__init__" in _names(ours)
        signature = _signature("", cls) if is_made_by_user and not is_protocol else ""
        yield f"{path}{signature}: a class{_bases(cls)}"
    for name in sorted(_names(ours) - fields):
        if not name.startswith("_"):
            yield from _member_lines(f"{path}.{name}", inspect.getattr_static(cls, name))
    for name in sorted(_documented(cls) - fields - _names(ours)):
        yield f"{path}.{name}: an attribute"


def _bases(cls: type) -> str:
    """Those that are public: who catches or overrides one relies on them."""
    public = set(_public_classes())
    named = [base.__name__ for base in cls.__mro__[1:] if base in public]
    named += [each.__name__ for each in (Exception, tuple) if issubclass(cls, each)][: not named]
    return f" of {', '.join(named)}" if named else ""


@cache
def _public_classes() -> tuple[type, ...]:
    modules = [importlib.import_module(package) for package in PACKAGES]
    values = (getattr(module, name) for module in modules for name in module.__all__)
    return tuple(value for value in values if inspect.isclass(value))


def _names(classes: list[type]) -> set[str]:
    return {name for each in classes for name in vars(each)}


def _documented(cls: type) -> set[str]:
    """The names in the section `Attributes` of its docstring."""
    text = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2]
    section = re.split(r"\n(?=\S)", text)[0]
    rows = re.findall(r"^    ([a-z_]\w*(?:, [a-z_]\w*)*): ", section, re.MULTILINE)
    return {name for row in rows for name in row.split(", ")}


def _member_lines(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, property):
        returned = getattr(value.fget, "__annotations__", {}).get("return", "Any")
        yield f"{path}: {_plain(returned)}, a property"
    elif isinstance(value, (classmethod, staticmethod)):
        yield _signature(path, value.__func__)
    elif inspect.isfunction(value):
        yield _signature(path, value)
    elif isinstance(value, (str, int, float, tuple, frozenset, type(None))):
        yield f"{path} = {_plain(value)}"
    else:
        yield f"{path}: an attribute"


def _signature(path: str, function: Any) -> str:
    try:
        signature = _plain(inspect.signature(function))
    except ValueError:  # of a class from C
        signature = "(…)"
    prefix = "async " if inspect.iscoroutinefunction(function) else ""
    return f"{path}{signature}" if not prefix else f"{path}: {prefix}{signature}"


def _plain(value: Any) -> str:
    """Without quotes of annotations, modules and addresses: where a name lives may change."""
    if isinstance(value, inspect.Signature | inspect.Parameter):
        text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(value))
    elif inspect.isclass(value) and not hasattr(value, "__args__"):
        text = value.__qualname__
    else:
        text = value if isinstance(value, str) and "[" in value else repr(value)
        text = text.strip("'") if isinstance(value, str) else text
    text = _MODULES.sub("", _ADDRESS.sub("", text))
    return re.sub(r"\s+", " ", text)


def _key_lines() -> Iterator[str]:
    """The rows of the reference of the configuration."""
    section, kind = "", ""
    for line in configuration_reference().splitlines():
        heading = re.match(r'##+ `([\w.]+?)(?:\.kind = "(\w+)")?`', line)
        if heading:
            section, kind = heading[1], f"[{heading[2]}]" if heading[2] else ""
        elif line.startswith("## "):
            section, kind = "", ""
        row = _ROW.match(line)
        if row:
            path = ".".join(part for part in (f"{section}{kind}", row[1]) if part)
            yield f"key {path}: {row[2]} = {row[3].strip('`')}"


if __name__ == "__main__":
    PATH.write_text(public_surface(), encoding="utf-8")
