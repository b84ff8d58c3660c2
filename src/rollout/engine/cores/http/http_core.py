"""A server started elsewhere, as the engine's server sees it."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, aclosing, suppress
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.engine.core import BROKEN, Capabilities, EngineInfo, EngineLoad
from rollout.engine.cores.base import BaseCore
from rollout.engine.cores.http.client import HttpClient, HttpError, open_client
from rollout.engine.cores.http.sglang_api import SGLangApi, SGLangReader
from rollout.engine.cores.http.vllm_api import VllmApi, VllmReader
from rollout.engine.model_files import end_ids, model_fingerprint, read_model_config, resolve_model
from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

    from rollout.engine.core import Chunk, GenerationRequest

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
#: Statuses of a server, or of a proxy before it, that takes no request now.
PASSING = (429, 502, 503, 504)
#: Connections beside those of generations: for polls and aborts.
CONTROL_CONNECTIONS = 4
#: An abort that is not confirmed by then ends with the connection.
ABORT_S = 5.0
APIS: dict[str, type[SGLangApi | VllmApi]] = {"sglang": SGLangApi, "vllm": VllmApi}
_Reader = SGLangReader | VllmReader


class HttpCore(BaseCore[_Reader]):
    """An `EngineCore` over a server's HTTP API; runs on trio and on asyncio.

    Tokens travel as JSON here, at some ten times the cost of the channel: for a few hundred
    requests at once, not for thousands. Weights are changed on the server, not here.

    Args are fields of `rollout.config.HttpEngine` and `ModelConfig`; `url` is one of its `urls`.
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
        self._client: HttpClient
        self._control: HttpClient
        self._abort_due = anyio.Event()
        self._heard_at = 0.0
        self._sampled = 0
        self._refusals: set[int] = set()  # statuses of those that were logged

    async def start(self) -> None:
        """Wait until the server answers, however long; the caller bounds the wait.

        Raises:
            EngineError: The server refuses us, the model cannot be read, or httpx is missing.
        """
        described = await anyio.to_thread.run_sync(_describe_model, *self._model)
        try:
            self._client = await self._open_client(self._max_requests)
            # Of its own: generations may take all connections that they have.
            self._control = await self._open_client(CONTROL_CONNECTIONS)
            length, version = await self._wait_for_server()
            lengths = [known for known in (length, described.context_length) if known]
            if not lengths:
                raise EngineError(f"{self._url}: neither the server nor the model names a context")
        except BaseException:
            with anyio.CancelScope(shield=True):  # closing connections waits for no peer
                await self._stack.aclose()
            raise
        self._info = msgspec.structs.replace(
            described,
            context_length=min(lengths),
            max_requests=self._max_requests,
            weight_version=version,
            core=f"http: {self._api_name}",
        )
        self._failure = ""

    async def _open_client(self, connections: int) -> HttpClient:
        opened = open_client(self._url, self._api_key_variable, connections)
        return await self._stack.enter_async_context(opened)

    async def _wait_for_server(self) -> tuple[int | None, int]:
        """The context length and the weight version that the server names, once it answers."""
        shown = ""
        while True:
            try:
                return await self._api.describe(self._control)
            except EngineError as error:  # what the answer lacks
                raise EngineError(f"{self._url}: {error}") from error
            except HttpError as error:
                if error.status and error.status < 500:
                    raise EngineError(str(error)) from error
                if str(error) != shown:
                    shown = str(error)
                    logger.warning("waiting for the server: %s", shown)
            await anyio.sleep(RETRY_S)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Chunks of one request; see `EngineCore.generate`.

        Closing the iterator early closes the connection, which the server takes for an abort.
        """
        refusal = self._refuse(request)
        if refusal is not None:
            yield refusal
            return
        room = self.info.context_length - len(request.prompt_ids) // 4
        body = self._api.body(request, room, self.info.weight_version, self._stream_interval)
        entry = self._open[request.request_id] = self._api.reader(request)
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
        if entry is None or entry.aborted_at is not None:
            return
        entry.aborted_at = anyio.current_time()
        if self._api.abort_path:
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
            if self._api.abort_path:
                tasks.start_soon(self._keep_aborting)  # a poll may wait for long
            tasks.start_soon(self._poll_until_silent)
            await self._lost.wait()
            tasks.cancel_scope.cancel()
        return self._failure

    async def aclose(self) -> None:
        """End every request and close the connections."""
        self._close()
        await self._stack.aclose()

    def _find_fault(self, request: GenerationRequest) -> str:
        return self._api.find_fault(request.sampling)

    async def _next_chunks(
        self, events: AsyncGenerator[Mapping[str, Any], None], entry: _Reader
    ) -> Sequence[Chunk]:
        """What the next event adds; once there is no next one, the end of the request."""
        url = f"{self._url}{self._api.path}"
        try:
            with entry.waiting():
                chunks = entry.read(await anext(events))
                self._heard_at = anyio.current_time()
                if chunks and chunks[-1].finish_reason == "error":
                    text = f"{url}: {chunks[-1].error}"
                    chunks[-1] = msgspec.structs.replace(chunks[-1], error=text)
                self._sampled += sum(len(chunk.ids) for chunk in chunks) // 4
                return chunks
        except StopAsyncIteration:
            text = f"{url}: the answer ended without a finish reason"
            await self._lose_if_refused(text)
            entry.give_up("error", text)
        except EngineError as error:  # what the answer lacks, or what the server says of it
            entry.give_up("error", f"{url}: {error}")
        except HttpError as error:
            if error.is_refusal:
                await self._lose_if_refused(str(error))
            is_passing = error.is_refusal or error.is_silence or error.status in PASSING
            if is_passing and error.status not in self._refusals:  # it may be so for ever
                self._refusals.add(error.status)
                logger.warning("asked again until its limit: %s", error)
            text = f"{BROKEN if error.is_refusal else ''}{error}"
            entry.give_up("rejected" if is_passing else "error", text)
        return [entry.last_chunk()]

    async def _lose_if_refused(self, reason: str) -> None:
        """A request's connection broke: where the server takes none any more, it is lost."""
        error = await self._poll()
        if error is not None and error.is_refusal:
            self._lose(reason)

    async def _poll(self) -> HttpError | None:
        """Ask the server for a sign of life; returns what went wrong."""
        try:
            await self._control.call("GET", self._api.liveness_path)
        except HttpError as error:
            return error
        return None

    async def _poll_until_silent(self) -> None:
        self._heard_at = anyio.current_time()
        refused_since: float | None = None
        while True:
            await anyio.sleep(WATCH_S)
            error, now = await self._poll(), anyio.current_time()
            if error is None or 0 < error.status < 500:  # it is there, whatever it says
                self._heard_at = now
            is_refused = error is not None and error.is_refusal
            refused_since = (refused_since or now) if is_refused else None
            is_gone = refused_since is not None and now - refused_since >= REFUSED_S
            if is_gone or now - self._heard_at > SILENCE_S:
                self._lose(str(error))

    async def _keep_aborting(self) -> None:
        while True:
            with anyio.move_on_after(WATCH_S):
                await self._abort_due.wait()
            self._abort_due = anyio.Event()
            for entry in [each for each in self._open.values() if each.aborted_at is not None]:
                if anyio.current_time() - (entry.aborted_at or 0.0) > ABORT_S:
                    entry.give_up("abort")
                elif entry.request_id in self._open:
                    body = {"rid": entry.request_id}
                    with suppress(HttpError):  # the next poll notices it too
                        await self._control.call("POST", self._api.abort_path, body)


def _describe_model(model: str, revision: str | None, trust_remote_code: bool) -> EngineInfo:
    """What a server does not say about its model, read from the model's files; blocks.

    Of a directory with a tokenizer alone it is what that says.
    """
    path = resolve_model(model, revision, needs_weights=False)
    config = read_model_config(path, revision)
    config = {**config, **(config.get("text_config") or {})}
    eos_ids, vocab_size = end_ids(path, revision), config.get("vocab_size", 0)
    if not config:
        from rollout.chat.template_loading import load_tokenizer

        tokenizer = load_tokenizer(path, revision=revision, trust_remote_code=trust_remote_code)
        vocab_size = max(tokenizer.get_vocab().values()) + 1
        eos_ids = (tokenizer.eos_token_id,) if isinstance(tokenizer.eos_token_id, int) else ()
    return EngineInfo(
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        context_length=config.get("max_position_embeddings") or 0,
        fingerprint=model_fingerprint(path, revision),
        max_requests=0,
        capabilities=Capabilities(
            no_sleep="servers that somebody else runs keep their memory",
            no_media="images and token ids together are for engine.kind = 'sglang'",
            max_top_log_probs=0,
        ),
    )
