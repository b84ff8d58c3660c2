"""The thread that owns the model: takes work from an inbox, steps, posts chunks to the loop.

Only this thread touches the model, the scheduler and torch. The event loop puts functions into an
inbox, which never blocks the loop; the thread posts callbacks to the loop, which never blocks the
thread: one for each step at most.
"""

from __future__ import annotations

import atexit
import logging
import math
import queue
import secrets
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rollout.bridge import settle
from rollout.engine.core import CORE_CLOSE_S, EngineLoad, GenerationRequest
from rollout.engine.cores.transformers.scheduler import Scheduler
from rollout.engine.cores.transformers.scheduler import Sequence as Request
from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.bridge import Post
    from rollout.engine.core import Chunk, EngineInfo
    from rollout.engine.cores.transformers.scheduler import Piece, TransformersOptions

logger = logging.getLogger("rollout.engine")


class Worker:
    """A daemon thread that loads a model and steps it until `close_nowait`.

    Args:
        on_chunks: Called on the event loop with what requests are answered.
        on_stopped: Called on the event loop when the thread has ended: by `close_nowait` (None) or
            by an error. Always called, and last.
        post: Runs a callback on the event loop.

    Attributes:
        started: The facts about the model, once it is loaded; or why it is not.
        load: What it computes; replaced after each step.
    """

    def __init__(
        self,
        options: TransformersOptions,
        on_chunks: Callable[[Sequence[Chunk]], object],
        on_stopped: Callable[[Exception | None], object],
        post: Post,
    ) -> None:
        self._options = options
        self.started: Future[EngineInfo] = Future()
        self._on_chunks, self._on_stopped = on_chunks, on_stopped
        self._post = post
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_closing = False
        self._scheduler = Scheduler(max_running=options.max_running)
        self._model: Any = None  # a `SlotModel`, once it is loaded
        self.load = EngineLoad()
        self._thread = threading.Thread(target=self._run, name="rollout-transformers", daemon=True)
        # A daemon thread that is inside torch when the interpreter ends takes the process down
        # with it, so an exit without `aclose` waits for the step under way.
        atexit.register(self._end)
        self._thread.start()

    # On the event loop.

    def submit_nowait(self, request: GenerationRequest) -> None:
        """Take on a request that has been checked."""
        self._inbox.put(lambda: self._submit(request))

    def abort_nowait(self, request_id: str) -> None:
        """End a request with the tokens it has."""
        self._inbox.put(lambda: self._scheduler.abort(request_id))

    def command_nowait(self, work: Callable[[], None]) -> Future[None]:
        """Do `work` between two steps; the future is never settled where the thread has ended."""
        future: Future[None] = Future()
        self._inbox.put(lambda: settle(future, work))
        return future

    def close_nowait(self) -> None:
        """End every request and the thread."""
        self._inbox.put(self._close)

    # In the thread.

    def load_weights(self, version: int, path: str) -> None:
        """Compute with other weights of the same model; running requests continue."""
        self._model.load_weights(path)
        self._scheduler.weight_version = version
        self._scheduler.forget()

    def sleep(self, level: int) -> None:
        """Release the KV cache, and at level 2 the weights; no request may run."""
        if not self._scheduler.is_idle:
            raise EngineError("requests run: an engine that sleeps has none")
        self._scheduler.forget()
        self._model.sleep(level)

    def wake_up(self) -> None:
        """Load the weights that were released."""
        self._model.wake_up()

    def flush_cache(self) -> None:
        """No request that comes later finds what was computed so far."""
        self._scheduler.forget()

    def _end(self) -> None:
        self.close_nowait()
        self._thread.join(CORE_CLOSE_S)

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            self._serve()
        except BaseException as error:  # the loop must hear of it in any case
            if not isinstance(error, EngineError):  # that of a model that cannot be loaded
                logger.exception("the embedded engine stopped")
            failure = error if isinstance(error, Exception) else EngineError(repr(error))
        if not self.started.done():
            self.started.set_exception(failure or EngineError("the engine is closed"))
        self._report()
        self._post(lambda: self._on_stopped(failure))
        atexit.unregister(self._end)

    def _serve(self) -> None:
        # Here, not above: this takes seconds, and the event loop must not wait for it.
        import torch

        from rollout.engine.cores.transformers.model import SlotModel

        torch.set_num_threads(self._options.threads)
        with torch.inference_mode():
            self._model = SlotModel(self._options)
            self.started.set_result(self._model.info)
            while not self._is_closing:
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
        sequence = Request(
            request,
            context_length=info.context_length,
            eos_ids=info.eos_ids,
            seed=secrets.randbits(64) if seed is None else seed,
        )
        self._scheduler.submit(sequence)

    def _close(self) -> None:
        self._is_closing = True
        self._scheduler.abort_all()

    def _compute(self, pieces: Sequence[Piece]) -> None:
        """One batch, and a draw for each piece whose request is through its prompt."""
        from rollout.engine.cores.transformers.sampling import sample

        scheduler = self._scheduler
        logits = self._model.compute(pieces)
        for piece in pieces:
            piece.slot.computed = piece.stop
        sampled = [index for index, piece in enumerate(pieces) if piece.is_sampled]
        draws = sample(logits[sampled], [pieces[index].sequence for index in sampled])
        for index, draw in zip(sampled, draws, strict=True):
            piece = pieces[index]
            if math.isfinite(draw.log_prob):
                scheduler.advance(piece.sequence, draw)
                continue
            fault = f"the model's logits at position {piece.stop - 1} are not finite"
            scheduler.finish(piece.sequence, "error", fault)
            piece.slot.computed = 0
            self._model.cache.clear(piece.slot.index)

    def _report(self) -> None:
        """Tell the loop what has been sampled, and what there is to compute."""
        scheduler = self._scheduler
        if self._model is not None:
            capacity = self._options.max_running * self._model.info.context_length
            self.load = EngineLoad(
                running=len(scheduler.running),
                kv_used=scheduler.computed_tokens / capacity,
                generated_tokens=scheduler.generated_tokens,
            )
        if scheduler.chunks:
            chunks, scheduler.chunks = scheduler.chunks, []
            self._post(lambda: self._on_chunks(chunks))
