"""Where agents act: who makes their sandboxes, what these are, and how many there may be."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import attrs

from rollout.config.checks import Count, Natural, PlainMapping, Positive, Rule, is_class_path
from rollout.config.config_faults import Fault
from rollout.config.section_type import Section, annotations_of
from rollout.errors import ConfigError, SandboxUnsupported

#: The providers that this library has; ``inspect`` is followed by a name.
PROVIDERS = ("none", "bubblewrap", "sandlock", "docker", "podman", "e2b", "modal")


def _is_provider(name: str) -> bool:
    is_inspect = name.startswith("inspect:") and name != "inspect:"
    return name == "auto" or name in PROVIDERS or is_inspect or is_class_path(name)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value


def _are_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_text, value))


def _are_variables(values: Mapping[str, Any]) -> bool:
    return all(
        _is_text(name) and "=" not in name and isinstance(text, str) and "\0" not in text
        for name, text in values.items()
    )


def _are_files(files: Mapping[str, object], *kinds: type) -> bool:
    return all(_is_text(path) and isinstance(content, kinds) for path, content in files.items())


Provider = Annotated[
    str,
    Rule(
        f"one of {', '.join(map(repr, ('auto', *PROVIDERS)))}, 'inspect:NAME', or a string like "
        "'package.module:factory'",
        _is_provider,
    ),
]
Name = Annotated[str, Rule("a non-empty string", _is_text)]
Variables = Annotated[Mapping[str, Any], Rule("a mapping of names to strings", _are_variables)]
Texts = Annotated[
    Mapping[str, Any], Rule("a mapping of paths to texts", lambda v: _are_files(v, str))
]
Files = Annotated[
    Mapping[str, str | bytes | Path],
    Rule(
        "a mapping of paths to texts, bytes or pathlib.Path",
        lambda v: _are_files(v, str, bytes, Path),
    ),
]
Directory = Annotated[str, Rule("an absolute path", lambda v: v[:1] == "/" and "\0" not in v)]
Command = Annotated[
    str | Sequence[str],
    Rule("a command (a text, or a list of strings)", lambda v: _is_text(v) or _are_texts(v)),
]
Network = Annotated[
    str | Sequence[str],
    Rule(
        "'none', 'public' or a list of hosts",
        lambda v: v in ("none", "public") if isinstance(v, str) else _are_texts(v),
    ),
]


@attrs.frozen(kw_only=True)
class SandboxSpec(Section):
    """What a sandbox is to be; None leaves a thing to the provider.

    A provider refuses what it cannot do.

    Raises:
        ConfigError: A key is unknown, or a value wrong.
    """

    section: ClassVar[str] = "sandbox"
    #: The name of an image; of bubblewrap, a directory with a file system.
    image: Name | None = None
    #: Where commands start, and what relative paths are relative to.
    workdir: Directory | None = None
    #: Environment variables of every command.
    env: Variables = attrs.field(factory=dict)
    #: What lies there before `setup`, by path: a text, bytes, or the path of a file or directory
    #: here.
    files: Files = attrs.field(factory=dict)
    #: A command that prepares it; where that fails, so does opening it, and the trajectory.
    setup: Command | None = None
    #: Seconds for `setup`.
    setup_s: Positive = 600.0
    #: Whom commands run as.
    user: Name | None = None
    #: "none", "public", or the hosts that may be reached.
    network: Network = "none"
    #: Processors.
    cpus: Positive | None = None
    #: Memory, in MiB.
    memory_mb: Count | None = None
    #: Files, in MiB.
    disk_mb: Count | None = None
    #: Processes and threads at once.
    max_processes: Count | None = None
    #: Seconds after which a container or remote sandbox ends by itself, should nobody close it.
    lifetime_s: Positive = 86400.0
    #: Labels of containers and remote sandboxes.
    labels: Variables = attrs.field(factory=dict)
    #: What only this provider knows of a sandbox.
    options: PlainMapping = attrs.field(factory=dict)

    def merge(self, values: Mapping[str, Any]) -> Self:
        """This with `values` over it, as a prompt may give them: ``extra["sandbox"]``.

        Mappings are merged key by key, None says nothing, and everything else is replaced.

        Raises:
            ConfigError: A key is unknown, or a value wrong.
        """
        if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
            raise ConfigError(f"sandbox = {values!r:.200}: expected a mapping with string keys")
        merged: dict[str, Any] = {}
        for key, value in values.items():
            before = getattr(self, key, None)
            if isinstance(before, Mapping) and isinstance(value, Mapping):
                merged[key] = {**before, **value}
            elif value is not None or key not in annotations_of(type(self)):
                merged[key] = value
        return attrs.evolve(self, **merged)

    def refuse_unsupported(
        self, provider: str, supported: Sequence[str], options: Sequence[str] = ()
    ) -> None:
        """Refuse fields that are set and not among `supported`, and unknown `options`.

        Raises:
            SandboxUnsupported: It names the first of them.
        """
        always = {"env", "files", "setup", "setup_s", "lifetime_s", "labels", "options"}
        for field in attrs.fields(SandboxSpec):
            value = getattr(self, field.name)
            if value != field.default and field.name not in always.union(supported):
                raise SandboxUnsupported(f"{provider} has no {field.name} (it is {value!r:.200})")
        for name in self.options:
            if name not in options:
                known = f"; known: {', '.join(options)}" if options else ""
                raise SandboxUnsupported(f"{provider}: unknown options[{name!r}]{known}")


@attrs.frozen(kw_only=True)
class SandboxConfig(SandboxSpec):
    """Where agents act; ``docs/sandboxes.md`` explains it. A trajectory gets its sandbox when it
    first uses it. ``extra["sandbox"]`` of a prompt gives it another image, other files and so on.
    """

    #: Who makes them. "auto" is bubblewrap where that holds here, else sandlock where that does,
    #: else refused; "none" isolates nothing.
    provider: Provider = "auto"
    #: What only this provider is made with.
    provider_options: PlainMapping = attrs.field(factory=dict)
    #: Files that lie there before `setup`, by path.
    files: Texts = attrs.field(factory=dict)
    #: Open at once; trajectories wait for one, which counts to their `limits.trajectory_s` and not
    #: to `limits.tool_s`. None: as many as the provider says.
    max_open: Count | None = None
    #: Made at once. None: four for each processor here.
    max_creating: Count | None = None
    #: Made in any minute.
    creations_per_min: Count | None = None
    #: Kept ready, ahead of the trajectories that will want one.
    warm: Natural = 0

    def relation_faults(self, sound: Collection[str]) -> Iterator[Fault]:
        """No more are kept ready than may be open, and nobody's options are given to "auto"."""
        if {"warm", "max_open"} <= set(sound) and self.warm > (self.max_open or self.warm):
            yield Fault("warm", f"expected at most sandbox.max_open = {self.max_open}", self.warm)
        is_auto = "provider" in sound and self.provider == "auto"
        for name in ("provider_options", "options"):
            if is_auto and name in sound and getattr(self, name):
                problem = "expected none with sandbox.provider = 'auto': name the provider"
                yield Fault(name, problem, getattr(self, name))
