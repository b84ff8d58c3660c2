"""Texts of many trajectories encoded at once, beside the event loop."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import attrs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

logger = logging.getLogger("rollout.agents")

#: Of one thread hop: some 20 ms, after which those who brought these texts resume.
MOST_CHARACTERS = 65_536


@attrs.define(eq=False)
class _Waiting:
    """A text whose trajectory waits for its ids."""

    text: str
    is_done: anyio.Event = attrs.field(factory=anyio.Event)
    ids: list[int] | None = None


class TextBatches:
    """Gathers the texts that trajectories bring in one pass of the scheduler.

    Each lets the others of the pass bring theirs. Who runs first after that, and so still lives,
    leads: it has all encoded in a thread, and hands out the ids in the order of the texts.

    Args:
        encode: Encodes texts in a thread.
    """

    def __init__(self, encode: Callable[[Sequence[str]], Awaitable[list[list[int]]]]) -> None:
        self._encode = encode
        self._waiting: list[_Waiting] = []

    async def ids(self, text: str) -> list[int] | None:
        """Those of a text; None where they could not be had: encode it where you are."""
        waiting, batch = _Waiting(text), self._waiting
        batch.append(waiting)
        await anyio.lowlevel.cancel_shielded_checkpoint()
        if self._waiting is batch:
            self._waiting = []
            with anyio.CancelScope(shield=True):  # others wait for it, and it is soon done
                await self._serve(batch)
        else:
            await waiting.is_done.wait()
        return waiting.ids

    async def _serve(self, batch: Sequence[_Waiting]) -> None:
        try:
            for part in _parts(batch):
                encoded = await self._encode([each.text for each in part])
                for waiting, ids in zip(part, encoded, strict=True):
                    waiting.ids = ids
                    waiting.is_done.set()
        except Exception:
            logger.debug("a batch of texts was not encoded", exc_info=True)
        finally:  # no shield keeps asyncio's own cancellation off
            for waiting in batch:
                waiting.is_done.set()


def _parts(batch: Sequence[_Waiting]) -> Iterator[list[_Waiting]]:
    """The batch in order, in parts of little more than `MOST_CHARACTERS`."""
    part: list[_Waiting] = []
    size = 0
    for waiting in batch:
        part.append(waiting)
        size += len(waiting.text)
        if size >= MOST_CHARACTERS:
            yield part
            part, size = [], 0
    if part:
        yield part
