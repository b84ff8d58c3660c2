"""The one module that knows SGLang's API.

Written for versions 0.5.17 to 0.5.23. Importing SGLang and starting it block for many seconds:
`SGLang` is made in a `ServerThread`, and everything else of it is called on the event loop.
"""

from __future__ import annotations

import atexit
import inspect
import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from rollout.bridge import settle
from rollout.engine.core import ALL_TAGS, TAGS_OF_LEVEL, Capabilities, EngineBroken, EngineInfo
from rollout.engine.cores.base import name_gpu
from rollout.engine.cores.sglang import plugin
from rollout.engine.cores.sglang.media_inputs import open_media_inputs
from rollout.engine.cores.sglang.server_arguments import SGLangOptions, engine_arguments
from rollout.engine.model_files import model_fingerprint, resolve_model
from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

    from rollout.engine.core import GenerationRequest

#: Poll interval while the schedulers are not idle.
IDLE_S = 0.02


class SGLang:
    """A running `sglang.Engine` and its processes.

    Attributes:
        info: The facts about it.
        model_path: Where its files are.
        names_versions: Final answers name the weights that sampled each token: from 0.5.20 on.

    Raises:
        EngineError: SGLang is not installed, lacks what was asked for, or did not start.
    """

    def __init__(self, options: SGLangOptions) -> None:
        if options.has_memory_saver:  # it captures graphs where they cannot be released, else
            os.environ.setdefault("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
        if options.is_cpu:
            os.environ[plugin.CPU_VARIABLE] = "1"
            os.environ["OMP_NUM_THREADS"] = str(options.threads)
            # Without it SGLang wants a NUMA node for each rank; it binds nothing on plain torch.
            cores = "|".join(map(str, range(options.tensor_parallel)))
            os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", cores)
            plugin.platform()  # before anything imports torchvision
        model_path = resolve_model(options.model, options.revision)
        try:
            import sglang
            from sglang.srt.managers import io_struct
            from sglang.srt.server_args import ServerArgs
        except ImportError as error:
            raise EngineError(
                f"engine.kind = 'sglang': SGLang cannot be imported by {sys.executable}, which "
                f"runs the engine ({error}); install it there, or set placement.python to the "
                "interpreter of the environment that has it"
            ) from error
        if options.is_follower:  # its constructor would not return before SGLang ends
            os.environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] = "0"
        known = inspect.signature(ServerArgs).parameters
        arguments = engine_arguments(options, model_path, known)
        before = set(multiprocessing.active_children())
        try:
            self._engine: Any = sglang.Engine(**arguments)
        except (Exception, SystemExit) as error:
            raise EngineError(f"SGLang did not start: {type(error).__name__}: {error}") from error
        atexit.unregister(self._engine.shutdown)
        self._tokens: Any = self._engine.tokenizer_manager
        if self._tokens._subprocess_watchdog is not None:  # it would end us with a scheduler
            self._tokens._subprocess_watchdog.stop()
        self._processes = [p for p in multiprocessing.active_children() if p not in before]
        if options.is_follower:  # there is nothing to ask: all requests come through rank 0
            return
        self._types: Any = io_struct
        self.names_versions = hasattr(io_struct, "WeightVersionSpans")
        self.media, kinds, no_media = open_media_inputs(
            self._tokens.model_config.hf_config.model_type,
            model_path,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
        )
        self.info = self._describe(options, model_path, kinds, no_media)
        self.model_path = model_path

    def adopt_loop(self, on_terminate: Callable[[], object]) -> None:
        """Make the running event loop SGLang's, and take its signal handlers back.

        SGLang ends the whole process on SIGQUIT, which a failing scheduler sends; that scheduler
        also ends, and `death` says so. On SIGTERM `on_terminate` is called instead of SGLang's
        own drain. Handlers exist in the main thread only.
        """
        self._tokens.auto_create_handle_loop()
        if threading.current_thread() is threading.main_thread():
            loop = self._tokens.event_loop
            loop.add_signal_handler(signal.SIGQUIT, lambda: None)
            loop.add_signal_handler(signal.SIGTERM, on_terminate)

    def generate(self, **fields: Any) -> AsyncGenerator[Mapping[str, Any], None]:
        """The answers to one request, for an `AnswerReader`; `fields` are `GenerateReqInput`'s."""
        request = self._types.GenerateReqInput(stream=True, **fields)
        answers: AsyncGenerator[Mapping[str, Any], None] = self._tokens.generate_request(request)
        return answers

    async def media_fields(self, request: GenerationRequest) -> dict[str, Any]:
        """What carries the media of a request, beside its other fields."""
        if not request.media or self.media is None:  # no kind of media is taken without it
            return {}
        return await anyio.to_thread.run_sync(self.media.fields, request)

    def is_dispatched(self, request_id: str) -> bool:
        """Whether the scheduler may know the request: an abort that overtakes it is lost."""
        state = self._tokens.rid_to_state.get(request_id)
        return state is None or bool(state.dispatched)

    def abort(self, request_id: str) -> None:
        """Have the scheduler end a request; called again, it is sent again.

        SGLang itself sends one abort for a request and swallows all others.
        """
        state = self._tokens.rid_to_state.get(request_id)
        if hasattr(state, "abort_sent"):
            state.abort_sent = False
        self._tokens.abort_request(rid=request_id)

    def load(self) -> tuple[int, int, float]:
        """Requests that run, those that wait, and the share of the KV cache in use.

        Read from shared memory, where a scheduler writes at its steps and when it goes idle; those
        of several schedulers (data parallel) are added up.
        """
        loads = [load for load in self._tokens.load_snapshot_reader.read_all() if load is not None]
        capacity = sum(load.max_total_num_tokens for load in loads)
        return (
            sum(load.num_running_reqs for load in loads),
            sum(load.num_waiting_reqs for load in loads),
            sum(load.num_used_tokens for load in loads) / capacity if capacity else 0.0,
        )

    def last_heard(self) -> float:
        """A number that changes with every message from a scheduler."""
        return float(self._tokens.last_receive_tstamp)

    async def ask_schedulers(self) -> None:
        """Return when every scheduler has answered; they answer between their steps."""
        await self._tokens.get_internal_state()

    async def load_from_disk(self, path: str, version: int) -> None:
        """Load the safetensors of a directory; requests pause meanwhile and then continue."""
        async with self._paused():
            request = self._types.UpdateWeightFromDiskReqInput(
                model_path=path,
                weight_version=str(version),
                flush_cache=False,  # what the old weights computed is salted, and may be in use
            )
            try:
                is_done, message, *_ = await self._tokens.update_weights_from_disk(request)
            except Exception as error:
                is_done, message = False, f"{type(error).__name__}: {error}"
        if not is_done:
            raise EngineBroken(f"SGLang did not load {path}: {message}")

    async def flush_cache(self) -> None:
        """Forget all prefixes; returns once no request runs and it is done."""
        while True:
            answer = await self._tokens.flush_cache()
            if answer.success:
                return
            await anyio.sleep(IDLE_S)

    async def release(self, tags: tuple[str, ...]) -> None:
        """Release memory; returns when no request runs and it is released."""
        await self.flush_cache()  # SGLang dies of a release while requests run
        request = self._types.ReleaseMemoryOccupationReqInput(tags=list(tags))
        await self._tokens.release_memory_occupation(request)

    async def resume(self, tags: tuple[str, ...]) -> None:
        """Take memory back; weights that were released are garbage until others are loaded."""
        request = self._types.ResumeMemoryOccupationReqInput(tags=list(tags))
        await self._tokens.resume_memory_occupation(request)

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Requests stand where they are, with what was computed of them."""
        await self._tokens.pause_generation(self._types.PauseGenerationReqInput(mode="in_place"))
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._tokens.continue_generation(self._types.ContinueGenerationReqInput())

    def death(self) -> str | None:
        """Which of SGLang's processes has ended, and how; None while all live."""
        for process in self._processes:
            code = process.exitcode
            if code is not None:
                return f"SGLang's process {process.pid} ended with exit code {code}"
        return None

    def is_frozen(self) -> bool:
        """Whether one of SGLang's processes has been stopped by a signal or a debugger."""
        import psutil  # which SGLang needs itself

        try:
            states = [psutil.Process(process.pid).status() for process in self._processes]
        except psutil.Error:
            return False
        return any(state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) for state in states)

    def shutdown(self) -> None:
        """Kill SGLang's processes and wait until they are gone, which frees the GPU."""
        self._engine.shutdown()
        for process in self._processes:
            process.join()

    def _describe(
        self, options: SGLangOptions, model_path: str, kinds: tuple[str, ...], no_media: str
    ) -> EngineInfo:
        model = self._tokens.model_config
        experts = _read_expert_shape(model.hf_text_config) if options.routed_experts else None
        return EngineInfo(
            vocab_size=model.vocab_size,
            eos_ids=tuple(sorted(model.hf_eos_token_id or ())),
            context_length=self._tokens.max_req_input_len,
            fingerprint=model_fingerprint(model_path, options.revision),
            max_requests=options.max_running + options.max_queued,
            max_running=options.max_running,
            weight_version=options.weight_version,
            core="sglang",
            device=options.torch_device,
            gpu=name_gpu(options.torch_device),
            capabilities=Capabilities(
                weights=("disk", "tensors", "groups"),
                in_place=self.names_versions,
                sleep_levels=() if options.no_sleep else tuple(TAGS_OF_LEVEL),
                sleep_tags=() if options.no_sleep else ALL_TAGS,
                no_sleep=options.no_sleep,
                modalities=kinds,
                no_media=no_media,
                expert_shape=experts,
                max_top_log_probs=model.vocab_size,
            ),
        )


def _read_expert_shape(config: Any) -> tuple[int, int]:
    """What SGLang tells of each token: top_k experts of every layer, those without included."""
    top_k = getattr(config, "num_experts_per_tok", None)
    if not top_k:
        raise EngineError(
            "engine.routed_experts = true: expected a model with a mixture of experts; its "
            "configuration has no num_experts_per_tok"
        )
    return config.num_hidden_layers, top_k


class ServerThread:
    """The thread that starts SGLang, waits for the end, and shuts it down.

    The kernel kills SGLang's processes when the thread that started them ends, so this one lives
    as long as the engine.

    Attributes:
        started: What runs, or why nothing does.
        stopped: Done when nothing of it runs any more.
    """

    def __init__(self, options: SGLangOptions) -> None:
        self.started: Future[SGLang] = Future()
        self.stopped: Future[None] = Future()
        self._options = options
        self._leave = threading.Event()
        threading.Thread(target=self._run, name="rollout-sglang", daemon=True).start()

    def stop(self) -> None:
        """Shut SGLang down; one that is still starting is killed as far as it has come."""
        self._leave.set()
        if not self.started.done():
            _kill_children()

    def _run(self) -> None:
        try:
            settle(self.started, SGLang, self._options)
            if self.started.exception() is None:
                self._leave.wait()
                self.started.result().shutdown()
            elif self._leave.is_set():
                _kill_children()  # it may have begun another before it noticed
        finally:
            self.stopped.set_result(None)


def _kill_children() -> None:
    """Kill what a start that was given up has begun: it then fails instead of continuing."""
    children = multiprocessing.active_children()
    for process in children:
        process.kill()
    for process in children:
        process.join()
