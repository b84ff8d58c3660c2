"""The lines of a ``trajectories.jsonl``, or of a journal, as far as a report needs them.

Floats that JSON cannot write are strings there; ids and log-probs become arrays at once, so that
no token is a Python object for longer than its line is read.
"""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.errors import RolloutError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rollout.journal.records import Key

logger = logging.getLogger("rollout.observe")

Number = float | str
_NUMBER = re.compile("-?[0-9]{1,18}")


class SavedSpan(msgspec.Struct, kw_only=True):
    """Tokens of one author, as `rollout.batch` writes them."""

    kind: str
    ids: list[int]
    text: str | None = None
    log_probs: list[Number] = []
    versions: list[tuple[int, int]] = []
    finish_reason: str | None = None


class SavedCall(msgspec.Struct, kw_only=True):
    """A tool call of a message."""

    name: str = ""
    arguments: Any = None
    raw: str = ""
    id: str | None = None


class SavedMessage(msgspec.Struct, kw_only=True):
    """A message of a conversation."""

    role: str
    content: str | None = None
    tool_calls: list[SavedCall] = []
    name: str | None = None
    tool_call_id: str | None = None


class SavedSegment(msgspec.Struct, kw_only=True):
    """A segment; None stands for what it shares with its trajectory."""

    purpose: str = "main"
    parent: Any = None
    reward: Number | None = None
    trainable: bool | None = None
    session_id: str = ""
    spans: list[SavedSpan] | None = None
    messages: list[SavedMessage] | None = None


class SavedTrajectory(msgspec.Struct, kw_only=True):
    """One line; `step`, `validate` and `call` are in those of a journal only."""

    step: int | None = None
    validate: bool | None = None
    call: int = 0
    uid: str
    group: int
    member: int
    num_turns: int
    outcome: str
    reason: str = ""
    limit_source: str | None = None
    trainable: bool = True
    reward: Number | None = None
    turn_scores: list[Number] = []
    metrics: dict[str, Number] = {}
    extra: dict[str, Any] = {}
    cause: dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    messages: list[SavedMessage] = []
    spans: list[SavedSpan] = []
    segments: list[SavedSegment] = []

    @property
    def asked_in(self) -> int | None:
        """The trainer's step, which its sessions say too: ``step/uid/member``."""
        step = self.segments[0].session_id.partition("/")[0] if self.segments else ""
        return int(step) if self.step is None and _NUMBER.fullmatch(step) else self.step

    @property
    def rows(self) -> list[SavedSegment]:
        """Its segments, with what they share filled in; at least one."""
        given = self.segments or [SavedSegment()]
        return [
            msgspec.structs.replace(
                each,
                spans=self.spans if each.spans is None else each.spans,
                messages=self.messages if each.messages is None else each.messages,
            )
            for each in given
        ]

    def metric(self, name: str) -> float | None:
        """One of its metrics, where it is known."""
        value = self.metrics.get(name)
        return None if value is None else float(value)


_DECODER = msgspec.json.Decoder(SavedTrajectory)


class TrajectoryLines:
    """Reads a file that grows: each `read` gives the lines that have come since the last one.

    A file that was put in its place, as a batch does when it is saved, is read from its start:
    `has_restarted` then says that what was read before is to be forgotten. Until it is there, the
    lines are those that it would have of what the journal of the run has finished.

    Args:
        path: The file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.has_restarted = False
        self._path = path
        self._journal_size = 0
        self._from_journal: set[Key] = set()
        self._identity: tuple[int, int] | None = None
        self._at = 0
        self._line = 0

    def read(self, journal: Path) -> list[bytes]:
        """Whole lines, without their ends.

        Args:
            journal: Of the run; it need not be there either.

        Raises:
            RolloutError: The file cannot be read; names it.
        """
        self.has_restarted = False
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                identity = status.st_dev, status.st_ino
                if self._identity is not None and (
                    identity != self._identity or status.st_size < self._at
                ):
                    self.has_restarted, self._at, self._line = True, 0, 0
                if self._from_journal:
                    self.has_restarted = True
                    self._from_journal.clear()
                self._identity = identity
                file.seek(self._at)
                data = file.read(status.st_size - self._at)
        except FileNotFoundError:
            return self._lines_of_journal(journal)
        except OSError as error:
            raise RolloutError(f"{self._path} cannot be read: {error.strerror}") from error
        whole, _, _ = data.rpartition(b"\n")
        self._at += len(whole) + 1 if whole else 0
        return whole.split(b"\n") if whole else []

    def _lines_of_journal(self, journal: Path) -> list[bytes]:
        """Of trajectories that have ended since the last time."""
        size = os.path.getsize(journal) if os.path.isfile(journal) else 0
        if not size or size == self._journal_size:
            return []
        self._journal_size = size
        from rollout.batch.records import trajectory_line
        from rollout.journal.index import read_finished

        new = read_finished(journal, self._from_journal)
        self._from_journal.update(new)
        return [
            _with_key(trajectory_line(each, None).rstrip(b"\n"), key) for key, each in new.items()
        ]

    def decode(self, line: bytes, add: Callable[[SavedTrajectory], None]) -> None:
        """Decode the trajectory of a line, and have it added.

        Raises:
            RolloutError: It describes none, or has what cannot be shown; names file and line.
        """
        self._line += 1
        try:
            add(_DECODER.decode(line))
        except (msgspec.MsgspecError, ValueError, OverflowError) as error:
            raise RolloutError(f"{self._path}, line {self._line}: {error}") from error


def _with_key(line: bytes, key: Key) -> bytes:
    asked = {"step": key.step, "validate": key.validate, "call": key.call}
    return msgspec.json.encode(asked)[:-1] + b"," + line[1:]
