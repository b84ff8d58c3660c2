"""The embedded engine: the event loop asks, a thread of its own computes.

Only the engine's thread touches the model, the scheduler and torch. The event loop puts functions
into an inbox, which never blocks the loop; the thread posts callbacks to the loop, which never
blocks the thread: one for each step at most.
"""

from __future__ import annotations

import atexit
import logging
import math
import queue
import secrets
import threading
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.bridge import loop_poster, settle, wait_future
from rollout.engine.core import (
    CORE_CLOSE_S,
    TAGS_OF_LEVEL,
    Chunk,
    EngineInfo,
    EngineLoad,
    GenerationRequest,
)
from rollout.engine.cores.base import BaseCore, OpenRequest
from rollout.engine.cores.transformers.scheduler import Scheduler, TransformersOptions
from rollout.engine.cores.transformers.scheduler import Sequence as Running
from rollout.errors import EngineError
from rollout.limits import cleanup_scope

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from rollout.bridge import Post
    from rollout.engine.cores.transformers.scheduler import Piece
    from rollout.engine.weights import DiskWeights

logger = logging.getLogger("rollout.engine")


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
        if not self._chunks:
            return self.last_chunk()
        chunk = self._chunks.popleft()
        self.tokens = chunk.offset + len(chunk.ids) // 4
        self.is_over = chunk.finish_reason is not None
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
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = anyio.Event()
        self._commands: set[Future[None]] = set()
        self._post: Post
        # Of the thread; it replaces `_load` after each step.
        self._scheduler = Scheduler(max_running=self._options.max_running)
        self._model: Any = None  # a `SlotModel`, once it is loaded
        self._is_ending = False
        self._load = EngineLoad()

    # On the event loop.

    async def start(self) -> None:
        """Load the model in the engine's thread; the event loop runs on meanwhile.

        Cancellation leaves a thread that ends by itself when it has loaded.

        Raises:
            EngineError: The model cannot be loaded or is not supported.
        """
        if self._thread is not None:
            raise RuntimeError("TransformersCore.start: started already")
        self._post = loop_poster()
        started: Future[EngineInfo] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="rollout-transformers", daemon=True
        )
        # A daemon thread that is inside torch when the interpreter ends takes the process down
        # with it, so an exit without `aclose` waits for the step under way.
        atexit.register(self._join)
        self._thread.start()
        try:
            self._info = await wait_future(started)
        except Exception as error:
            raise _wrap_error(error) from error
        except BaseException:
            self._inbox.put(self._end)
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
        request_id = request.request_id
        entry = self._open[request_id] = _Request(request_id)
        self._inbox.put(partial(self._submit, request))
        try:
            while not entry.is_over:
                yield await entry.get()
        finally:
            if not entry.is_over:
                self.abort_nowait(request_id)
            del self._open[request_id]

    def abort_nowait(self, request_id: str) -> None:
        """Ask for the end of a request; its iterator then ends with "abort" and its tokens."""
        if request_id in self._open:
            self._inbox.put(partial(self._scheduler.abort, request_id))

    async def update_weights(self, version: int, source: DiskWeights) -> None:
        """Load other weights of the same model from a directory, between two steps.

        Nothing is decoded meanwhile, and both models are in memory for a moment. Cancellation
        leaves the engine to it.

        Raises:
            EngineError: They cannot be loaded, or are of another model; the old ones stay.
        """
        await self._command(partial(self._load_weights, version, source.path))
        self._info = msgspec.structs.replace(self.info, weight_version=version)

    async def sleep(self, level: int) -> None:
        """See `BaseCore.sleep`."""
        await self._command(partial(self._release, level))
        self._asleep |= frozenset(TAGS_OF_LEVEL[level])

    async def wake_up(self, tags: tuple[str, ...]) -> None:
        """See `BaseCore.wake_up`."""
        if "weights" in tags:
            await self._command(self._reload)
        self._asleep -= frozenset(tags)

    async def flush_cache(self) -> None:
        """See `BaseCore.flush_cache`."""
        await self._command(self._scheduler.forget)

    def load(self) -> EngineLoad:
        """What the engine is doing now."""
        running = min(self._load.running, len(self._open))
        queued = len(self._open) - running
        return msgspec.structs.replace(self._load, running=running, queued=queued)

    async def aclose(self) -> None:
        """End every request with the tokens it has and free the model.

        Takes at most `CORE_CLOSE_S`. A step that takes longer is left behind in its daemon thread,
        and its requests end with what they had been told; cancellation does not shorten this.
        """
        if self._thread is not None:
            self._inbox.put(self._end)
            with cleanup_scope(CORE_CLOSE_S):
                await self._stopped.wait()
        self._close()

    async def _command(self, work: Callable[[], None]) -> None:
        """Have the thread do something between two steps; cancellation leaves it to it."""
        if self._failure:
            raise EngineError(self._failure)
        done: Future[None] = Future()
        self._commands.add(done)
        self._inbox.put(partial(settle, done, work))
        try:
            await wait_future(done)
        except Exception as error:
            raise _wrap_error(error) from error
        finally:
            self._commands.discard(done)

    def _take_chunks(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            entry = self._open.get(chunk.request_id)
            if entry is not None:  # else nobody waits for it any more
                entry.put(chunk)

    def _stop(self, error: Exception | None) -> None:
        """The thread has ended: on request (None) or by an error."""
        if error is not None:
            self._lose(f"the engine stopped: {type(error).__name__}: {error}")
        else:
            self._close()
        for done in self._commands:  # those that it had not read
            if not done.done():
                done.set_exception(EngineError(self._failure))
        self._stopped.set()

    def _join(self) -> None:
        self._inbox.put(self._end)
        if self._thread is not None:
            self._thread.join(CORE_CLOSE_S)

    # In the thread.

    def _run(self, started: Future[EngineInfo]) -> None:
        failure: Exception | None = None
        try:
            self._serve(started)
        except BaseException as error:  # the loop must hear of it in any case
            if not isinstance(error, EngineError):  # that of a model that cannot be loaded
                logger.exception("the embedded engine stopped")
            failure = error if isinstance(error, Exception) else EngineError(repr(error))
        if not started.done():
            started.set_exception(failure or EngineError("the engine is closed"))
        self._report()
        self._post(partial(self._stop, failure))
        atexit.unregister(self._join)

    def _serve(self, started: Future[EngineInfo]) -> None:
        # Here, not above: this takes seconds, and the event loop must not wait for it.
        import torch

        from rollout.engine.cores.transformers.model import SlotModel

        torch.set_num_threads(self._options.threads)
        with torch.inference_mode():
            self._model = SlotModel(self._options)
            started.set_result(self._model.info)
            while not self._is_ending:
                self._empty_inbox()
                self._scheduler.admit(self._model.cache.copy)
                for pieces in self._scheduler.plan():
                    self._compute(pieces)
                self._report()

    def _empty_inbox(self) -> None:
        """Do all that waits; wait for something only where there is nothing to compute."""
        must_wait = self._scheduler.is_idle
        while must_wait or not self._inbox.empty():
            self._inbox.get()()
            must_wait = False

    def _submit(self, request: GenerationRequest) -> None:
        seed = request.sampling.seed
        info: EngineInfo = self._model.info
        running = Running(
            request,
            context_length=info.context_length,
            eos_ids=info.eos_ids,
            seed=secrets.randbits(64) if seed is None else seed,
        )
        self._scheduler.submit(running)

    def _load_weights(self, version: int, path: str) -> None:
        self._model.load_weights(path)
        self._scheduler.weight_version = version
        self._scheduler.forget()

    def _release(self, level: int) -> None:
        if not self._scheduler.is_idle:
            raise EngineError("requests run: an engine that sleeps has none")
        self._scheduler.forget()
        self._model.sleep(level)

    def _reload(self) -> None:
        self._model.wake_up()

    def _end(self) -> None:
        """End every request and the thread."""
        self._is_ending = True
        self._scheduler.abort_all()

    def _compute(self, pieces: Sequence[Piece]) -> None:
        """One batch, and a draw for each piece whose request is through its prompt."""
        from rollout.engine.cores.transformers.sampling import sample

        logits = self._model.compute(pieces)
        for piece in pieces:
            piece.slot.computed = piece.stop
        sampled = [index for index, piece in enumerate(pieces) if piece.is_sampled]
        draws = sample(logits[sampled], [pieces[index].sequence for index in sampled])
        for index, draw in zip(sampled, draws, strict=True):
            piece = pieces[index]
            if math.isfinite(draw.log_prob):
                self._scheduler.advance(piece.sequence, draw)
                continue
            fault = f"the model's logits at position {piece.stop - 1} are not finite"
            self._scheduler.finish(piece.sequence, "error", fault)
            piece.slot.computed = 0
            self._model.cache.clear(piece.slot.index)

    def _report(self) -> None:
        """Tell the loop what has been sampled, and what there is to compute."""
        scheduler = self._scheduler
        if self._model is not None:
            capacity = self._options.max_running * self._model.info.context_length
            self._load = EngineLoad(
                running=len(scheduler.running),
                kv_used=scheduler.computed_tokens / capacity,
                generated_tokens=scheduler.generated_tokens,
            )
        if scheduler.chunks:
            chunks, scheduler.chunks = scheduler.chunks, []
            self._post(partial(self._take_chunks, chunks))


def _wrap_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    return EngineError(f"the engine could not load the model: {type(error).__name__}: {error}")
