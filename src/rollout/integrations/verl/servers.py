"""Ends single requests on verl's servers, as far as these can.

Cancelling a call of ``LLMServerClient.generate`` leaves its server generating. Servers on vLLM have
a method ``abort_request``, but the client tells nobody which server has a request, and under which
name. A copy of the client with two of its methods wrapped does.
"""

from __future__ import annotations

import copy
import logging
from contextvars import ContextVar
from typing import Any

logger = logging.getLogger("rollout.integrations")


class Placed:
    """Where a request is now.

    Attributes:
        server: The handle of the server that has it; None before one does.
        request_id: Its name there.
    """

    def __init__(self) -> None:
        self.server: Any = None
        self.request_id: str | None = None

    def abort_nowait(self) -> None:
        """Have the server end it, where it can; the answer is not waited for."""
        abort = getattr(self.server, "abort_request", None)
        if abort is None or self.request_id is None:
            return
        try:
            abort.remote(self.request_id, reset_prefix_cache=False)
        except Exception as error:  # a server that is gone has ended it
            logger.debug("abort_request(%s): %r", self.request_id, error)


_placed: ContextVar[Placed | None] = ContextVar("placed", default=None)


def watched(client: Any) -> Any:
    """A client that notes, for the call under way, where its request is.

    Clients that are no ``LLMServerClient`` stay as they are.
    """
    kind: Any = type(client)
    if not (hasattr(kind, "_acquire_server") and hasattr(kind, "_vllm_request_id")):
        return client
    twin = copy.copy(client)

    async def acquire_server(request_id: str, *args: Any, **kwargs: Any) -> Any:
        server_id, handle = await kind._acquire_server(twin, request_id, *args, **kwargs)
        placed = _placed.get()
        if placed is not None:
            placed.server = handle
        return server_id, handle

    def server_request_id(request_id: str) -> Any:
        named = kind._vllm_request_id(twin, request_id)
        placed = _placed.get()
        if placed is not None:
            placed.request_id = named
        return named

    twin._acquire_server, twin._vllm_request_id = acquire_server, server_request_id
    return twin


def placing(placed: Placed) -> None:
    """Note in `placed` where the request of this task is."""
    _placed.set(placed)
