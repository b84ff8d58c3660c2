"""Loading a configuration from Python, TOML or YAML, with overrides on top."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import attrs

from rollout.config.config_faults import Fault, config_error, got, no_hint
from rollout.config.convert import build_config, dump_config
from rollout.config.limits_section import limits_set
from rollout.config.modules import config_of_module, read_module, read_python_file
from rollout.config.overrides import apply_overrides
from rollout.config.section_type import given_fields
from rollout.config.sections import RolloutConfig

if TYPE_CHECKING:
    from collections.abc import Sequence


EXPECTED = (
    "expected a file ending in .py, .toml, .yaml or .yml, the dotted name of a module, or a module"
)


@attrs.frozen(kw_only=True)
class _Source:
    """What a source holds: plain values of a file, or what Python built, with its faults."""

    values: Any = None
    config: RolloutConfig | None = None
    faults: list[Fault] = attrs.field(factory=list)
    #: What to add to a fault because of the way the file's format reads values.
    hint: Callable[[Fault], str] = no_hint


def load_config(
    path_or_module: str | os.PathLike[str] | ModuleType, overrides: Sequence[str] = ()
) -> RolloutConfig:
    """The configuration of a source, with ``path=value`` overrides applied in their order.

    Args:
        path_or_module: A ``.py``, ``.toml``, ``.yaml`` or ``.yml`` file; the dotted name of a
            module, looked for in the working directory too; or a module. Python sets
            ``config = RolloutConfig(...)``.
        overrides: Such as ``sampling.temperature=0.7``: the right side is a TOML value, else a
            bare string; a bare ``None`` is None. A new ``engine.kind`` or ``placement.kind``
            resets its section. They reach into mappings: ``engine.server_args.log_level=info``.

    Raises:
        ConfigError: The source cannot be read, with file and line where there is one; or its
            values have faults, all of which are listed with path, value and expectation.
    """
    source = _read(path_or_module)
    config, faults = _override(source, overrides)
    if faults:
        subject = f"the configuration {_name_of(path_or_module)}"
        with_overrides = " with overrides" if overrides else ""
        raise config_error(f"{subject}{with_overrides}", faults, source.hint)
    return config


def _name_of(source: str | os.PathLike[str] | ModuleType) -> str:
    return source.__name__ if isinstance(source, ModuleType) else os.fspath(source)


def _read(source: object) -> _Source:
    if isinstance(source, ModuleType):
        config, faults = config_of_module(source)
        return _Source(config=config, faults=faults)
    if not isinstance(source, (str, os.PathLike)):
        raise config_error(
            "the call of load_config", [Fault("source", EXPECTED + got(source), source)]
        )
    path = os.fspath(source)
    match Path(path).suffix:
        case ".py":
            config, faults = read_python_file(path)
        case ".toml":
            return _read_toml(path)
        case ".yaml" | ".yml":
            return _read_yaml(path)
        case _ if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", path):
            config, faults = read_module(path)
        case _:
            raise config_error("the call of load_config", [Fault("source", EXPECTED, path)])
    return _Source(config=config, faults=faults)


# PyYAML is imported only where a file of data is read, and tomllib with it.
def _read_toml(path: str) -> _Source:
    from rollout.config.data_files import read_toml, toml_hint

    return _Source(values=read_toml(path), hint=toml_hint)


def _read_yaml(path: str) -> _Source:
    from rollout.config.data_files import read_yaml, yaml_hint

    return _Source(values=read_yaml(path), hint=yaml_hint)


def _override(source: _Source, overrides: Sequence[str]) -> tuple[RolloutConfig, list[Fault]]:
    """The configuration of `source` under `overrides`, to be used only without faults."""
    values = source.values
    if source.config is not None:
        if source.faults:  # nothing to write on; the overrides' own faults are found all the same
            return source.config, [*source.faults, *apply_overrides({}, overrides)]
        if not overrides:
            return source.config, []
        values = dump_config(source.config)
        values["limits"] = limits_set(source.config.limits)
        if "validation_sampling" not in given_fields(source.config):
            del values["validation_sampling"]  # as in a file that does not have it
        if "path" not in given_fields(source.config.model):
            del values["model"]["path"]
    unwritten = apply_overrides(values, overrides) if isinstance(values, dict) else []
    config, faults = build_config(values)
    return config, [*faults, *unwritten]
