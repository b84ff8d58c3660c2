"""The one module that knows the HTTP library, httpx: JSON in, JSON or events out."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

#: To open a connection, and for answers that need no generation.
CONNECT_S = 10.0
#: Of an error's body, enough to find the cause.
SHOWN_CHARACTERS = 500


class HttpError(Exception):
    """A server could not be reached, or answered with an error.

    Attributes:
        status: Of the answer; 0 where there was none.
        is_silence: Nothing came in time: the server may be busy, or the network gone.
        is_refusal: The connection was refused, or broke.
    """

    def __init__(self, message: str, status: int = 0, *, is_silence: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.is_silence = is_silence
        self.is_refusal = not (status or is_silence)


class HttpClient:
    """Speaks to one server; made by `open_client`."""

    def __init__(self, httpx: Any, client: Any, url: str) -> None:
        self._httpx = httpx
        self._client = client
        self._url = url

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`."""
        content = await self.call("GET", path)
        try:
            return msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise HttpError(f"{self._url}{path}: the answer is no JSON object: {error}") from error

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Whatever answers, once it is no error; raises an `HttpError` otherwise."""
        content = None if body is None else msgspec.json.encode(body)
        try:
            answer = await self._client.request(method, path, content=content)
        except self._httpx.HTTPError as error:
            raise self._wrap_error(error) from error
        received: bytes = answer.content
        self._check(path, answer.status_code, received)
        return received

    async def events(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The server-sent events that answer `body`.

        Closing the iterator closes the connection, which a server takes for a disconnect.
        """
        # A generation may take its time; its limit is the caller's.
        timeout, content = self._httpx.Timeout(CONNECT_S, read=None), msgspec.json.encode(body)
        try:
            async with self._client.stream(
                "POST", path, content=content, timeout=timeout
            ) as answer:
                if answer.status_code != self._httpx.codes.OK:
                    self._check(path, answer.status_code, await answer.aread())
                lines = _split_lines(answer.aiter_bytes())
                try:
                    async for line in lines:
                        data = line.removeprefix("data:").strip()
                        if data and data != "[DONE]" and line.startswith("data:"):
                            yield msgspec.json.decode(data, type=dict[str, Any])
                finally:
                    # Run the nest of generators to its end: closing the outermost would leave
                    # the others to the garbage collector, which trio resents.
                    with anyio.CancelScope(shield=True):
                        await answer.aclose()
                        with suppress(self._httpx.HTTPError, self._httpx.StreamError):
                            async for _ in lines:
                                pass
        except (msgspec.MsgspecError, self._httpx.DecodingError) as error:
            raise EngineError(f"an event is no JSON object: {error}") from error
        except self._httpx.HTTPError as error:
            raise self._wrap_error(error) from error

    def _wrap_error(self, error: Exception) -> HttpError:
        is_silence = isinstance(error, self._httpx.TimeoutException)
        return HttpError(f"{self._url}: {type(error).__name__}: {error}", is_silence=is_silence)

    def _check(self, path: str, status: int, content: bytes) -> None:
        if not self._httpx.codes.is_success(status):
            shown = content.decode(errors="replace")[:SHOWN_CHARACTERS]
            raise HttpError(f"{self._url}{path} answered {status}: {shown}", status)


async def _split_lines(pieces: AsyncIterator[bytes]) -> AsyncGenerator[str, None]:
    """Lines up to each line feed.

    httpx's own end at U+2028 and its like too, which servers leave as they are in JSON.
    """
    begun: list[bytes] = []  # joined once: a line may be long, and come in small pieces
    async for piece in pieces:
        *ends, rest = piece.split(b"\n")
        for end in ends:
            yield b"".join((*begun, end)).decode(errors="replace")
            begun = []
        begun.append(rest)
    yield b"".join(begun).decode(errors="replace")


@asynccontextmanager
async def open_client(
    url: str, api_key_variable: str | None, connections: int
) -> AsyncIterator[HttpClient]:
    """A client of the server at `url`; its connections are closed at the end."""
    try:
        import httpx
    except ImportError as error:
        raise EngineError(
            "engine.kind = 'http' needs the package httpx: pip install 'rollout-rl[http]'"
        ) from error
    headers = {"Content-Type": "application/json"}
    if api_key_variable is not None:
        key = os.environ.get(api_key_variable)
        if not key:
            raise EngineError(
                f"engine.api_key_variable = {api_key_variable!r}: not set in the environment"
            )
        headers["Authorization"] = f"Bearer {key}"
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    is_tls = url.startswith("https:")  # certificates, which take 30 ms to read, are for these only
    async with httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=CONNECT_S, verify=is_tls
    ) as client:
        yield HttpClient(httpx, client, url.rstrip("/"))
