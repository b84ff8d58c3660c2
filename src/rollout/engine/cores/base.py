"""What all cores share: requests under way, how they end without an answer, and defaults.

Loaded in engine processes: imports msgspec and anyio only.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio

from rollout.engine.core import Chunk, EngineInfo, FinishReason, GenerationRequest
from rollout.engine.cores.checks import find_request_fault
from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.engine.weights import DiskWeights


class OpenRequest:
    """A request under way at a core.

    Attributes:
        request_id: Its own.
        tokens: How many have left in chunks.
        aborted_at: When its end was asked for, which has not been confirmed; None: it was not.
        is_over: Its last chunk has been made.
    """

    __slots__ = ("_end", "_scope", "aborted_at", "is_over", "request_id", "tokens")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.tokens = 0
        self.aborted_at: float | None = None
        self.is_over = False
        self._scope: anyio.CancelScope | None = None
        self._end: tuple[FinishReason, str, bool] | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for an answer: `give_up` ends the wait."""
        with anyio.CancelScope() as self._scope:
            if self._end is not None:
                self._scope.cancel()
            yield
        self._scope = None

    def give_up(self, reason: FinishReason, error: str = "", *, is_fatal: bool = False) -> None:
        """No answer will come: `last_chunk` ends the request. The first call counts."""
        self._end = self._end or (reason, error, is_fatal)
        if self._scope is not None:
            self._scope.cancel()

    def last_chunk(self) -> Chunk:
        """The end of a request that has been given up."""
        assert self._end is not None
        self.is_over = True
        reason, error, is_fatal = self._end
        return Chunk(
            request_id=self.request_id,
            offset=self.tokens,
            finish_reason=reason,
            error=error,
            is_fatal=is_fatal,
        )


Request = TypeVar("Request", bound=OpenRequest)


class BaseCore(Generic[Request]):
    """An `EngineCore` without an engine; a core of ours adds `start`, `generate` and the like.

    Attributes:
        is_gathering: See `EngineCore`.
        _info: The facts about the engine, once it has started.
        _open: Requests under way, by id.
        _asleep: Tags of the memory that is released.
        _failure: Why requests are refused; empty while the engine serves.
        _lost: Set by `_lose`.
        _is_closed: Nobody takes its place: what it refuses is an error.
    """

    is_gathering = False

    def __init__(self) -> None:
        self._info: EngineInfo | None = None
        self._open: dict[str, Request] = {}
        self._asleep: frozenset[str] = frozenset()
        self._failure = "the engine has not been started"
        self._lost = anyio.Event()
        self._is_closed = False

    @property
    def info(self) -> EngineInfo:
        """The facts about the engine; valid once `start` has returned."""
        if self._info is None:
            raise RuntimeError(f"{type(self).__name__}.info: start the engine first")
        return self._info

    async def update_weights(self, version: int, source: DiskWeights) -> None:
        """Load other weights of the same model; what is sampled from now on has this version.

        Requests continue meanwhile; no new one comes. Nothing that was computed with the old
        weights serves a later request.

        Raises:
            EngineError: The old weights stay.
            EngineBroken: Some of the new weights may be in.
        """
        raise EngineError(f"{type(self).__name__} cannot change its weights")

    async def sleep(self, level: int) -> None:
        """Release the KV cache (1), and the weights too (2); what is released already stays so.

        No request runs meanwhile; new ones are answered "rejected" until all of it is back.
        """
        raise EngineError(f"{type(self).__name__} cannot release its memory")

    async def wake_up(self, tags: tuple[str, ...]) -> None:
        """Take back what is named ("kv_cache", "weights") and released.

        Weights are those that the engine had, loaded again, or those that it was given meanwhile.
        """
        raise EngineError(f"{type(self).__name__} cannot release its memory")

    async def flush_cache(self) -> None:
        """Forget what was computed of earlier requests."""
        raise EngineError(f"{type(self).__name__} cannot flush its cache")

    async def watch(self) -> str:
        """Why the engine is lost, once it is; open requests have then been ended with that.

        The process that hosts the core runs it beside the server.
        """
        await self._lost.wait()
        return self._failure

    def _refuse(self, request: GenerationRequest) -> Chunk | None:
        """The answer to a request that is not taken on; None where it is."""
        if self._failure:
            # Another engine, or the next one in this place, serves what a lost one refuses.
            is_served_elsewhere = self._lost.is_set() and not self._is_closed
            return _answer(request, "rejected" if is_served_elsewhere else "error", self._failure)
        fault = find_request_fault(request, self.info) or self._find_fault(request)
        if not fault and request.request_id in self._open:
            fault = f"request id {request.request_id!r} is in use"
        if fault:
            return _answer(request, "error", fault)
        unable = "the engine is asleep" if self._asleep else self._find_obstacle()
        return _answer(request, "rejected", unable) if unable else None

    def _find_fault(self, request: GenerationRequest) -> str:
        """Why this kind of engine cannot serve a request that others can; empty where it can."""
        return ""

    def _find_obstacle(self) -> str:
        """Why no request is taken on now; empty where there is room."""
        info, count = self.info, len(self._open)
        waiting, limit = count - info.max_running, info.max_requests - info.max_running
        full = f"engine queue is full: {waiting} waiting, limit {limit}"
        return full if count >= info.max_requests else ""

    def _lose(self, reason: str) -> None:
        """No answer comes after this: end the requests that wait for one, and `watch`."""
        if self._lost.is_set():
            return
        self._failure = reason
        for entry in self._open.values():
            entry.give_up("error", reason, is_fatal=True)
        self._lost.set()

    def _close(self) -> None:
        """Answer nothing any more: end what is open with "abort"."""
        self._is_closed = True
        self._failure = "the engine is closed"
        for entry in self._open.values():
            entry.give_up("abort")


def _answer(request: GenerationRequest, reason: FinishReason, error: str) -> Chunk:
    return Chunk(request_id=request.request_id, finish_reason=reason, error=error)


def name_gpu(device: str) -> str:
    """The GPU of a torch device of this process, as ``CUDA_VISIBLE_DEVICES`` names it.

    Empty for a CPU, and for a device that the process cannot see.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = int(index or 0)
    if visible is None:
        return str(number)
    names = [name.strip() for name in visible.split(",")]
    return names[number] if number < len(names) else ""
