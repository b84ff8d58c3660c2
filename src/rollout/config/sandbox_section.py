"""Where agents act: who makes their sandboxes, what these are, and how many there may be."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
import posixpath
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar

import attrs

from rollout.config.checks import Count, Natural, PlainMapping, Positive, Rule, Text, is_class_path
from rollout.config.config_faults import Fault
from rollout.config.section_type import Section

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
        name and "=" not in name and isinstance(text, str) and "\0" not in name + text
        for name, text in values.items()
    )


Provider = Annotated[
    str,
    Rule(
        f"one of {', '.join(map(repr, ('auto', *PROVIDERS)))}, 'inspect:NAME', or a string like "
        "'package.module:factory'",
        _is_provider,
    ),
]
Variables = Annotated[Mapping[str, Any], Rule("a mapping of names to strings", _are_variables)]
Files = Annotated[
    Mapping[str, Any],
    Rule(
        "a mapping of paths to texts",
        lambda files: all(_is_text(k) and isinstance(v, str) for k, v in files.items()),
    ),
]
Directory = Annotated[str, Rule("an absolute path", posixpath.isabs)]
Command = Annotated[
    object,
    Rule("a command (a text, or a list of strings)", lambda v: _is_text(v) or _are_texts(v)),
]
Network = Annotated[
    object,
    Rule("'none', 'public' or a list of hosts", lambda v: v in ("none", "public") or _are_texts(v)),
]


@attrs.frozen(kw_only=True)
class SandboxConfig(Section):
    """Where agents act; ``docs/sandboxes.md`` explains it. A trajectory gets its sandbox when it
    first uses it. ``extra["sandbox"]`` of a prompt gives it another image, other files and so on.
    """

    section: ClassVar[str] = "sandbox"
    #: Who makes them. "auto" is bubblewrap where that holds here, else sandlock where that does,
    #: else refused; "none" isolates nothing.
    provider: Provider = "auto"
    #: What only this provider is made with.
    provider_options: PlainMapping = attrs.field(factory=dict)
    #: The name of an image; of bubblewrap, a directory with a file system.
    image: Text | None = None
    #: Where commands start.
    workdir: Directory | None = None
    #: Environment variables of every command.
    env: Variables = attrs.field(factory=dict)
    #: Files that lie there before `setup`, by path.
    files: Files = attrs.field(factory=dict)
    #: A command that prepares it; where that fails, so does the trajectory.
    setup: Command | None = None
    #: Seconds for `setup`.
    setup_s: Positive = 600.0
    #: Whom commands run as.
    user: Text | None = None
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
