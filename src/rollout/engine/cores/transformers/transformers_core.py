"""The embedded engine as the event loop sees it; torch lives in the thread of `worker`."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.bridge import loop_poster
from rollout.engine.channel.operations import TAGS_OF_LEVEL
from rollout.engine.core import (
    CORE_CLOSE_S,
    Chunk,
    EngineInfo,
    EngineLoad,
    GenerationRequest,
)
from rollout.engine.cores.request_checks import request_fault
from rollout.engine.cores.transformers.worker import (
    Listener,
    Worker,
    WorkerAbort,
    WorkerClose,
    WorkerCommand,
    WorkerOptions,
    WorkerSubmit,
    stop_text,
)
from rollout.errors import EngineError
from rollout.limits import cleanup_scope

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from rollout.engine.cores.transformers.scheduler import Scheduler
    from rollout.engine.weights import DiskWeights


class _Mailbox:
    """Chunks of one request that its iterator has not taken yet."""

    __slots__ = ("chunks", "filled", "tokens")

    def __init__(self) -> None:
        self.chunks: deque[Chunk] = deque()
        self.filled = anyio.Event()
        self.tokens = 0

    def put(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self.tokens = chunk.offset + len(chunk.ids) // 4
        self.filled.set()

    async def get(self) -> Chunk:
        while not self.chunks:
            self.filled = anyio.Event()
            await self.filled.wait()
        return self.chunks.popleft()


class TransformersCore:
    """An `EngineCore` over a transformers model: in-flight batching in a thread of its own.

    New requests join between steps and finished ones leave. A prompt is computed in parts, beside
    the running requests; what a slot still holds of it, or another slot does, is not computed
    again. `rollout.engine.cores.transformers.slot_model` says which architectures are supported.

    The KV cache grows with the longest request and holds `max_running` times its length.

    Args:
        model: A local directory, a hub name or ``embedded:smollm2-135m-instruct``.
        revision: Of a hub name.
        trust_remote_code: Lets code from the model's repository run.
        dtype: "bfloat16", "float16", "float32" or "auto"; see `TransformersEngine`.
        device: A torch device, or "auto" for the GPU if there is one.
        threads: Compute threads, set for the whole process.
        max_running: Requests computed together.
        max_queued: Requests that may wait; the next one is answered "rejected".
        context_length: Prompt plus response in tokens; None takes the model's own.
        stream_interval: Sampled tokens gathered before a chunk leaves.
        stream_interval_s: How long a sampled token waits for others at most.

    Attributes:
        is_gathering: See `EngineCore`.
    """

    is_gathering = True

    def __init__(
        self,
        *,
        model: str,
        revision: str | None = None,
        trust_remote_code: bool = False,
        dtype: str = "auto",
        device: str = "cpu",
        threads: int = 1,
        max_running: int = 32,
        max_queued: int = 1024,
        context_length: int | None = None,
        stream_interval: int = 16,
        stream_interval_s: float = 0.25,
    ) -> None:
        self._options = WorkerOptions(
            model=model,
            revision=revision,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            device=device,
            threads=threads,
            max_running=max_running,
            max_queued=max_queued,
            context_length=context_length,
            stream_interval=stream_interval,
            stream_interval_s=stream_interval_s,
        )
        self._info: EngineInfo | None = None
        self._worker: Worker | None = None
        self._open: dict[str, _Mailbox] = {}
        self._pending_commands: set[anyio.Event] = set()
        self._asleep: frozenset[str] = frozenset()
        self._failure = "the engine has not been started"
        self._error: Exception | None = None

    @property
    def info(self) -> EngineInfo:
        """The facts about the engine; valid once `start` has returned."""
        if self._info is None:
            raise RuntimeError("TransformersCore.info: start the engine first")
        return self._info

    async def start(self) -> None:
        """Load the model in the engine's thread; the event loop runs on meanwhile.

        Cancellation leaves a thread that ends by itself when it has loaded.

        Raises:
            EngineError: The model cannot be loaded or is not supported.
        """
        if self._worker is not None:
            raise RuntimeError("TransformersCore.start: started already")
        self._settled = anyio.Event()
        self._stopped = anyio.Event()
        listener = Listener(
            started=self._on_started, chunks=self._on_chunks, stopped=self._on_stopped
        )
        self._worker = Worker(self._options, listener, loop_poster())
        try:
            await self._settled.wait()
        except BaseException:
            self._worker.send_nowait(WorkerClose())
            raise
        if self._error is not None:
            raise _as_engine_error(self._error)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Chunks of one request; see `EngineCore.generate`.

        Closing the iterator early aborts the request; what it had sampled is lost.
        """
        request_id = request.request_id
        refusal = self._refusal(request)
        if refusal is not None:
            yield refusal
            return
        assert self._worker is not None  # nothing is refused, so it runs
        mailbox = self._open[request_id] = _Mailbox()
        self._worker.send_nowait(WorkerSubmit(request))
        is_over = False
        try:
            while not is_over:
                chunk = await mailbox.get()
                is_over = chunk.finish_reason is not None
                yield chunk
        finally:
            if not is_over:
                self.abort_nowait(request_id)

    def abort_nowait(self, request_id: str) -> None:
        """Ask for the end of a request; its iterator then ends with "abort" and its tokens."""
        if self._worker is not None and request_id in self._open:
            self._worker.send_nowait(WorkerAbort(request_id))

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
        """See `SleepingCore.sleep`."""
        await self._command(partial(self._serving().sleep, level))
        self._asleep |= frozenset(TAGS_OF_LEVEL[level])

    async def wake_up(self, tags: tuple[str, ...]) -> None:
        """See `SleepingCore.wake_up`."""
        if "weights" in tags:
            await self._command(self._serving().wake_up)
        self._asleep -= frozenset(tags)

    async def flush_cache(self) -> None:
        """See `SleepingCore.flush_cache`."""
        await self._command(self._serving().flush_cache)

    def _serving(self) -> Worker:
        if self._worker is None or self._failure:
            raise EngineError(self._failure)
        return self._worker

    async def _command(self, work: Callable[[Scheduler, Any, EngineInfo], None]) -> None:
        """Have the thread do something between two steps; cancellation leaves it to it."""
        answered = anyio.Event()
        errors: list[Exception | None] = []

        def done(error: Exception | None) -> None:
            errors.append(error)
            answered.set()

        self._pending_commands.add(answered)
        self._serving().send_nowait(WorkerCommand(work, done))
        try:
            await answered.wait()
        finally:
            self._pending_commands.discard(answered)
        if not errors:  # the thread has ended before it read the message
            raise EngineError(self._failure)
        if errors[0] is not None:
            raise _as_engine_error(errors[0])

    def load(self) -> EngineLoad:
        """What the engine is doing now."""
        if self._worker is None:
            return EngineLoad()
        stepped = self._worker.load
        running = min(stepped.running, len(self._open))
        return EngineLoad(
            running=running,
            queued=len(self._open) - running,
            kv_used=stepped.kv_used,
            generated_tokens=stepped.generated_tokens,
        )

    async def aclose(self) -> None:
        """End every request with the tokens it has and free the model.

        Takes at most `CORE_CLOSE_S`. A step that takes longer is left behind in its daemon thread,
        and its requests end with what they had been told; cancellation does not shorten this.
        """
        if self._worker is None:
            self._failure = "the engine is closed"
            return
        self._worker.send_nowait(WorkerClose())
        with cleanup_scope(CORE_CLOSE_S):
            await self._stopped.wait()
        self._on_stopped(None)

    def _refusal(self, request: GenerationRequest) -> Chunk | None:
        """The answer to a request that is not taken on; None where it is."""
        request_id = request.request_id
        if self._failure:
            return Chunk(
                request_id=request_id,
                finish_reason="error",
                error=self._failure,
                is_fatal=self._error is not None,
            )
        fault = request_fault(request, self.info)
        if fault is None and request_id in self._open:
            fault = f"request id {request_id!r} is in use"
        if fault is not None:
            return Chunk(request_id=request_id, finish_reason="error", error=fault)
        if self._asleep:
            text = "the engine is asleep"
            return Chunk(request_id=request_id, finish_reason="rejected", error=text)
        waiting = len(self._open) - self._options.max_running
        if waiting >= self._options.max_queued:
            full = f"engine queue is full: {waiting} waiting, limit {self._options.max_queued}"
            return Chunk(request_id=request_id, finish_reason="rejected", error=full)
        return None

    def _on_started(self, info: EngineInfo) -> None:
        self._info = info
        self._failure = ""
        self._settled.set()

    def _on_chunks(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            mailbox = self._open.get(chunk.request_id)
            if mailbox is None:  # given up by `aclose`, whose time was over
                continue
            if chunk.finish_reason is not None:
                del self._open[chunk.request_id]
            mailbox.put(chunk)

    def _on_stopped(self, error: Exception | None) -> None:
        """No chunk comes after this: end what is still open."""
        if self._stopped.is_set() and not self._open:
            return
        self._error = error
        self._failure = stop_text(error) if error else "the engine is closed"
        for request_id, mailbox in self._open.items():
            mailbox.put(
                Chunk(
                    request_id=request_id,
                    offset=mailbox.tokens,
                    finish_reason="error" if error else "abort",
                    error=self._failure if error else "",
                    is_fatal=error is not None,
                )
            )
        self._open.clear()
        for answered in self._pending_commands:
            answered.set()
        self._settled.set()
        self._stopped.set()


def _as_engine_error(error: Exception) -> EngineError:
    if isinstance(error, EngineError):
        return error
    wrapped = EngineError(f"the engine could not load the model: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
