"""An engine that answers at once, or as soon as all trajectories wait for it.

It lives in a child process of the driver, as `engine.kind = "custom"`, and imports what an engine's
environment has.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import anyio

from driver_cases.workload import Answers, question_of
from rollout.engine.core import Chunk, EngineInfo, EngineLoad, GenerationRequest, unpack_ids

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class InstantCore:
    """Says what `Answers` says, with a log-prob for each id.

    Args:
        directory: Of the workload.
        turns: Turns of a trajectory that call a tool.
        in_flight: How many trajectories there are.
        barrier: "rounds" holds the answers of every turn until all trajectories wait, "first" those
            of the first, "none" no answer; "never" gives none.
        repeat: How many times over each answer says its ids.
    """

    def __init__(
        self, directory: str, turns: int, in_flight: int, barrier: str, repeat: int
    ) -> None:
        self._answers = Answers(directory, turns)
        self._in_flight, self._barrier = in_flight, barrier
        self._calls = [_packed(ids * repeat) for ids in self._answers.calls]
        self._finals = [_packed(ids * repeat) for ids in self._answers.finals]
        self._sessions: dict[str, tuple[int, int]] = {}
        self._waiting: dict[str, anyio.Event] = {}
        self._aborted: set[str] = set()
        self.info = EngineInfo(
            vocab_size=self._answers.vocab_size,
            eos_ids=(self._answers.end_of_turn,),
            context_length=1 << 20,
            fingerprint="instant",
            max_requests=1 << 20,
            core="instant",
        )

    async def start(self) -> None:
        """Nothing to load."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """One chunk, and its end."""
        name, turn = request.request_id, 0
        if request.session_id in self._sessions:
            question, turn = self._sessions.pop(request.session_id)
        else:
            question = question_of(unpack_ids(request.prompt_ids[-256:]))
        is_last, index = self._answers.index(question, turn)
        if not is_last:
            self._sessions[request.session_id] = question, turn + 1
        if self._barrier != "none" and (turn == 0 or self._barrier == "rounds"):
            await self._wait(name)
        if name in self._aborted:
            self._aborted.remove(name)
            yield Chunk(request_id=name, finish_reason="abort")
            return
        ids, log_probs = (self._finals if is_last else self._calls)[index]
        yield Chunk(request_id=name, ids=ids, log_probs=log_probs, finish_reason="stop")

    async def _wait(self, name: str) -> None:
        """Until as many requests wait as there are trajectories."""
        released = self._waiting[name] = anyio.Event()
        if len(self._waiting) == self._in_flight and self._barrier != "never":
            for each in self._waiting.values():
                each.set()
            self._waiting.clear()
        await released.wait()

    def abort_nowait(self, request_id: str) -> None:
        """One that waits ends; others are about to."""
        released = self._waiting.pop(request_id, None)
        if released is not None:
            self._aborted.add(request_id)
            released.set()

    def load(self) -> EngineLoad:
        """Idle."""
        return EngineLoad()

    async def aclose(self) -> None:
        """Nothing to free."""


def _packed(ids: list[int]) -> tuple[bytes, bytes]:
    log_probs = array("f", [-(token % 97) / 64 for token in ids])
    return array("i", ids).tobytes(), log_probs.tobytes()
