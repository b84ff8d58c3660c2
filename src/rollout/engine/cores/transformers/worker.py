"""The thread that owns the model: takes requests from an inbox, steps, posts chunks to the loop.

Only this thread touches the model, the scheduler and torch. It talks to the event loop through an
inbox that never blocks the loop, and by posted callbacks that never block the thread, one for a
step at most.
"""

from __future__ import annotations

import atexit
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.clocks import monotonic
from rollout.engine.core import CORE_CLOSE_S, Chunk, EngineInfo, EngineLoad, GenerationRequest
from rollout.engine.cores.pacing import StreamPacer
from rollout.engine.cores.transformers.scheduler import Scheduler
from rollout.engine.cores.transformers.scheduler import Sequence as Request
from rollout.engine.model_files import resolve_model
from rollout.engine.model_identity import model_fingerprint
from rollout.errors import EngineError

if TYPE_CHECKING:
    from rollout.bridge import Post
    from rollout.engine.cores.transformers.unread_media import UnreadRequests
    from rollout.engine.cores.transformers.vision import VisionPrompt

logger = logging.getLogger("rollout.engine")


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the model is loaded and served; the arguments of `TransformersCore`."""

    model: str
    revision: str | None
    trust_remote_code: bool
    dtype: str
    device: str
    threads: int
    max_running: int
    max_queued: int
    context_length: int | None
    stream_interval: int
    stream_interval_s: float


class Listener(msgspec.Struct, frozen=True, kw_only=True):
    """What the thread reports to the event loop; every function is called on the loop."""

    started: Callable[[EngineInfo], object]
    chunks: Callable[[Sequence[Chunk]], object]
    #: The thread has ended: by `close` (None) or by an error. Always called, and last.
    stopped: Callable[[Exception | None], object]


def _reads_media(options: Any) -> bool:
    """Whether the model's files say so; of one that is not there `_load` says that."""
    from rollout.chat.processors import has_processor

    try:
        return has_processor(resolve_model(options.model, options.revision), options.revision)
    except Exception:
        return False


def stop_text(error: Exception) -> str:
    """What requests are answered when the engine has stopped because of `error`."""
    return f"the engine stopped: {type(error).__name__}: {error}"


class WorkerSubmit(msgspec.Struct, frozen=True):
    """A request that has been checked."""

    request: GenerationRequest


class WorkerAbort(msgspec.Struct, frozen=True):
    """End a request with the tokens it has."""

    request_id: str


class WorkerCommand(msgspec.Struct, frozen=True):
    """Call `work` in the thread, between two steps.

    `done` is called on the loop: with what went wrong, or None.
    """

    work: Callable[[Scheduler, Any, EngineInfo], None]
    done: Callable[[Exception | None], object]


class WorkerClose(msgspec.Struct, frozen=True):
    """End every request and the thread."""


Message = WorkerSubmit | WorkerAbort | WorkerCommand | WorkerClose


class Worker:
    """A daemon thread that loads a model and steps it until `close`."""

    def __init__(self, options: WorkerOptions, listener: Listener, post: Post) -> None:
        self._options = options
        self._listener = listener
        self._post = post
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._is_closing = False
        self._pacer = StreamPacer(options.stream_interval_s)
        self._handed_over_at = 0.0
        self._architecture = ""
        self._unread: UnreadRequests | None = None  # until torch is there
        self._source: tuple[str, str | None] = (options.model, options.revision)
        #: Requests running in slots, tokens sampled, share of the cache: replaced after each step.
        self.load = EngineLoad()
        self._thread = threading.Thread(target=self._run, name="rollout-transformers", daemon=True)
        # A daemon thread that is inside torch when the interpreter ends takes the process down
        # with it, so an exit without `aclose` waits for the step under way.
        atexit.register(self._end)
        self._thread.start()

    def send_nowait(self, message: Message) -> None:
        """Leave a message for the thread, which reads it before its next step."""
        self._inbox.put(message)

    def _end(self) -> None:
        self.send_nowait(WorkerClose())
        self._thread.join(CORE_CLOSE_S)

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self._serve()
        except EngineError as caught:  # a model that cannot be loaded: `start` raises it
            error = caught
        except Exception as caught:
            logger.exception("the embedded engine stopped")
            error = caught
        except BaseException as caught:  # the loop must hear of it in any case
            error = EngineError(f"{type(caught).__name__}: {caught}")
        self._tell(self._listener.stopped, error)
        atexit.unregister(self._end)

    def _serve(self) -> None:
        # Here, not above: this takes seconds, and the event loop must not wait for it.
        from rollout.engine.cores.transformers.library_imports import import_libraries

        options = self._options
        import_libraries(
            leave_out_compiler=not options.trust_remote_code,
            reads_media=_reads_media(options),
        )
        import torch

        from rollout.engine.cores.transformers.slot_model import (
            SlotModel,
            architecture_of,
            describe,
            open_reader,
        )

        torch.set_num_threads(options.threads)
        with torch.inference_mode():
            loaded = self._load(options.model, options.revision)
            self._architecture = architecture_of(loaded)
            resolved = resolve_model(options.model, options.revision)
            reader, modalities, no_media = open_reader(
                loaded,
                resolved,
                revision=options.revision,
                trust_remote_code=options.trust_remote_code,
            )
            info = describe(
                loaded,
                fingerprint=model_fingerprint(resolved, options.revision),
                context_length=options.context_length,
                max_requests=options.max_running + options.max_queued,
                max_running=options.max_running,
                modalities=modalities,
                no_media=no_media,
            )
            model = SlotModel(
                loaded,
                slots=options.max_running,
                context_length=info.context_length,
                reader=reader,
            )
            model.warm_up()
            self._tell(self._listener.started, info)
            self._step_forever(model, info)

    def _step_forever(self, model: Any, info: EngineInfo) -> None:
        from rollout.engine.cores.transformers.stepping import step

        options = self._options
        scheduler = Scheduler(
            max_running=options.max_running, stream_interval=options.stream_interval
        )
        unread = self._unread = _unread_requests(scheduler, info)
        while True:
            self._read_inbox(scheduler, model, info)
            if self._is_closing:
                scheduler.end_all("abort")
                for request in unread.clear():
                    scheduler.answer(request.request_id, "abort")
            elif unread or not scheduler.is_idle:
                self._hand_over(scheduler)
                begun = monotonic()
                try:
                    unread.read_some(model)
                    if not scheduler.is_idle:
                        step(scheduler, model)
                except Exception as error:
                    scheduler.end_all("error", stop_text(error), is_fatal=True)
                    self._report(scheduler, info)
                    raise
                self._pacer.note_step(monotonic() - begun)
            self._report(scheduler, info)
            if self._is_closing:
                return

    def _hand_over(self, scheduler: Scheduler, *, everything: bool = False) -> None:
        """Before a step, or other work: tokens that might wait too long for its end leave now.

        How long a prompt takes is not known before.
        """
        now = monotonic()
        waited_s = now - self._handed_over_at
        if everything or scheduler.has_prompts or self._pacer.is_due(waited_s):
            self._handed_over_at = now
            scheduler.flush()
            self._tell_chunks(scheduler)

    def _read_inbox(self, scheduler: Scheduler, model: Any, info: EngineInfo) -> None:
        """Take every message; wait for one only where there is nothing to do."""
        assert self._unread is not None
        must_wait = scheduler.is_idle and not self._unread
        while must_wait or not self._inbox.empty():
            match self._inbox.get():
                case WorkerSubmit(request):
                    if request.media:
                        self._unread.add(request)
                    else:
                        scheduler.submit(_sequence(request, info))
                case WorkerAbort(request_id):
                    if self._unread.pop(request_id) is None:
                        scheduler.abort(request_id)
                    else:
                        scheduler.answer(request_id, "abort")
                case WorkerCommand(work, done):
                    self._hand_over(scheduler, everything=True)
                    self._tell(done, _failure_of(lambda: work(scheduler, model, info)))
                case WorkerClose():
                    self._is_closing = True
            must_wait = False

    # What orders do.

    def load_weights(
        self, version: int, path: str, scheduler: Scheduler, model: Any, info: EngineInfo
    ) -> None:
        """Compute with other weights of the same model from now on.

        Raises:
            EngineError: They cannot be loaded or are of another model; nothing has changed.
        """
        from rollout.engine.cores.transformers.slot_model import architecture_of

        loaded = self._load(path, None, model.configs_for(path))
        found = architecture_of(loaded)
        if found != self._architecture:
            raise EngineError(
                f"{path}: the weights are of model {found}, the engine serves {self._architecture}"
            )
        model.replace(loaded)
        scheduler.change_weights(version)
        self._source = (path, None)

    def sleep(self, level: int, scheduler: Scheduler, model: Any, info: EngineInfo) -> None:
        """Release the KV cache, and at level 2 the weights; no request may run."""
        if self._unread or not scheduler.is_idle:
            raise EngineError("requests run: an engine that sleeps has none")
        scheduler.table.forget()
        model.release(weights=level > 1)

    def wake_up(self, scheduler: Scheduler, model: Any, info: EngineInfo) -> None:
        """Load the weights that were released; the KV cache grows with the first requests."""
        if model.is_released:
            path, revision = self._source
            model.replace(self._load(path, revision, model.configs_for(path)))

    def flush_cache(self, scheduler: Scheduler, model: Any, info: EngineInfo) -> None:
        """No request that comes later finds what was computed so far."""
        scheduler.table.forget()

    def _load(self, path: str, revision: str | None, configs: Any = None) -> Any:
        from rollout.engine.cores.transformers.slot_model import load_model

        options = self._options
        return load_model(
            path,
            revision=revision,
            trust_remote_code=options.trust_remote_code,
            dtype=options.dtype,
            device=options.device,
            configs=configs,
        )

    def _report(self, scheduler: Scheduler, info: EngineInfo) -> None:
        capacity = self._options.max_running * info.context_length
        self.load = EngineLoad(
            running=scheduler.running,
            kv_used=scheduler.computed_tokens() / capacity,
            generated_tokens=scheduler.generated_tokens,
        )
        self._tell_chunks(scheduler)

    def _tell_chunks(self, scheduler: Scheduler) -> None:
        chunks = scheduler.take_chunks()
        if chunks:
            self._tell(self._listener.chunks, chunks)

    def _tell(self, function: Callable[[Any], object], argument: object) -> None:
        self._post(lambda: function(argument))


def _failure_of(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def _unread_requests(scheduler: Scheduler, info: EngineInfo) -> UnreadRequests:
    from rollout.engine.cores.transformers.unread_media import UnreadRequests

    return UnreadRequests(
        lambda request, vision: scheduler.submit(_sequence(request, info, vision)),
        lambda request, error: scheduler.answer(request.request_id, "error", error),
    )


def _sequence(
    request: GenerationRequest, info: EngineInfo, vision: VisionPrompt | None = None
) -> Request:
    seed = request.sampling.seed
    return Request(
        request,
        context_length=info.context_length,
        eos_ids=info.eos_ids,
        seed=secrets.randbits(64) if seed is None else seed,
        vision=vision,
    )
