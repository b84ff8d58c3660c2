"""A request under way on a channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import anyio

    from rollout.engine.core import GenerationRequest
    from rollout.engine.generation import Generation, Part
    from rollout.token_history import TokenHistory


class PendingRequest:
    """A request under way: `done` fires at its last chunk or when the channel is lost.

    Attributes:
        generation: Filled as chunks come; None once nobody waits for them any more.
        part: What this request gave to it.
        error: Why the engine refused or failed it; empty otherwise.
        is_lost: The channel was lost under it.
        is_garbled: The engine's answer contradicted itself; what came before stays.
    """

    __slots__ = (
        "deadline",
        "done",
        "error",
        "generation",
        "history",
        "is_garbled",
        "is_lost",
        "on_gone",
        "part",
        "request",
        "request_id",
        "sent_tokens",
    )

    def __init__(
        self,
        request: GenerationRequest,
        history: TokenHistory | None,
        deadline: float,
        generation: Generation,
        part: Part,
        on_gone: Callable[[], None],
        done: anyio.Event,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.history = history
        self.sent_tokens = 0 if history is None else len(history)
        self.deadline = deadline
        self.generation: Generation | None = generation
        self.part = part
        self.on_gone = on_gone
        self.done = done
        self.error = ""
        self.is_lost = False
        self.is_garbled = False
