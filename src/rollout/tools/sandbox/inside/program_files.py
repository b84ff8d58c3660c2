"""Files that go into a sandbox before a program runs, and those that come out after it."""

from __future__ import annotations

import base64
import fnmatch
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_PROGRAM, _PLAIN = 0o755, 0o644


def put_files(directory: str, files: Mapping[str, str]) -> None:
    """Write files, given in base64 by their paths in `directory`; what begins with #! can be run.

    Raises:
        OSError: They are more than the sandbox may hold, or a path is taken.
    """
    for path, encoded in files.items():
        place, content = os.path.join(directory, path), base64.b64decode(encoded)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "xb") as file:
            file.write(content)
        os.chmod(place, _PROGRAM if content.startswith(b"#!") else _PLAIN)


def collect_files(
    directory: str,
    patterns: Sequence[str],
    most: int,
    before: Mapping[str, tuple[int, ...]] | None = None,
) -> tuple[dict[str, str], list[str]]:
    """Files in base64 by their paths, in order, and what was left out.

    That are paths of files that are too long, of links and other things that are no plain files,
    and of directories that cannot be read; then patterns that nothing matches.

    Args:
        directory: Where to look; links are not followed.
        patterns: Paths of files, of directories, which mean all that is in them, or patterns of
            paths, in which ``*`` stands for any text.
        most: Bytes of all files together.
        before: Those that were there already, which are passed over as long as they are the same,
            and so are patterns that nothing matches. None: there were none.
    """
    found: dict[str, str] = {}
    left_out: list[str] = []
    idle = dict.fromkeys(patterns)
    for path in _paths(directory) if patterns else ():
        matching = [pattern for pattern in patterns if _matches(path, pattern)]
        if not matching:
            continue
        for pattern in matching:
            idle.pop(pattern, None)
        if before and before.get(path, ()) == _stamp(os.path.join(directory, path)):
            continue
        content = _read(os.path.join(directory, path), most)
        if content is None:
            left_out.append(path)
        else:
            found[path] = base64.b64encode(content).decode()
            most -= len(content)
    return found, left_out + (list(idle) if before is None else [])


def stamps_of(directory: str) -> dict[str, tuple[int, ...]]:
    """What tells whether files were written since, by their paths in a directory."""
    return {path: _stamp(os.path.join(directory, path)) for path in _paths(directory)}


def _stamp(path: str) -> tuple[int, ...]:
    try:
        facts = os.lstat(path)
    except OSError:
        return ()
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _matches(path: str, pattern: str) -> bool:
    return path.startswith(pattern.rstrip("/") + "/") or fnmatch.fnmatchcase(path, pattern)


def _paths(directory: str) -> Iterator[str]:
    """Of files, and of directories that are not looked into: links, and what cannot be read."""
    for place, folders, names in os.walk(directory):
        folders.sort()
        closed = [name for name in folders if _is_closed(os.path.join(place, name))]
        for name in sorted([*names, *closed]):
            path = os.path.relpath(os.path.join(place, name), directory)
            try:
                path.encode()
            except UnicodeEncodeError:  # bytes that are no text: nobody can have asked for it
                continue
            yield path


def _is_closed(folder: str) -> bool:
    return os.path.islink(folder) or not os.access(folder, os.R_OK | os.X_OK)


def _read(path: str, most: int) -> bytes | None:
    """A file's content; None of what is no plain file, cannot be read or is too long."""
    try:
        # A pipe would keep us waiting, a link could lead anywhere.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        try:
            content = file.read(most + 1)
        except (OSError, MemoryError):
            return None
    return content if len(content) <= most else None
