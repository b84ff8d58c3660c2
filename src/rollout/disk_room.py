"""What a disk without room for a file says."""

from __future__ import annotations

import errno
import re
import shutil
from typing import TYPE_CHECKING

from rollout.errors import RolloutError

if TYPE_CHECKING:
    from pathlib import Path

_OF_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: How safetensors words what the system said.
_IN_SAFETENSORS = re.compile(r"I/O error: (?P<text>.*) \(os error (?P<number>\d+)\)")


def unwritable(path: Path, error: Exception, needed: int) -> RolloutError:
    """The error of a path that cannot be written: why, and where room lacks, how much.

    Args:
        needed: Bytes, of everything that is to be written there.
    """
    found = _IN_SAFETENSORS.search(str(error))
    text = found["text"] if found else getattr(error, "strerror", None) or str(error)
    room = ""
    if lacks_room(error):
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        free = shutil.disk_usage(there).free
        room = f"; {needed:,} bytes are needed and {free:,} are free there"
    return RolloutError(f"{path} cannot be written: {text}{room}")


def lacks_room(error: BaseException | None) -> bool:
    """Whether an error of writing says that there is no room."""
    found = _IN_SAFETENSORS.search(str(error))
    number = int(found["number"]) if found else getattr(error, "errno", None)
    return number in _OF_ROOM
