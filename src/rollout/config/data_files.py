"""TOML and YAML files as plain nested data, and hints at how these formats read values."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rollout.config.config_faults import Fault, config_error

if TYPE_CHECKING:
    from collections.abc import Hashable

    from rollout.errors import ConfigError

#: What people write for None where the format does not know the word.
NONE_WORDS = ("None", "none", "null", "Null", "NULL", "nil")


def read_toml(path: str) -> Any:
    """The tables of a TOML file.

    Raises:
        ConfigError: It cannot be read or is not TOML; an equal key is refused by TOML itself.
    """
    text = _read_text(path)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", str(error), re.DOTALL)
        place = f", line {found[2]}, column {found[3]}" if found else ""
        problem = found[1] if found else str(error)
        raise unreadable(path, f"not valid TOML: {problem}", place) from error
    except RecursionError as error:
        raise unreadable(path, "not valid TOML: nested too deeply") from error
    except ValueError as error:  # an integer of thousands of digits
        raise unreadable(path, f"not valid TOML: {error}") from error


def read_yaml(path: str) -> Any:
    """The data of a YAML file, by PyYAML's safe loader; an empty file is an empty mapping.

    Raises:
        ConfigError: It cannot be read, is not YAML, or holds a key twice.
    """
    text = _read_text(path)
    try:
        values = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise unreadable(path, f"not valid YAML: {error.problem}", place) from error
    except Exception as error:  # PyYAML's constructors raise anything: for the 31st of June, say
        problem = " ".join(str(error).split()) or type(error).__name__
        raise unreadable(path, f"not valid YAML: {problem}") from error
    return {} if values is None else values


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which by itself lets the later of two equal keys win."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[Hashable] = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)
            if name in seen:
                problem = f"the key {key.value!r} is written twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(name)
        return node


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise unreadable(path, f"not UTF-8: {error.reason} at byte {error.start}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or error
        raise unreadable(path, f"cannot be read: {why}") from error


def unreadable(path: str, problem: str, place: str = "") -> ConfigError:
    """The error of a source that yields no values at all."""
    return config_error(f"the configuration {path}", [Fault(f"{path}{place}", problem)])


def toml_hint(fault: Fault) -> str:
    """What to write instead of None, for which TOML has no word."""
    if fault.value in NONE_WORDS and "or None" in fault.problem:
        return f"; TOML has no None: use YAML or Python, or the override {fault.path}=None"
    return ""


def yaml_hint(fault: Fault) -> str:
    """What YAML 1.1 makes of numbers like 1e-3, of None and of words like ``no``."""
    value = fault.value
    if isinstance(value, bool) and re.search("a (non-empty )?string|one of", fault.problem):
        return "; YAML reads yes, no, on and off as booleans, so quote such a word"
    if not isinstance(value, str):
        return ""
    if value in NONE_WORDS and "or None" in fault.problem:
        return "; YAML writes None as null"
    number = re.fullmatch(r"([-+]?(?:\d+\.?\d*|\.\d+))[eE]([-+]?)(\d+)", value)
    if number and "got a string" in fault.problem:
        mantissa = number[1] if "." in number[1] else f"{number[1]}.0"
        return f"; YAML reads {value} as a string, write {mantissa}e{number[2] or '+'}{number[3]}"
    return ""
