"""The embedded engine as the event loop sees it; torch lives in the thread of `worker`."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.bridge import loop_poster, wait_future
from rollout.engine.core import (
    CORE_CLOSE_S,
    TAGS_OF_LEVEL,
    Chunk,
    EngineLoad,
    GenerationRequest,
)
from rollout.engine.cores.base import BaseCore, OpenRequest
from rollout.engine.cores.transformers.scheduler import TransformersOptions
from rollout.engine.cores.transformers.worker import Worker
from rollout.errors import EngineError
from rollout.limits import cleanup_scope

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from concurrent.futures import Future

    from rollout.engine.weights import DiskWeights


class _Request(OpenRequest):
    """A request under way, with the chunks that its iterator has not taken yet."""

    __slots__ = ("_chunks", "_filled")

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self._chunks: deque[Chunk] = deque()
        self._filled = anyio.Event()

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._filled.set()

    async def get(self) -> Chunk:
        """The next chunk; the last one of all where the request has been given up."""
        if not self._chunks:
            self._filled = anyio.Event()
            with self.waiting():
                await self._filled.wait()
        chunk = self._chunks.popleft() if self._chunks else self.last_chunk()
        self.note(chunk)
        return chunk


class TransformersCore(BaseCore[_Request]):
    """An `EngineCore` over a transformers model: in-flight batching in a thread of its own.

    New requests join between steps and finished ones leave. A prompt is computed in parts, beside
    the running requests; what a slot still holds of its session is not computed again. It computes
    text only; `rollout.engine.cores.transformers.model` says which architectures are supported.

    The KV cache grows with the longest request and holds `max_running` times its length.

    Args:
        options: See `TransformersOptions`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = TransformersOptions(**options)
        self._worker: Worker | None = None
        self._stopped = anyio.Event()
        self._commands: set[Future[None]] = set()

    async def start(self) -> None:
        """Load the model in the engine's thread; the event loop runs on meanwhile.

        Cancellation leaves a thread that ends by itself when it has loaded.

        Raises:
            EngineError: The model cannot be loaded or is not supported.
        """
        if self._worker is not None:
            raise RuntimeError("TransformersCore.start: started already")
        self._worker = Worker(self._options, self._on_chunks, self._on_stopped, loop_poster())
        try:
            self._info = await wait_future(self._worker.started)
        except Exception as error:
            raise _wrap_error(error) from error
        except BaseException:
            self._worker.close_nowait()
            raise
        if not self._stopped.is_set():
            self._failure = ""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Chunks of one request; see `EngineCore.generate`.

        Closing the iterator early aborts the request; what it had sampled is lost.
        """
        refusal = self._refuse(request)
        if refusal is not None:
            yield refusal
            return
        assert self._worker is not None  # nothing is refused, so it runs
        request_id = request.request_id
        entry = self._open[request_id] = _Request(request_id)
        self._worker.submit_nowait(request)
        try:
            while not entry.is_over:
                yield await entry.get()
        finally:
            del self._open[request_id]
            if not entry.is_over:
                self._worker.abort_nowait(request_id)

    def abort_nowait(self, request_id: str) -> None:
        """Ask for the end of a request; its iterator then ends with "abort" and its tokens."""
        if self._worker is not None and request_id in self._open:
            self._worker.abort_nowait(request_id)

    async def update_weights(self, version: int, source: DiskWeights) -> None:
        """Load other weights of the same model from a directory, between two steps.

        Nothing is decoded meanwhile, and both models are in memory for a moment. Cancellation
        leaves the engine to it.

        Raises:
            EngineError: They cannot be loaded, or are of another model; the old ones stay.
        """
        await self._command(partial(self._serving().load_weights, version, source.path))
        self._info = msgspec.structs.replace(self.info, weight_version=version)

    async def sleep(self, level: int) -> None:
        """See `BaseCore.sleep`."""
        await self._command(partial(self._serving().sleep, level))
        self._asleep |= frozenset(TAGS_OF_LEVEL[level])

    async def wake_up(self, tags: tuple[str, ...]) -> None:
        """See `BaseCore.wake_up`."""
        if "weights" in tags:
            await self._command(self._serving().wake_up)
        self._asleep -= frozenset(tags)

    async def flush_cache(self) -> None:
        """See `BaseCore.flush_cache`."""
        await self._command(self._serving().flush_cache)

    def load(self) -> EngineLoad:
        """What the engine is doing now."""
        if self._worker is None:
            return EngineLoad()
        stepped = self._worker.load
        running = min(stepped.running, len(self._open))
        return msgspec.structs.replace(stepped, running=running, queued=len(self._open) - running)

    async def aclose(self) -> None:
        """End every request with the tokens it has and free the model.

        Takes at most `CORE_CLOSE_S`. A step that takes longer is left behind in its daemon thread,
        and its requests end with what they had been told; cancellation does not shorten this.
        """
        if self._worker is not None:
            self._worker.close_nowait()
            with cleanup_scope(CORE_CLOSE_S):
                await self._stopped.wait()
        self._close()

    def _serving(self) -> Worker:
        if self._worker is None or self._failure:
            raise EngineError(self._failure)
        return self._worker

    async def _command(self, work: Callable[[], None]) -> None:
        """Have the thread do something between two steps; cancellation leaves it to it."""
        done = self._serving().command_nowait(work)
        self._commands.add(done)
        try:
            await wait_future(done)
        except Exception as error:
            raise _wrap_error(error) from error
        finally:
            self._commands.discard(done)

    def _on_chunks(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            entry = self._open.get(chunk.request_id)
            if entry is not None:  # else nobody waits for it any more
                entry.put(chunk)

    def _on_stopped(self, error: Exception | None) -> None:
        if error is not None:
            self._lose(f"the engine stopped: {type(error).__name__}: {error}")
        else:
            self._close()
        for done in self._commands:  # those that it had not read
            if not done.done():
                done.set_exception(EngineError(self._failure))
        self._stopped.set()


def _wrap_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    return EngineError(f"the engine could not load the model: {type(error).__name__}: {error}")
