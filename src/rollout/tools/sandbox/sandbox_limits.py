"""What a sandbox may use."""

# Annotations stay evaluated: attrs reads them.
import math
from typing import Any

import attrs

from rollout.errors import ToolError

_MIB = 2**20


def _bound(low: float, kind: type[int] | type[float], what: str) -> Any:
    def check(_: object, field: "attrs.Attribute[Any]", value: object) -> None:
        kinds = (int,) if kind is int else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if not is_number or not low <= value < math.inf:  # type: ignore[operator]
            raise ToolError(f"SandboxLimits.{field.name} = {value!r}: expected {what}")

    return check


_SECONDS = _bound(0.1, float, "seconds ≥ 0.1")


@attrs.frozen(kw_only=True)
class SandboxLimits:
    """Bounds on the programs of one sandbox; passing one ends the call with an error.

    The kernel keeps `memory_mb` for each process, `file_mb`, `max_processes` and, where the files
    are in memory, `disk_mb`; the sandbox's supervisor looks at the sums twice a second or more
    often while a call runs. None of them depends on the user that the driver runs as.

    Raises:
        ToolError: A value is out of bounds.
    """

    #: Seconds of one call.
    timeout_s: float = attrs.field(default=10.0, validator=_SECONDS)
    #: CPU seconds of one call, of all its processes and threads together.
    cpu_s: float = attrs.field(default=10.0, validator=_SECONDS)
    #: MiB of address space of each process, and MiB of memory of all together.
    memory_mb: int = attrs.field(default=1024, validator=_bound(64, int, "an integer ≥ 64"))
    #: MiB of all files together.
    disk_mb: int = attrs.field(default=64, validator=_bound(1, int, "an integer ≥ 1"))
    #: MiB of one file.
    file_mb: int = attrs.field(default=32, validator=_bound(1, int, "an integer ≥ 1"))
    #: Processes and threads at once.
    max_processes: int = attrs.field(default=32, validator=_bound(2, int, "an integer ≥ 2"))
    #: Bytes that one call may print.
    max_output_bytes: int = attrs.field(default=65536, validator=_bound(1, int, "an integer ≥ 1"))

    def for_supervisor(self) -> dict[str, float]:
        """The fields of the supervisor's settings that these are."""
        return {
            "timeout_s": self.timeout_s,
            "cpu_s": self.cpu_s,
            "memory": self.memory_mb * _MIB,
            "disk": self.disk_mb * _MIB,
            "file_size": self.file_mb * _MIB,
            "processes": self.max_processes,
            "output": self.max_output_bytes,
        }

    def describe(self, reason: str) -> str:
        """What passed which bound, for the model; other reasons speak for themselves."""
        return {
            "timeout": f"timed out after {self.timeout_s:g} s",
            "cpu": f"used more than {self.cpu_s:g} s of CPU time",
            "memory": f"used more than {self.memory_mb} MiB of memory",
            "disk": f"wrote more than {self.disk_mb} MiB of files",
            "output": f"printed more than {self.max_output_bytes} bytes",
        }.get(reason, reason)
