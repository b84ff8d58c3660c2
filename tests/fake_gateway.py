"""A gateway without HTTP: clients call the conversation through functions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollout.agents import AgentContext
from rollout.agents.services import GatewayAddress


class FakeGateway:
    """Opens for each trajectory; `contexts` are those that are open, by their keys.

    A client that has asked for nothing when its agent ends well has had one turn nevertheless:
    without one a trajectory fails, which few of these tests are about.
    """

    def __init__(self) -> None:
        self.contexts: dict[str, AgentContext] = {}
        self.closed = 0
        self.root_url = "http://127.0.0.1:9999/t/1"

    @asynccontextmanager
    async def open(self, context: AgentContext) -> AsyncIterator[GatewayAddress]:
        key = f"key-of-{context.identity.session_id}"
        self.contexts[key] = context
        try:
            yield GatewayAddress(root_url=self.root_url, api_key=key, model="served-model")
            if context.state.ending is None and not context.transcript:
                await context.generate()
        finally:
            del self.contexts[key]
            self.closed += 1


def fake_gateway(monkeypatch: pytest.MonkeyPatch) -> FakeGateway:
    """In the place of every runtime's gateway."""
    gateway: Any = FakeGateway()
    monkeypatch.setattr(AgentContext, "gateway", property(lambda self: gateway))
    return gateway  # type: ignore[no-any-return]
