"""SGLang as the engine's server sees it."""

from __future__ import annotations

import signal
import threading
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
from anyio import to_thread

from rollout.bridge import runs_on_trio, wait_future
from rollout.engine.core import (
    CORE_CLOSE_S,
    TAGS_OF_LEVEL,
    Chunk,
    EngineLoad,
    GenerationRequest,
)
from rollout.engine.cores.base import BaseCore
from rollout.engine.cores.sglang.adapter import ServerThread, SGLang
from rollout.engine.cores.sglang.checkpoints import check_checkpoint
from rollout.engine.cores.sglang.server_arguments import SGLangOptions
from rollout.engine.cores.sglang.translation import (
    AnswerReader,
    build_fields,
    find_sampling_fault,
    make_salt,
)
from rollout.errors import EngineError, RolloutError
from rollout.limits import cleanup_scope

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence

    from rollout.engine.weights import DiskWeights

#: How often SGLang's processes are looked at, and aborts without an answer are sent again.
WATCH_S = 0.25
#: How often the schedulers are asked for a sign of life when they have given none.
ASK_S = 1.0
#: A scheduler answers between its steps, and a step can be a long prefill: only silence past this
#: is a hang. SGLang's own watchdog gives a step as long.
SILENCE_S = 300.0
#: What SGLang calls its third kind of memory.
CUDA_GRAPH = "cuda_graph"
#: A process that has been stopped for this long is taken for dead.
FROZEN_S = 5.0


class SGLangCore(BaseCore[AnswerReader]):
    """An `EngineCore` over `sglang.Engine`; needs asyncio, which SGLang is written for.

    Log-probs are SGLang's: of the distribution after the temperature, before top-k, top-p and
    min-p; of a greedy token, at temperature 1. Seeds count with `deterministic` only. The prefix
    cache is keyed by the weight version, so that no request reuses keys and values of other
    weights.

    In the main thread, SIGTERM drains the engine: it takes nothing new, finishes what it has, and
    is then lost.

    Args:
        options: See `SGLangOptions`.
    """

    is_gathering = True

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = SGLangOptions(**options)
        self._server_thread: ServerThread | None = None
        self._sglang: SGLang | None = None
        self._is_loading = False
        self._weights_path = ""
        self._is_draining = False
        self._sampled = self._preemptions = self._updates = 0

    async def start(self) -> None:
        """Start SGLang's processes and load the model; the event loop runs on meanwhile.

        Cancellation kills what has been started.

        Raises:
            EngineError: SGLang is missing or did not start.
        """
        if self._server_thread is not None:
            raise RuntimeError("SGLangCore.start: started already")
        if runs_on_trio():
            raise EngineError("SGLang needs an event loop of asyncio; this one is trio's")
        if threading.current_thread() is threading.main_thread():
            # A scheduler that fails to start sends it, and the default action is to die of it.
            signal.signal(signal.SIGQUIT, lambda *_: None)
        self._server_thread = ServerThread(self._options)
        try:
            self._sglang = await wait_future(self._server_thread.started)
        except BaseException:
            self._server_thread.stop()
            raise
        self._failure = ""
        if not self._options.is_follower:
            self._info, self._weights_path = self._sglang.info, self._sglang.model_path
            self._sglang.adopt_loop(self.drain_nowait)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Chunks of one request; see `EngineCore.generate`.

        Closing the iterator early aborts the request; what it had sampled is lost.
        """
        refusal = self._refuse(request)
        if refusal is not None:
            yield refusal
            return
        assert self._sglang is not None
        entry = AnswerReader(request.request_id)
        entry.is_buffering = self._is_loading
        self._open[request.request_id] = entry
        try:
            fields = await self._build_fields(request, entry)
            if fields is None:
                yield entry.last_chunk()
                return
            async with aclosing(self._sglang.generate(**fields)) as answers:
                while not entry.is_over:
                    for chunk in await self._next_chunks(answers, entry):
                        yield chunk
        finally:
            del self._open[request.request_id]
            if not entry.is_over:
                self._sglang.abort(request.request_id)

    def abort_nowait(self, request_id: str) -> None:
        """Ask for the end of a request; its iterator then ends with "abort" and its tokens."""
        entry = self._open.get(request_id)
        if entry is None or self._sglang is None:
            return
        entry.aborted_at = anyio.current_time()
        if self._sglang.is_dispatched(request_id):
            self._sglang.abort(request_id)
        else:  # SGLang delays it, as during a weight update, and nothing has been sampled
            entry.give_up("abort")

    def load(self) -> EngineLoad:
        """What SGLang's schedulers say they are doing, and what they have not seen yet."""
        if self._sglang is None:
            return EngineLoad()
        running, queued, kv_used = self._sglang.load()
        return EngineLoad(
            running=running,
            queued=max(queued, len(self._open) - running),
            kv_used=kv_used,
            generated_tokens=self._sampled,
            preemptions=self._preemptions,
        )

    async def update_weights(self, version: int, source: DiskWeights) -> None:
        """Load other weights of the same model from a directory; requests pause meanwhile.

        Their tokens leave when SGLang says what sampled each; see `AnswerReader`.

        Raises:
            EngineError: There are no such weights, they are of another model, or requests run of
                which this version of SGLang could not say what sampled their tokens.
            EngineBroken: SGLang did not load them.
        """
        sglang = self._serving()
        # Of a file system that hangs only this update must hear, and not the whole engine.
        await to_thread.run_sync(
            check_checkpoint, source.path, sglang.model_path, abandon_on_cancel=True
        )
        are_running = not all(entry.is_over for entry in self._open.values())
        if are_running and not sglang.names_versions:
            raise EngineError(
                "mode = 'in_place': this version of SGLang does not say which weights sampled "
                "which token; expected 'wait' or 'abort_and_resume', or SGLang 0.5.20 or later"
            )
        await self._take_back(("weights",))
        await self._load(source.path, version)

    async def sleep(self, level: int) -> None:
        """See `BaseCore.sleep`; level 2 also releases the CUDA graphs.

        Raises:
            EngineError: SGLang was started without its memory saver.
        """
        if self._options.no_sleep:
            raise EngineError(self._options.no_sleep)
        tags = frozenset(TAGS_OF_LEVEL[level]) - self._asleep
        if level > 1:
            tags |= {CUDA_GRAPH} - self._asleep
        self._asleep |= tags
        if tags:
            await self._serving().release(tuple(sorted(tags)))

    async def wake_up(self, tags: tuple[str, ...]) -> None:
        """See `BaseCore.wake_up`."""
        are_weights_back = "weights" in await self._take_back(tags)
        if are_weights_back:
            await self._load(self._weights_path, self.info.weight_version)

    async def flush_cache(self) -> None:
        """Forget all prefixes, once no request runs."""
        await self._serving().flush_cache()

    async def _take_back(self, tags: Iterable[str]) -> frozenset[str]:
        """What of it was released; the weights are garbage then.

        The CUDA graphs come back with the KV cache: neither is needed before requests run.
        """
        wanted = {*tags, CUDA_GRAPH} if "kv_cache" in tags else set(tags)
        released = self._asleep & wanted
        if released:
            await self._serving().resume(tuple(sorted(released)))
        self._asleep -= released
        return released

    async def _load(self, path: str, version: int) -> None:
        sglang = self._serving()
        for entry in self._open.values():
            entry.is_buffering = True
        # A request that comes meanwhile is computed with either: no other request shares its
        # prefix.
        self._is_loading = True
        self._updates += 1
        try:
            await sglang.load_from_disk(path, version)
        finally:
            self._updates += 1
            self._is_loading = False
        self._weights_path = path
        self._info = msgspec.structs.replace(self.info, weight_version=version)

    def _serving(self) -> SGLang:
        if self._sglang is None or self._failure:
            raise EngineError(self._failure)
        return self._sglang

    def drain_nowait(self) -> None:
        """Take on nothing new; when all that is open has ended, `watch` calls the engine lost."""
        self._is_draining = True

    async def watch(self) -> str:
        """See `BaseCore.watch`.

        Looks at SGLang's processes, asks its schedulers for signs of life, and sends aborts again
        that have no answer.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch_processes)
            if not self._options.is_follower:
                tasks.start_soon(self._ask_schedulers)
            await self._lost.wait()
            tasks.cancel_scope.cancel()
        return self._failure

    async def aclose(self) -> None:
        """End every request and SGLang's processes; takes at most `CORE_CLOSE_S`."""
        self._close()
        if self._server_thread is not None:
            self._server_thread.stop()
            with cleanup_scope(CORE_CLOSE_S):
                await wait_future(self._server_thread.stopped)

    def _find_fault(self, request: GenerationRequest) -> str:
        return find_sampling_fault(request.sampling)

    def _find_obstacle(self) -> str:
        return "the engine is being drained" if self._is_draining else super()._find_obstacle()

    async def _build_fields(
        self, request: GenerationRequest, entry: AnswerReader
    ) -> dict[str, Any] | None:
        """The request as SGLang takes it; None where it has been given up."""
        assert self._sglang is not None
        try:
            seen = await self._sglang.media_fields(request)
        except RolloutError as error:
            entry.give_up("error", f"media of the prompt: {error}")
            return None
        if seen and (entry.aborted_at is not None or self._failure):
            entry.give_up("abort", self._failure)
            return None
        fields = build_fields(request, self._options, self.info, make_salt(self._updates))
        return fields | seen

    async def _next_chunks(
        self, answers: AsyncGenerator[Mapping[str, Any], None], entry: AnswerReader
    ) -> Sequence[Chunk]:
        """What SGLang's next answer adds; once there is no next one, the end of the request."""
        try:
            with entry.waiting():
                answer = await anext(answers)
                self._preemptions += answer["meta_info"].get("num_retractions") or 0
                chunks = entry.read(answer)
                self._sampled += sum(len(chunk.ids) for chunk in chunks) // 4
                return chunks
        except Exception as error:
            if self._sglang is not None:  # nobody reads its answers any more
                self._sglang.abort(entry.request_id)
            entry.give_up("error", f"SGLang failed: {type(error).__name__}: {error}")
        return [entry.last_chunk()]

    async def _watch_processes(self) -> None:
        assert self._sglang is not None
        frozen_since: float | None = None
        while True:
            await anyio.sleep(WATCH_S)
            death = self._sglang.death()
            if death is not None:
                self._lose(death)
            elif self._is_draining and not self._open:
                self._lose("the engine has been drained")
            now = anyio.current_time()
            frozen_since = (frozen_since or now) if self._sglang.is_frozen() else None
            if frozen_since is not None and now - frozen_since > FROZEN_S:
                self._lose(f"SGLang's process has been stopped for {FROZEN_S:g} s")
            for request_id, entry in self._open.items():
                if entry.aborted_at is not None:
                    self._sglang.abort(request_id)

    async def _ask_schedulers(self) -> None:
        assert self._sglang is not None
        heard = self._sglang.last_heard()
        while True:
            await anyio.sleep(ASK_S)
            if self._sglang.last_heard() == heard:
                with anyio.move_on_after(SILENCE_S) as patience:
                    await self._sglang.ask_schedulers()
                if patience.cancelled_caught:
                    self._lose(f"SGLang's scheduler has not answered for {SILENCE_S:g} s")
            heard = self._sglang.last_heard()
