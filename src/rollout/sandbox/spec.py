"""What a sandbox is to be: image, files, network, resources."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rollout.errors import ConfigError, SandboxUnsupported


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value


def _is_number(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < float("inf")  # type: ignore[operator]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_variables(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        _is_text(name) and "=" not in name and isinstance(text, str) and "\0" not in text
        for name, text in value.items()
    )


def _is_files(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        _is_text(path) and isinstance(content, str | bytes | Path)
        for path, content in value.items()
    )


def _is_command(value: object) -> bool:
    if isinstance(value, str):
        return _is_text(value)
    return isinstance(value, Sequence) and bool(value) and all(map(_is_text, value))


def _is_network(value: object) -> bool:
    if isinstance(value, str):
        return value in ("none", "public")
    return isinstance(value, Sequence) and bool(value) and all(map(_is_text, value))


def _is_options(value: object) -> bool:
    return isinstance(value, Mapping) and all(map(_is_text, value))


def _field(default: Any, accepts: Any, expected: str, *, factory: Any = None) -> Any:
    def check(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
        is_unset = value is None and default is None and factory is None
        if not is_unset and not accepts(value):
            raise ConfigError(f"sandbox: {field.name} = {value!r:.200}: expected {expected}")

    if factory is not None:
        return attrs.field(factory=factory, validator=check)
    return attrs.field(default=default, validator=check)


_SIZE = "an integer ≥ 1, or None"
_NAME = "a non-empty string, or None"


@attrs.frozen(kw_only=True)
class SandboxSpec:
    """What a sandbox is to be; None leaves a thing to the provider.

    A provider refuses what it cannot do.

    Raises:
        ConfigError: A value is wrong.
    """

    #: The name of an image, or for bubblewrap a directory with a file system.
    image: str | None = _field(None, _is_text, _NAME)
    #: Where commands start, and what relative paths are relative to.
    workdir: str | None = _field(
        None,
        lambda value: _is_text(value) and os.path.isabs(value),
        "an absolute path, or None",
    )
    #: Environment variables of every command.
    env: Mapping[str, str] = _field(
        None, _is_variables, "a mapping of names to strings", factory=dict
    )
    #: What lies there before `setup`, by path: a text, bytes, or the path of a file or directory
    #: here.
    files: Mapping[str, str | bytes | Path] = _field(
        None, _is_files, "a mapping of paths to texts, bytes or pathlib.Path", factory=dict
    )
    #: A command that prepares the sandbox, a text for ``/bin/sh`` or a list; opening fails if it
    #: fails.
    setup: str | Sequence[str] | None = _field(None, _is_command, "a command, or None")
    #: Seconds for `setup`.
    setup_s: float = _field(600.0, _is_number, "a number > 0")
    #: Whom commands run as.
    user: str | None = _field(None, _is_text, _NAME)
    #: "none", "public", or the hosts that may be reached.
    network: str | Sequence[str] = _field(
        "none", _is_network, "'none', 'public' or a list of hosts"
    )
    cpus: float | None = _field(None, _is_number, "a number > 0, or None")
    memory_mb: int | None = _field(None, _is_count, _SIZE)
    disk_mb: int | None = _field(None, _is_count, _SIZE)
    #: Processes and threads at once.
    max_processes: int | None = _field(None, _is_count, _SIZE)
    #: Seconds after which a container or remote sandbox ends by itself, should nobody close it.
    lifetime_s: float = _field(86400.0, _is_number, "a number > 0")
    #: Labels of containers and remote sandboxes.
    labels: Mapping[str, str] = _field(
        None, _is_variables, "a mapping of names to strings", factory=dict
    )
    #: What only one provider knows.
    options: Mapping[str, Any] = _field(
        None, _is_options, "a mapping with string keys", factory=dict
    )

    def merge(self, values: Mapping[str, Any]) -> "SandboxSpec":
        """This with `values` over it, as a prompt may give them: ``extra["sandbox"]``.

        Mappings are merged key by key; everything else is replaced.

        Raises:
            ConfigError: A key is unknown, or a value wrong.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"sandbox = {values!r:.200}: expected a mapping")
        known = [field.name for field in attrs.fields(SandboxSpec)]
        for key in values:
            if key not in known:
                raise ConfigError(f"sandbox: unknown key {key!r}; known: {', '.join(known)}")
        merged: dict[str, Any] = {}
        for key, value in values.items():
            before = getattr(self, key)
            is_both = isinstance(before, Mapping) and isinstance(value, Mapping)
            merged[key] = {**before, **value} if is_both else value
        return attrs.evolve(self, **merged)

    def refuse_unsupported(self, provider: str, supported: Sequence[str]) -> None:
        """Refuse fields that are set and not among `supported`.

        Raises:
            SandboxUnsupported: It names the first such field.
        """
        always = {"env", "files", "setup", "setup_s", "lifetime_s", "labels", "options"}
        for field in attrs.fields(SandboxSpec):
            value = getattr(self, field.name)
            if field.name in always or field.name in supported:
                continue
            if value != field.default:
                raise SandboxUnsupported(f"{provider} has no {field.name} (it is {value!r:.200})")
