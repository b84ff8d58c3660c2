"""The file of a journal: opened, locked and read before any work, closed after it."""

from __future__ import annotations

import fcntl
import os
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from rollout.errors import ConfigError, JournalError
from rollout.scheduling.journal.held_files import hold, let_go, opening_error
from rollout.scheduling.journal.journal_reading import Contents, read_journal, say_torn
from rollout.scheduling.journal.run_identity import check_same, header_of
from rollout.worker_threads import run_in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from rollout.config import RolloutConfig


class JournalFile:
    """A file that no other runtime writes as long as this one has it.

    Args:
        path: Where it is, or is made.

    Attributes:
        contents: What it held when it was opened.

    Raises:
        ConfigError: It cannot be made, or another runtime writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.contents = path, Contents()
        self._is_new = not path.exists()
        try:
            self._descriptor: int | None = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
        except OSError as error:
            raise _unwritable(path, error) from error
        hold(self._descriptor)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._is_new = False
            self.close()
            raise opening_error(path, error) from error

    def taken(self) -> int:
        """Its descriptor, which the caller closes, without what is torn at its end.

        Raises:
            ConfigError: It is not as it was any more.
        """
        contents, descriptor = self.contents, self._descriptor
        assert descriptor is not None
        try:
            known = contents.size + (0 if contents.torn is None else contents.torn.size)
            if os.fstat(descriptor).st_size != known:
                raise OSError(0, "another process has written it meanwhile")
            if contents.torn is not None:
                say_torn(self.path, contents.torn)
            os.ftruncate(descriptor, contents.size)
        except OSError as error:
            raise opening_error(self.path, error) from error
        self._descriptor = None
        return descriptor

    def close(self) -> None:
        """Unless it was taken; one that was not there before is removed then."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if self._is_new and not os.fstat(descriptor).st_size:
            # Before the lock ends: nobody has begun it. Where it is a link, that stays.
            with suppress(OSError):
                self.path.resolve().unlink()
        let_go(descriptor)
        os.close(descriptor)


@asynccontextmanager
async def journal_file(config: RolloutConfig, *, resume: bool) -> AsyncIterator[JournalFile | None]:
    """The journal of a configuration, and what it holds; None where it has none. Before any work.

    Raises:
        ConfigError: It cannot be read or written, another runtime writes it, it is of another
            configuration, or there is one and it is not to be resumed.
    """
    if not isinstance(resume, bool):
        raise ConfigError(f"resume = {resume!r:.80}: expected True or False")
    path = config.journal.file
    if config.journal.path is None or path is None:
        if resume:
            raise ConfigError("resume = True: expected journal.path to name the journal")
        yield None
        return
    _check(path, resume=resume)
    file = JournalFile(path)
    try:
        file.contents = await _contents(path)
        # What the model's files hold is compared later, once it is loaded.
        check_same(config.journal.path, file.contents, header_of(config, {}, [], 0))
        yield file
    finally:
        file.close()


async def _contents(path: Path) -> Contents:
    try:
        return await run_in_thread(read_journal, path)
    except JournalError as error:
        raise ConfigError(f"journal.path = {str(path)!r}: {error}") from error


def _check(path: Path, *, resume: bool) -> None:
    """See whether it may be there, and have its folder there."""
    fault = path_fault(path)
    if fault is not None:
        raise ConfigError(fault)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    if not resume and path.exists() and path.stat().st_size:
        raise ConfigError(
            f"journal.path = {str(path)!r}: exists; expected a new file, or resume=True"
        )


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"journal.path = {str(path)!r}: cannot be written: {error.strerror}")


def path_fault(path: Path) -> str | None:
    """What is wrong with the path of a journal, as far as can be seen without writing there."""
    named = f"journal.path = {str(path)!r}"
    try:
        return _path_fault(path, named)
    except OSError as error:
        return f"{named}: {error.strerror}"


def _path_fault(path: Path, named: str) -> str | None:
    if "\0" in str(path):
        return f"{named}: expected a path, which holds no NUL"
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return f"{named}: expected a path in UTF-8, which the journal can name"
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        what = "a directory" if path.is_dir() else "no file"
        return f"{named}: is {what}; expected a file, or a new one"
    there = next(each for each in path.absolute().parents if each.exists() or each.is_symlink())
    if not there.is_dir():
        return f"{named}: cannot be written: {there} is no directory"
    if not os.access(path if path.exists() else there, os.R_OK | os.W_OK):
        return f"{named}: cannot be read and written by this user"
    return None


def sync_names(path: Path) -> None:
    """Have the name of a new file on the disk, and those of its folders: some are as new."""
    for folder in {*path.absolute().parents, *path.resolve().parents}:  # it may be a link
        with suppress(OSError):  # not each system does that
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
