"""The YAML files that verl reads: lists of classes with their settings."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rollout.user_code import UserCodeError, import_module, make_importable

if TYPE_CHECKING:
    from rollout.errors import RolloutError


def read_yaml(path: str | Path, error: type[RolloutError]) -> Any:
    """What a file says.

    Raises:
        RolloutError: It cannot be read, as `error`.
    """
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as fault:
        raise error(f"{path}: {fault.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as fault:
        raise error(f"{path}: no YAML: {' '.join(str(fault).split())}") from None


def entries_of(path: str | Path, key: str, error: type[RolloutError]) -> list[Any]:
    """The list under `key`; the working directory and that of the file become importable.

    Raises:
        RolloutError: There is none, as `error`.
    """
    data = read_yaml(path, error)
    entries = data.get(key) if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        what = f"{key.removesuffix('s')}s"
        raise error(f"{path}: {key} = {entries!r:.80}; expected a list of {what}")
    make_importable(Path.cwd())
    make_importable(Path(path).resolve().parent)
    return entries


def settings_of(entry: dict[str, Any], error: type[RolloutError]) -> dict[str, Any]:
    """The ``config`` of an entry; an error's text continues the entry's path.

    Raises:
        RolloutError: It is no mapping, or something in the entry is not resolved, as `error`.
    """
    config = {} if entry.get("config") is None else entry["config"]
    if not isinstance(config, dict):
        raise error(f".config = {config!r:.80}: expected a mapping")
    refuse_interpolation(entry, "", error)
    return config


def refuse_interpolation(value: Any, path: str, error: type[RolloutError]) -> None:
    """Let plain values pass.

    Raises:
        RolloutError: There is a ``${…}`` in one, as `error`.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            refuse_interpolation(item, f"{path}.{key}", error)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            refuse_interpolation(item, f"{path}[{index}]", error)
    elif isinstance(value, str) and "${" in value:
        raise error(f"{path} = {value!r:.80}: interpolation is not resolved; write the value")


def class_of(entry: dict[str, Any], error: type[RolloutError]) -> Any:
    """What ``class_name`` of an entry names; an error's text continues the entry's path.

    Raises:
        RolloutError: There is no such class, as `error`.
    """
    name = entry.get("class_name")
    module, _, cls_name = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    if not module or not cls_name:
        raise error(f".class_name = {name!r:.80}: expected package.module.Class")
    try:
        cls = getattr(import_module(module), cls_name, None)
    except UserCodeError as fault:
        raise error(f".class_name = {name!r}: {fault}") from fault
    if not inspect.isclass(cls):
        raise error(f".class_name = {name!r}: {module} has no class {cls_name}")
    return cls
