"""A server of verl's as its client sees it; imports little: an actor of Ray is to start soon."""

from __future__ import annotations

import asyncio  # noqa: TID251  (actors of Ray run on it)
from types import SimpleNamespace
from typing import Any

END = 258


class Server:
    """Answers at once, but what it is told to wait for; can end single requests, as vLLM's can."""

    def __init__(self) -> None:
        self.ended: dict[str, Any] = {}
        self.asked: list[str] = []
        self.aborted: list[tuple[str, bool]] = []
        #: In which requests wait for each other; None: each is answered at once.
        self.together: asyncio.Barrier | None = None

    async def generate(self, request_id: str, prompt_ids: list[int], **options: Any) -> Any:
        """Two tokens and an end, or what there is at an abort."""
        self.asked.append(request_id)
        if self.together is not None:
            await self.together.wait()
        answer = SimpleNamespace(
            token_ids=[104, 105, END],
            log_probs=[-0.1, -0.2, -0.3],
            stop_reason="completed",
            routed_experts=None,
            num_preempted=None,
            extra_fields={"global_steps": 4, "num_cached_tokens": 3},
        )
        if b"wait" in bytes(each for each in prompt_ids if each < 256):
            self.ended[request_id] = asyncio.Event()
            await self.ended[request_id].wait()
            answer.stop_reason = "aborted"
        return answer

    def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> None:
        """End one."""
        self.aborted.append((request_id, reset_prefix_cache))
        if request_id in self.ended:
            self.ended[request_id].set()

    def seen(self) -> tuple[list[str], list[tuple[str, bool]]]:
        """Requests, and those that were ended."""
        return self.asked, self.aborted
