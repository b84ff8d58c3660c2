"""A server started elsewhere, as the engine's server sees it."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, aclosing, suppress
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.engine.core import Chunk, EngineInfo, EngineLoad, GenerationRequest
from rollout.engine.cores.http.client import HttpClient, HttpError, open_client
from rollout.engine.cores.http.model_facts import ModelFacts, read_model_facts
from rollout.engine.cores.http.sglang_api import SGLangApi
from rollout.engine.cores.http.vllm_api import VllmApi
from rollout.engine.cores.open_request import OpenRequest
from rollout.engine.cores.pacing import DecodeSpeed
from rollout.engine.cores.request_checks import request_fault
from rollout.errors import EngineError, MediaError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

logger = logging.getLogger("rollout.engine")

#: Between two looks at a server that does not answer yet.
RETRY_S = 0.5
#: Between two looks at one that serves, and before an abort without an answer is sent again.
WATCH_S = 1.0
#: A server that refuses connections, or breaks them, for this long is lost.
REFUSED_S = 5.0
#: One that is silent, or answers with errors of its own (5xx), is lost after this only: it may be
#: in a long step, or paused for its trainer's weights. SGLang's own watchdog gives a step as long.
SILENCE_S = 300.0
#: Connections beside those of generations: for looks at the server and for aborts.
CONTROL_CONNECTIONS = 4
#: An abort that is not confirmed by then ends with the connection.
ABORT_S = 5.0
APIS: dict[str, type[SGLangApi | VllmApi]] = {"sglang": SGLangApi, "vllm": VllmApi}


class HttpCore:
    """An `EngineCore` over a server's HTTP API; runs on trio and on asyncio.

    Tokens travel as JSON here, at some ten times the cost of the channel: for a few hundred
    requests at once, not for thousands. Weights are changed on the server, not here.

    Args:
        url: Base URL of the server.
        api: "sglang" for its /generate, "vllm" for its /v1/completions.
        api_key_variable: Environment variable that holds the server's API key; None sends none.
        max_requests: Requests that the server gets at once.
        model: What the server serves, for its vocabulary and end tokens: a local directory, a hub
            name or ``embedded:smollm2-135m-instruct``.
        revision: Of a hub name.
        trust_remote_code: Lets code from the model's repository run.
        stream_interval: Tokens of an event at most, where the server lets us say so.
        stream_interval_s: How long a sampled token waits for others at most; an event's number of
            tokens follows from how fast tokens came so far.

    Attributes:
        is_gathering: See `EngineCore`.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        api: str = "sglang",
        api_key_variable: str | None = None,
        max_requests: int = 1024,
        revision: str | None = None,
        trust_remote_code: bool = False,
        stream_interval: int = 16,
        stream_interval_s: float = 0.25,
    ) -> None:
        self._url = url.rstrip("/")
        self._speed = DecodeSpeed(stream_interval_s, stream_interval)
        self._model = (model, revision, trust_remote_code)
        self._api = APIS[api]()
        self._api_name = api
        self.is_gathering = self._api.is_gathering
        self._api_key_variable = api_key_variable
        self._max_requests = max_requests
        self._stack = AsyncExitStack()
        self._client: HttpClient | None = None
        self._control: HttpClient | None = None
        self._info: EngineInfo | None = None
        self._open: dict[str, OpenRequest] = {}
        self._aborted_at: dict[str, float] = {}
        self._wake = anyio.Event()
        self._lost = anyio.Event()
        self._heard_at = 0.0
        self._failure = "the engine has not been started"
        self._sampled = 0

    @property
    def info(self) -> EngineInfo:
        """The facts about the engine; valid once `start` has returned."""
        if self._info is None:
            raise RuntimeError("HttpCore.info: start the engine first")
        return self._info

    async def start(self) -> None:
        """Wait until the server answers, however long; the caller bounds the wait.

        Raises:
            EngineError: The server refuses us, the model cannot be read, or httpx is missing.
        """
        facts = await anyio.to_thread.run_sync(read_model_facts, *self._model)
        self._client = await self._open_client(self._max_requests)
        try:
            # Of its own: generations may take all connections that they have.
            self._control = await self._open_client(CONTROL_CONNECTIONS)
            self._info = await self._describe(self._control, facts)
        except BaseException:
            with anyio.CancelScope(shield=True):  # closing connections waits for no peer
                await self._stack.aclose()
            raise
        self._failure = ""

    async def _open_client(self, connections: int) -> HttpClient:
        opened = open_client(self._url, self._api_key_variable, connections)
        return await self._stack.enter_async_context(opened)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Chunks of one request; see `EngineCore.generate`.

        Closing the iterator early closes the connection, which the server takes for an abort.
        """
        refusal = self._refusal(request)
        if refusal is not None:
            yield refusal
            return
        assert self._client is not None
        room = self.info.context_length - len(request.prompt_ids) // 4
        body = self._api.body(request, room, self.info.weight_version, self._speed.chunk_tokens)
        request_id = request.request_id
        entry = self._open[request_id] = OpenRequest(self._api.reader(request))
        try:
            if request.media and not await self._add_media(request, entry, body):
                yield entry.last_chunk()
                return
            async with aclosing(self._client.events(self._api.path, body)) as events:
                came_at = 0.0
                while not entry.is_over:
                    before = entry.reader.tokens
                    chunks = await self._next_chunks(events, entry)
                    now, new = anyio.current_time(), entry.reader.tokens - before
                    if new:
                        self._heard_at = now
                    if before:  # the first ones were prefilled for
                        self._speed.note(new, now - came_at)
                    came_at = now
                    self._sampled += new
                    for chunk in chunks:
                        yield chunk
        finally:
            del self._open[request_id]
            self._aborted_at.pop(request_id, None)

    def abort_nowait(self, request_id: str) -> None:
        """Ask for the end of a request; its iterator then ends with "abort" and its tokens."""
        entry = self._open.get(request_id)
        if entry is None or entry.is_aborted:
            return
        entry.is_aborted = True
        if self._api.has_abort:
            self._aborted_at[request_id] = anyio.current_time()
            self._wake.set()
        else:
            entry.give_up("abort")

    def load(self) -> EngineLoad:
        """What this core has under way; other clients of the server are not seen."""
        return EngineLoad(running=len(self._open), generated_tokens=self._sampled)

    async def watch(self) -> str:
        """Why the server is lost, once it is; open requests have then been ended with that.

        Looks whether the server answers, and sends aborts until they are confirmed.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_aborting)  # a look may wait for long
            tasks.start_soon(self._look_until_silent)
            await self._lost.wait()
            tasks.cancel_scope.cancel()
        return self._failure

    async def aclose(self) -> None:
        """End every request and close the connections."""
        for entry in self._open.values():
            entry.give_up("abort")
        self._failure = "the engine is closed"
        await self._stack.aclose()

    async def _describe(self, client: HttpClient, model: ModelFacts) -> EngineInfo:
        length, version = await self._until_it_answers(client)
        lengths = [known for known in (length, model.context_length) if known]
        if not lengths:
            raise EngineError(f"{self._url}: neither the server nor the model names a context")
        modalities, no_media = self._api.modalities(model.family)
        return EngineInfo(
            vocab_size=model.vocab_size,
            eos_ids=model.eos_ids,
            context_length=min(lengths),
            fingerprint=model.fingerprint,
            max_requests=self._max_requests,
            weight_version=version,
            core=f"http: {self._api_name}",
            no_sleep="servers that somebody else runs keep their memory",
            max_top_log_probs=0,
            modalities=modalities,
            no_media=no_media,
        )

    async def _until_it_answers(self, client: HttpClient) -> tuple[int | None, int]:
        said = ""
        while True:
            try:
                return await self._api.describe(client)
            except HttpError as error:
                if error.status and error.status < 500:
                    raise EngineError(str(error)) from error
                if str(error) != said:
                    said = str(error)
                    logger.warning("waiting for the server: %s", said)
            await anyio.sleep(RETRY_S)

    def _refusal(self, request: GenerationRequest) -> Chunk | None:
        """The answer to a request that is not taken on; None where it is."""
        if self._lost.is_set():  # another server, or this one once it is back, will serve it
            return Chunk(
                request_id=request.request_id, finish_reason="rejected", error=self._failure
            )
        fault = self._failure or request_fault(request, self.info)
        fault = fault or self._api.fault(request.sampling)
        if not fault and request.request_id in self._open:
            fault = f"request id {request.request_id!r} is in use"
        if fault:
            return Chunk(request_id=request.request_id, finish_reason="error", error=fault)
        if len(self._open) < self._max_requests:
            return None
        full = f"{len(self._open)} requests are under way, limit {self._max_requests}"
        return Chunk(request_id=request.request_id, finish_reason="rejected", error=full)

    async def _add_media(
        self, request: GenerationRequest, entry: OpenRequest, body: dict[str, Any]
    ) -> bool:
        """Put the media of a request into its body; False where it has been given up."""
        try:
            body |= await anyio.to_thread.run_sync(self._api.media_fields, request)
        except MediaError as error:
            entry.give_up("error", f"media of the prompt: {error}")
            return False
        if entry.is_aborted or self._failure:
            entry.give_up("abort", self._failure)
            return False
        return True

    async def _next_chunks(
        self, events: AsyncGenerator[Mapping[str, Any], None], entry: OpenRequest
    ) -> Sequence[Chunk]:
        """What the next event adds; once there is no next one, the end of the request."""
        try:
            with entry.waiting():
                chunks = entry.read(await anext(events))
                if entry.is_over and chunks[-1].finish_reason == "error":
                    text = f"{self._url}{self._api.path}: {chunks[-1].error}"
                    return [*chunks[:-1], msgspec.structs.replace(chunks[-1], error=text)]
                return chunks
        except StopAsyncIteration:
            text = f"{self._url}{self._api.path}: the answer ended without a finish reason"
            await self._lose_if_refused(text)
            entry.give_up("error", text)
        except EngineError as error:  # what the answer lacks, or what the server says of it
            entry.give_up("error", f"{self._url}{self._api.path}: {error}")
        except HttpError as error:
            if not (error.status or error.is_silence):
                await self._lose_if_refused(str(error))
            is_unsent = error.status == 503 or error.is_silence
            is_full = is_unsent and not entry.reader.tokens
            entry.give_up("rejected" if is_full else "error", str(error))
        return [entry.last_chunk()]

    async def _lose_if_refused(self, reason: str) -> None:
        """A request's connection broke: where the server takes none any more, it is lost."""
        assert self._control is not None
        try:
            await self._control.call("GET", self._api.liveness_path)
        except HttpError as error:
            if not (error.status or error.is_silence):
                self._lose(reason)

    async def _look_until_silent(self) -> None:
        assert self._control is not None
        self._heard_at = anyio.current_time()
        refused_since: float | None = None
        while True:
            await anyio.sleep(WATCH_S)
            reason = ""
            try:
                await self._control.call("GET", self._api.liveness_path)
            except HttpError as error:
                reason = str(error)
                is_there = 0 < error.status < 500  # whatever it says
                is_refused = not (error.status or error.is_silence)
            else:
                is_there, is_refused = True, False
            now = anyio.current_time()
            if is_there:
                self._heard_at = now
            refused_since = (refused_since or now) if is_refused else None
            is_gone = refused_since is not None and now - refused_since >= REFUSED_S
            if is_gone or now - self._heard_at > SILENCE_S:
                self._lose(reason)

    async def _keep_aborting(self) -> None:
        while True:
            with anyio.move_on_after(WATCH_S):
                await self._wake.wait()
            self._wake = anyio.Event()
            with suppress(HttpError):  # the next look notices it too
                await self._send_aborts()

    async def _send_aborts(self) -> None:
        assert self._control is not None
        now = anyio.current_time()
        for request_id, asked_at in self._aborted_at.items():
            if now - asked_at > ABORT_S:
                self._open[request_id].give_up("abort")
        for request_id in list(self._aborted_at):
            if request_id in self._open:
                await self._api.abort(self._control, request_id)

    def _lose(self, reason: str) -> None:
        """No answer comes after this: tell the requests that wait for one."""
        if self._lost.is_set():
            return
        self._failure = reason
        for entry in self._open.values():
            entry.give_up("error", reason, is_fatal=True)
        self._lost.set()
