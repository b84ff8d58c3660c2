"""A server started elsewhere, as the engine's server sees it."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, aclosing, suppress
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.engine.core import Capabilities, Chunk, EngineInfo, EngineLoad, GenerationRequest
from rollout.engine.cores.base import BaseCore, OpenRequest
from rollout.engine.cores.http.client import HttpClient, HttpError, open_client
from rollout.engine.cores.http.model_facts import ModelFacts, read_model_facts
from rollout.engine.cores.http.sglang_api import SGLangApi, SGLangReader
from rollout.engine.cores.http.vllm_api import VllmApi, VllmReader
from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

logger = logging.getLogger("rollout.engine")

#: Poll interval while a server does not answer yet.
RETRY_S = 0.5
#: Poll interval of one that serves; an abort without an answer is sent again as often.
WATCH_S = 1.0
#: A server that refuses connections, or breaks them, for this long is lost.
REFUSED_S = 5.0
#: One that is silent, or answers with errors of its own (5xx), is lost after this only: it may be
#: in a long step, or paused for its trainer's weights. SGLang's own watchdog gives a step as long.
SILENCE_S = 300.0
#: Connections beside those of generations: for polls and aborts.
CONTROL_CONNECTIONS = 4
#: An abort that is not confirmed by then ends with the connection.
ABORT_S = 5.0
APIS: dict[str, type[SGLangApi | VllmApi]] = {"sglang": SGLangApi, "vllm": VllmApi}


class _Request(OpenRequest):
    """A request under way.

    Attributes:
        reader: Reads its answers.
        aborted_at: When its abort was first to be sent; None before.
    """

    __slots__ = ("aborted_at", "reader")

    def __init__(self, reader: SGLangReader | VllmReader) -> None:
        super().__init__(reader.request_id)
        self.reader = reader
        self.aborted_at: float | None = None


class HttpCore(BaseCore[_Request]):
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
        stream_interval: Tokens of an event, where the server lets us say so.
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
    ) -> None:
        super().__init__()
        self._url = url.rstrip("/")
        self._stream_interval = stream_interval
        self._model = (model, revision, trust_remote_code)
        self._api = APIS[api]()
        self._api_name = api
        self.is_gathering = self._api.is_gathering
        self._api_key_variable = api_key_variable
        self._max_requests = max_requests
        self._stack = AsyncExitStack()
        self._client: HttpClient | None = None
        self._control: HttpClient | None = None
        self._abort_due = anyio.Event()
        self._heard_at = 0.0
        self._sampled = 0

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
        refusal = self._refuse(request)
        if refusal is not None:
            yield refusal
            return
        assert self._client is not None
        room = self.info.context_length - len(request.prompt_ids) // 4
        body = self._api.body(request, room, self.info.weight_version, self._stream_interval)
        entry = self._open[request.request_id] = _Request(self._api.reader(request))
        try:
            async with aclosing(self._client.events(self._api.path, body)) as events:
                while not entry.is_over:
                    for chunk in await self._next_chunks(events, entry):
                        yield chunk
        finally:
            del self._open[request.request_id]

    def abort_nowait(self, request_id: str) -> None:
        """Ask for the end of a request; its iterator then ends with "abort" and its tokens."""
        entry = self._open.get(request_id)
        if entry is None or entry.is_aborted:
            return
        entry.is_aborted = True
        if self._api.has_abort:
            entry.aborted_at = anyio.current_time()
            self._abort_due.set()
        else:
            entry.give_up("abort")

    def load(self) -> EngineLoad:
        """What this core has under way; other clients of the server are not seen."""
        return EngineLoad(running=len(self._open), generated_tokens=self._sampled)

    async def watch(self) -> str:
        """See `BaseCore.watch`.

        Looks whether the server answers, and sends aborts until they are confirmed.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_aborting)  # a poll may wait for long
            tasks.start_soon(self._poll_until_silent)
            await self._lost.wait()
            tasks.cancel_scope.cancel()
        return self._failure

    async def aclose(self) -> None:
        """End every request and close the connections."""
        self._close()
        await self._stack.aclose()

    async def _describe(self, client: HttpClient, model: ModelFacts) -> EngineInfo:
        length, version = await self._until_it_answers(client)
        lengths = [known for known in (length, model.context_length) if known]
        if not lengths:
            raise EngineError(f"{self._url}: neither the server nor the model names a context")
        return EngineInfo(
            vocab_size=model.vocab_size,
            eos_ids=model.eos_ids,
            context_length=min(lengths),
            fingerprint=model.fingerprint,
            max_requests=self._max_requests,
            weight_version=version,
            core=f"http: {self._api_name}",
            capabilities=Capabilities(
                no_sleep="servers that somebody else runs keep their memory",
                no_media="images and token ids together are for engine.kind = 'sglang'",
                max_top_log_probs=0,
            ),
        )

    async def _until_it_answers(self, client: HttpClient) -> tuple[int | None, int]:
        shown = ""
        while True:
            try:
                return await self._api.describe(client)
            except HttpError as error:
                if error.status and error.status < 500:
                    raise EngineError(str(error)) from error
                if str(error) != shown:
                    shown = str(error)
                    logger.warning("waiting for the server: %s", shown)
            await anyio.sleep(RETRY_S)

    def _find_fault(self, request: GenerationRequest) -> str:
        return self._api.find_fault(request.sampling)

    async def _next_chunks(
        self, events: AsyncGenerator[Mapping[str, Any], None], entry: _Request
    ) -> Sequence[Chunk]:
        """What the next event adds; once there is no next one, the end of the request."""
        url = f"{self._url}{self._api.path}"
        try:
            with entry.waiting():
                chunks = entry.reader.read(await anext(events))
                self._heard_at = anyio.current_time()
                if chunks and chunks[-1].finish_reason == "error":
                    text = f"{url}: {chunks[-1].error}"
                    chunks[-1] = msgspec.structs.replace(chunks[-1], error=text)
                for chunk in chunks:
                    entry.note(chunk)
                self._sampled += sum(len(chunk.ids) for chunk in chunks) // 4
                return chunks
        except StopAsyncIteration:
            text = f"{url}: the answer ended without a finish reason"
            await self._lose_if_refused(text)
            entry.give_up("error", text)
        except EngineError as error:  # what the answer lacks, or what the server says of it
            entry.give_up("error", f"{url}: {error}")
        except HttpError as error:
            if not (error.status or error.is_silence):
                await self._lose_if_refused(str(error))
            is_unsent = error.status == 503 or error.is_silence
            is_full = is_unsent and not entry.tokens
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

    async def _poll_until_silent(self) -> None:
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
                await self._abort_due.wait()
            self._abort_due = anyio.Event()
            with suppress(HttpError):  # the next poll notices it too
                await self._send_aborts()

    async def _send_aborts(self) -> None:
        assert self._control is not None
        aborted = [each for each in self._open.values() if each.aborted_at is not None]
        for entry in aborted:
            if anyio.current_time() - (entry.aborted_at or 0.0) > ABORT_S:
                entry.give_up("abort")
        for entry in aborted:
            if entry.request_id in self._open:
                await self._api.abort(self._control, entry.request_id)
