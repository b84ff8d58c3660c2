"""Agents that speak HTTP with the gateway, in a thread, as programs do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import anyio.to_thread
import httpx

from rollout import AgentContext, AgentLoop, Prompt, RolloutRuntime, Trajectory, register_agent
from rollout.agents.services import GatewayAddress
from rollout.config import (
    AgentConfig,
    ChannelConfig,
    GatewayConfig,
    LengthsConfig,
    RolloutConfig,
    SchedulingConfig,
    SimulatedEngine,
)
from rollout.testing import Scenario

Program = Callable[["Client"], Any]
PROGRAMS: dict[str, Program] = {}


class Client:
    """A plain client of one trajectory.

    Attributes:
        http: Has its address and its key.
    """

    def __init__(self, address: GatewayAddress) -> None:
        self.address = address
        headers = {"authorization": f"Bearer {address.api_key}"}
        self.http = httpx.Client(
            base_url=address.root_url, headers=headers, timeout=30, trust_env=False, verify=False
        )

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json={"model": self.address.model} | body)

    def chat(self, *messages: Any, **body: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", messages=list(messages), **body)

    def close(self) -> None:
        self.http.close()


@register_agent("http_agent")
class HttpAgent(AgentLoop):
    """Runs the program that its prompt names, as a client of its trajectory."""

    async def run(self, context: AgentContext) -> None:
        program = PROGRAMS[context.prompt.extra["program"]]
        async with context.gateway.open(context) as address:
            context.extra["address"] = address
            run = partial(_run, program, address)
            context.extra["result"] = await anyio.to_thread.run_sync(run)


@register_agent("http_agent_by_need")
class HttpAgentByNeed(HttpAgent):
    """Fails early where no gateway can be opened."""

    needs_gateway = True


def _run(program: Program, address: GatewayAddress) -> Any:
    client = Client(address)
    try:
        return program(client)
    finally:
        client.close()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def config_of(scenario: Scenario, gateway: GatewayConfig, **sections: Any) -> RolloutConfig:
    sections.setdefault("agent", AgentConfig(name="http_agent"))
    return scenario.config(
        engine=SimulatedEngine(),
        lengths=LengthsConfig(prompt=1500, response=3000),
        scheduling=SchedulingConfig(max_retries=0),
        gateway=gateway,
        **sections,
    )


def prompt_of(program: Program) -> Prompt:
    PROGRAMS["it"] = program
    return Prompt(messages=[user("-")], extra={"program": "it"})


async def tried(
    open_runtime: Callable[[RolloutConfig], AbstractAsyncContextManager[RolloutRuntime]],
    program: Program,
    scenario: Scenario,
    *,
    channel: ChannelConfig | None = None,
    **gateway: Any,
) -> Trajectory:
    """The trajectory whose client is this program."""
    sections = {} if channel is None else {"channel": channel}
    config = config_of(scenario, GatewayConfig(**gateway), **sections)
    async with open_runtime(config) as runtime:
        batch = await runtime.generate([prompt_of(program)])
    return batch.trajectories[0]
