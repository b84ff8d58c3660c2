"""Events on disk: one JSON object a line, appended by a thread during the run."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.errors import RolloutError
from rollout.observe.events import AnyEvent, BatchEnded, EventsDropped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.observe.events import Event

logger = logging.getLogger("rollout.observe")

#: The file's name within the directory of a run.
EVENTS = "events.jsonl"
#: Events that may wait for the disk; more are dropped and counted.
MOST_WAITING = 1 << 17
#: Events that are written at once: encoding holds the interpreter for a millisecond at most.
TOGETHER = 512
#: How long an event waits for others before it is written.
WRITE_EVERY_S = 0.25
#: How often a reader looks for the end of a batch that has just ended.
READ_AGAIN = 8
#: How long `close` waits for a disk that does not take what is left.
CLOSE_S = 5.0

_ENCODER = msgspec.json.Encoder(enc_hook=repr)
_DECODER: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


class EventFile:
    """Writes the events of a run to ``events.jsonl`` in a directory; a `Reader`.

    An earlier run's events stay, without their last line where that is torn.

    Args:
        directory: Made where there is none.

    Raises:
        RolloutError: The file cannot be written.
    """

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory) / EVENTS
        self._waiting: deque[Event] = deque()
        self._dropped = 0
        self._stop = threading.Event()
        self._fault = ""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115  (close() does)
            _drop_torn_line(self._file)
        except OSError as error:
            raise RolloutError(f"{self.path}: cannot be written: {error.strerror}") from error
        self._thread = threading.Thread(target=self._work, name="rollout-events", daemon=True)
        self._thread.start()

    def __call__(self, event: Event, subject: Any) -> None:
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(event)
        else:
            self._dropped += 1

    def close(self) -> None:
        """Write what is left, and close the file; bounded by `CLOSE_S`."""
        self._stop.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.error("%s: the disk does not take it; the last events are lost", self.path)

    def _work(self) -> None:
        with self._file:
            is_over = False
            while not is_over:
                is_over = self._stop.wait(WRITE_EVERY_S)
                while self._waiting:
                    self._write(self._taken())

    def _taken(self) -> list[Event]:
        taken = [self._waiting.popleft() for _ in range(min(TOGETHER, len(self._waiting)))]
        if self._dropped:
            count, self._dropped = self._dropped, 0
            taken.append(EventsDropped(at=taken[-1].at, count=count))
        return taken

    def _write(self, events: list[Event]) -> None:
        """Whole lines or none; a fault is said once, and the run continues without its events."""
        lines = _encoded(events)
        start = self._file.seek(0, io.SEEK_END)
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            if not self._fault:
                logger.warning("%s: %s; events are missing there", self.path, error.strerror)
            self._fault = str(error)
            self._dropped += len(events)
            self._file.truncate(start)


def _encoded(events: list[Event]) -> bytes:
    """Lines of JSON; what has no JSON in it (a lone surrogate of a model's) is replaced."""
    try:
        return _ENCODER.encode_lines(events)
    except UnicodeEncodeError:
        whole = [
            json.dumps(msgspec.to_builtins(each), default=repr, ensure_ascii=False)
            for each in events
        ]
        return "".join([f"{text}\n" for text in whole]).encode("utf-8", "replace")


def _drop_torn_line(file: Any) -> None:
    """A process that was killed may have left half a line, which the next one must not continue."""
    end = file.seek(0, io.SEEK_END)
    at = end
    while at:
        size = min(4096, at)
        file.seek(at - size)
        found = file.read(size).rfind(b"\n")
        if found >= 0:
            at += found + 1 - size
            break
        at -= size
    if at != end:
        file.truncate(at)


def read_events(path: str | Path) -> Iterator[AnyEvent]:
    """The events of a file, or of the directory of a run, in the order in which they were told.

    A torn last line, of a process that was killed or still writes, is left out; so are kinds of a
    later version. Several runs in one file follow each other, each from its `RunStarted`.

    Raises:
        RolloutError: There is no such file, or a line before the last is none of an event.
    """
    path = Path(path)
    path = path / EVENTS if os.path.isdir(path) else path
    try:
        file = open(path, "rb")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise RolloutError(f"{path}: cannot be read: {error.strerror}") from error
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            event = _decoded(line, f"{path}:{number}")
            if event is not None:
                yield event


def events_of_batch(path: str | Path, batch: int | None) -> list[AnyEvent]:
    """All events of a file, once the end of this call is among them or should have been long ago.

    Args:
        batch: The call's number; None: of an earlier process, which has written all that it will.

    Raises:
        RolloutError: As `read_events`.
    """
    wait = threading.Event()
    for _ in range(READ_AGAIN):
        found = list(read_events(path))
        ended = (each.batch for each in reversed(found) if isinstance(each, BatchEnded))
        if batch is None or batch in ended:
            break
        wait.wait(WRITE_EVERY_S)
    return found


def _decoded(line: bytes, place: str) -> AnyEvent | None:
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if _is_of_another_kind(line):
            return None
        raise RolloutError(f"{place}: expected an event: {error}") from error


def _is_of_another_kind(line: bytes) -> bool:
    try:
        kind = msgspec.json.decode(line, type=dict[str, Any]).get("kind")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return isinstance(kind, str) and kind not in KINDS


#: Names of the events on disk.
KINDS = frozenset(str(each.__struct_config__.tag) for each in AnyEvent.__args__)
