"""Interaction configurations of verl: YAML files that name classes and their settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.errors import ConfigError
from rollout.integrations.verl.interactions import VerlInteraction
from rollout.integrations.verl.yaml_files import class_of, entries_of, settings_of

if TYPE_CHECKING:
    from pathlib import Path


def load_verl_interactions(yaml_path: str | Path) -> list[VerlInteraction]:
    """The simulated users of a verl interaction configuration, for `open_rollout`.

    Each entry of ``interaction`` has ``class_name`` (``package.module.Class``), ``config`` (given
    to the class, with the ``name`` in it) and ``name``; without one it is the class's, in small
    letters and without ``Interaction`` at its end, as in verl. The working directory and that of
    the file become importable.

    Raises:
        ConfigError: It lists the faults of all entries.
    """
    users, faults = [], []
    for number, entry in enumerate(entries_of(yaml_path, "interaction", ConfigError)):
        try:
            users.append(_user_of(entry))
        except ConfigError as error:
            faults.append(f"interaction[{number}]{error}")
    if faults:
        raise ConfigError(f"{yaml_path}: {'; '.join(faults)}")
    return users


def _user_of(entry: Any) -> VerlInteraction:
    """The user of one entry; an error's text continues the entry's path."""
    if not isinstance(entry, dict):
        raise ConfigError(f" = {entry!r:.80}: expected name, class_name and config")
    config = settings_of(entry, ConfigError)
    cls = class_of(entry, ConfigError)
    name = entry.get("name")
    if name is None:
        name = cls.__name__.removesuffix("Interaction").lower()
    if not isinstance(name, str) or not name:
        raise ConfigError(f".name = {name!r:.80}: expected text")
    try:
        user = cls(config={**config, "name": name})
    except Exception as error:
        raise ConfigError(f": {cls.__name__} raised {type(error).__name__}: {error}") from error
    try:
        return VerlInteraction(user, name=name)
    except ConfigError as error:
        raise ConfigError(f": {error}") from None
