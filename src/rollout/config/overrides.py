"""Overrides such as ``sampling.temperature=0.7`` on the plain data of a configuration."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from typing import Any

from rollout.config.config_faults import Fault, got, join_path, show
from rollout.config.convert import KIND, default_kind, is_kinded
from rollout.config.section_type import annotations_of
from rollout.config.sections import RolloutConfig

EXPECTED = "expected path=value, such as sampling.temperature=0.7"


def apply_overrides(values: dict[str, Any], overrides: Iterable[str]) -> list[Fault]:
    """Write `overrides` into `values`, in their order, and return those that cannot be written.

    A new `kind` resets its section to that kind's defaults; overrides after it apply onto these.
    Whether the keys exist and the values fit is found when the configuration is built.
    """
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):
        return [Fault("overrides", f"expected a list of path=value{got(overrides)}", overrides)]
    applied = (_apply(values, override) for override in overrides)
    return [fault for fault in applied if fault is not None]


def _apply(values: dict[str, Any], override: object) -> Fault | None:
    if not isinstance(override, str):
        return Fault("override", f"{EXPECTED}{got(override)}", override)
    path, equals, text = override.partition("=")
    keys = [key.strip() for key in path.split(".")]
    if not equals or not all(keys):
        return Fault("override", EXPECTED, override)
    return _write(values, keys, override_value(text.strip()))


def override_value(text: str) -> Any:
    """The right side of an override: a TOML value, else a bare string.

    A bare ``None`` or ``null`` is None, for which TOML has no word; quoted it is a string.
    """
    if text in ("None", "null"):
        return None
    if "\n" not in text:  # a second line could smuggle in a second key
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):  # no TOML, or an integer of thousands of digits
            return text
    return text


def _write(values: dict[str, Any], keys: list[str], value: Any) -> Fault | None:
    *outer, last = keys
    if last == KIND and len(outer) == 1:
        _reset_section(values, outer[0], value)
    node, path = values, ""
    for key in outer:
        path = join_path(path, key)
        below = node.setdefault(key, {})
        if not isinstance(below, dict):
            problem = f"no key can stand below {path} = {show(below)}"
            return Fault(".".join(keys), problem, value)
        node = below
    node[last] = value
    return None


def _reset_section(values: dict[str, Any], section: str, kind: Any) -> None:
    """Drop what belongs to another kind than `kind`."""
    annotation = annotations_of(RolloutConfig).get(section)
    if annotation is None or not is_kinded(annotation):
        return
    present = values.get(section)
    if isinstance(present, dict) and present.get(KIND, default_kind(annotation)) != kind:
        values[section] = {}
