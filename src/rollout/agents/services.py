"""What all trajectories of a runtime share."""

from __future__ import annotations

from typing import Any

import attrs

from rollout.agents.gateway_door import GatewayDoor
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


@attrs.define(kw_only=True, eq=False)
class Services:
    """The engines, the model's chat format, tools, simulated users, and threads for their code.

    `stop_token_ids` are those that end a turn, in the template or in the tool-call format; `events`
    takes what happens to those who want to know; `texts` is the thread of `run_text`; `door` is the
    gateway, None where there is none.
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
    door: GatewayDoor | None = None
    sandboxes: SandboxPool = attrs.field(init=False)
    #: Parameters of truncated sampling that the runtime has warned of.
    warned: set[str] = attrs.field(init=False, factory=set)
    #: By the tools that are offered; see `rendering.get_renderer`.
    renderers: dict[tuple[str, ...], Any] = attrs.field(init=False, factory=dict)

    @sandboxes.default
    def _make_sandboxes(self) -> SandboxPool:
        return SandboxPool(self.config.sandbox, self.config.limits.cleanup_s)
