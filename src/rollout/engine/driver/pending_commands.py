"""Commands to an engine that wait for their answers."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import anyio

from rollout.engine.wire.protocol import Command, CommandDone

if TYPE_CHECKING:
    from rollout.engine.wire.frames import FrameStream
    from rollout.engine.wire.operations import Operation


class _PendingCommand:
    """A command under way; `done` fires at its answer, or without one when none can come."""

    __slots__ = ("answer", "done")

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.answer: CommandDone | None = None


class PendingCommands:
    """The commands under way on one channel."""

    def __init__(self) -> None:
        self._under_way: dict[int, _PendingCommand] = {}
        self._numbers = itertools.count()

    async def send(self, operation: Operation, frames: FrameStream) -> CommandDone | None:
        """Send a command and wait for its answer; None where the channel was lost first."""
        number, command = next(self._numbers), _PendingCommand()
        self._under_way[number] = command
        try:
            frames.send_nowait(Command(number, operation))
            await command.done.wait()
        finally:
            del self._under_way[number]
        return command.answer

    def answered(self, answer: CommandDone) -> None:
        """The engine has done one, or could not; one that no caller waits for changes nothing."""
        command = self._under_way.get(answer.number)
        if command is not None and not answer.is_fatal:
            command.answer = answer
            command.done.set()

    def abandon(self) -> None:
        """The channel is lost."""
        for command in self._under_way.values():
            command.done.set()
