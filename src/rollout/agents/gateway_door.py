"""How an agent that speaks HTTP reaches its trajectory: what the gateway, floors above, must be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager


class GatewayAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where one trajectory is served, for as long as it runs.

    Attributes:
        root_url: Without an API's path, as Anthropic's clients want it.
        api_key: The trajectory's own, as Bearer token or `x-api-key`.
        model: The name that the gateway serves its model under.
    """

    root_url: str
    api_key: str
    model: str

    @property
    def base_url(self) -> str:
        """Ends in ``/v1``, as OpenAI's clients want it."""
        return f"{self.root_url}/v1"


class GatewayDoor(Protocol):
    """Serves the conversation of trajectories over HTTP."""

    def open(self, context: Any) -> AbstractAsyncContextManager[GatewayAddress]:
        """Serve a trajectory, by its `AgentContext`, while the block runs, in the task entering it.

        What clients ask for runs in a task group of the block's, so that the trajectory's limits
        and its cancellation hold for it. When the block is left, what runs is cancelled, and later
        requests get a final error.
        """
