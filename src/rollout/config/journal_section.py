"""The journal of a run."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
from pathlib import Path
from typing import ClassVar, Literal

import attrs

from rollout.config.checks import Text
from rollout.config.section_type import Section
from rollout.errors import ConfigError


@attrs.frozen(kw_only=True)
class JournalConfig(Section):
    """What a run writes to be resumed from; ``docs/journal.md`` explains it."""

    section: ClassVar[str] = "journal"
    #: The file, also as ``~/…``; None writes none. ``rollout run`` writes one into ``--out`` where
    #: this is None.
    path: Text | None = None
    #: "never" hands records to the system: a process that dies loses nothing of them, loss of power
    #: may. "batch": they are on the disk before their trajectory is returned. "always": a
    #: trajectory waits at each turn until it is on the disk.
    fsync: Literal["never", "batch", "always"] = "never"
    #: While it cannot be written, on a full disk say: "wait" keeps finished trajectories back until
    #: it can, up to `limits.batch_s`; "continue" returns them, and writes what it has once it can.
    on_failure: Literal["wait", "continue"] = "wait"
    #: What an `extra` is that holds no plain data, and `ground_truth` or `tools_kwargs` of
    #: prompts of `generate` and `stream`: "refuse" refuses the prompt, or fails the trajectory;
    #: "text" writes it as text, with a warning.
    unwritable: Literal["refuse", "text"] = "refuse"
    #: Names the prompts; a resumption with another name is refused. ``rollout run`` gives its file
    #: and the checksum of that.
    prompts: Text | None = None

    @property
    def file(self) -> Path | None:
        """The file that `path` names.

        Raises:
            ConfigError: It is that of a user whom nobody knows.
        """
        try:
            return None if self.path is None else Path(self.path).expanduser()
        except RuntimeError as error:
            raise ConfigError(f"journal.path = {self.path!r}: {error}") from None
