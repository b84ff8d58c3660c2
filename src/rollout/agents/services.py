"""What all trajectories of a runtime share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import attrs
import msgspec

from rollout.agents.media_intake import MediaIntake
from rollout.chat import ChatTemplate, ToolParser
from rollout.config import RolloutConfig
from rollout.containment import Containment
from rollout.engine.pool.pool import EnginePool
from rollout.interactions import InteractionRegistry
from rollout.observe.event_stream import EventStream
from rollout.observe.tally import Tally
from rollout.sandbox.pool import SandboxPool
from rollout.tools import ToolExecutor
from rollout.worker_threads import WorkerThreads

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


class TrajectoryGateway(Protocol):
    """What agents need of the gateway, which imports them: it serves trajectories over HTTP."""

    def open(self, context: Any) -> AbstractAsyncContextManager[GatewayAddress]:
        """Serve a trajectory, by its `AgentContext`, while the block runs, in the task entering it.

        What clients ask for runs in a task group of the block's, so that the trajectory's limits
        and its cancellation hold for it. When the block is left, what runs is cancelled, and later
        requests get a final error.
        """


@attrs.define(kw_only=True, eq=False)
class Services:
    """The engines, the model's chat format, tools, simulated users, and threads for their code.

    `stop_token_ids` are those that end a turn, in the template or in the tool-call format; `events`
    takes what happens to those who want to know; `texts` is the thread of `run_text`; `gateway`
    is None where there is none.
    """

    config: RolloutConfig
    engines: EnginePool
    template: ChatTemplate
    parser: ToolParser
    stop_token_ids: tuple[int, ...]
    tools: ToolExecutor
    interactions: InteractionRegistry
    tally: Tally
    threads: WorkerThreads
    containment: Containment
    texts: WorkerThreads
    media: MediaIntake
    events: EventStream = attrs.field(factory=EventStream)
    gateway: TrajectoryGateway | None = None
    sandboxes: SandboxPool = attrs.field(init=False)
    #: Parameters of truncated sampling that the runtime has warned of.
    warned: set[str] = attrs.field(init=False, factory=set)
    #: A `Renderer` for each set of tools, by their names.
    renderers: dict[tuple[str, ...], Any] = attrs.field(init=False, factory=dict)

    @sandboxes.default
    def _make_sandboxes(self) -> SandboxPool:
        return SandboxPool(self.config.sandbox, self.config.limits.cleanup_s)
