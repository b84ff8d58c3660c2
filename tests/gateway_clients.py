"""Clients of a gateway without HTTP, which echo conversations as real ones do."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from harness import Recorder, balance_of
from rollout import AgentContext, AgentLoop, Prompt, Trajectory, register_agent
from rollout.batch import RolloutBatch
from rollout.config import (
    AgentConfig,
    GatewayConfig,
    LengthsConfig,
    SchedulingConfig,
    SimulatedEngine,
)
from rollout.gateway.calls import (
    Answer,
    ClientCall,
    ClientMessage,
    Completion,
    GatewayCall,
)
from rollout.gateway.session import GatewaySession, open_session
from rollout.testing import Scenario
from rollout.types import ToolCall

Trial = Callable[[GatewaySession, AgentContext], Awaitable[Any]]

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TRIALS: dict[str, Trial] = {}
SETTINGS: list[GatewayConfig] = []


@register_agent("through_gateway")
class ThroughGateway(AgentLoop):
    """Does what its prompt's `extra` says, as a client of the gateway."""

    async def run(self, context: AgentContext) -> None:
        async with open_session(context, SETTINGS[-1]) as session:
            await TRIALS[context.prompt.extra["trial"]](session, context)


def system(text: str) -> ClientMessage:
    return ClientMessage(role="system", text=text)


def user(text: str) -> ClientMessage:
    return ClientMessage(role="user", text=text)


def result(text: str, call_id: str) -> ClientMessage:
    return ClientMessage(role="tool", text=text, call_id=call_id)


def echo(answer: Answer) -> ClientMessage:
    """As a faithful client gives it back."""
    calls = [each for each in answer.calls if isinstance(each, ToolCall)]
    return ClientMessage(
        role="assistant",
        text=answer.client_text,
        reasoning=answer.reasoning,
        calls=tuple(ClientCall(each.name, dict(each.arguments), each.id) for each in calls),
        ids=(answer.id,),
    )


def asked(*messages: ClientMessage, **fields: Any) -> GatewayCall:
    """A call with a digest of what it says."""
    call = GatewayCall(**({"api": "chat", "messages": messages} | fields))
    digest = hashlib.sha256(msgspec.json.encode(call)).digest()
    return msgspec.structs.replace(call, digest=digest)


async def ask(session: GatewaySession, *messages: ClientMessage, **fields: Any) -> Completion:
    """Ask, and get the answer."""
    return await session.complete(asked(*messages, **fields))


class Asked:
    """What came of a trial, checked against what its engines saw."""

    def __init__(self, batch: RolloutBatch, recorder: Recorder) -> None:
        self.batch = batch
        self.trajectory: Trajectory = batch.trajectories[0]
        self.recorder = recorder
        self.balance = balance_of(recorder.runtimes[0])  # type: ignore[arg-type]
        self.purposes = [segment.purpose for segment in self.trajectory.segments]
        self.parents = [
            segment.parent and segment.parent[0] for segment in self.trajectory.segments
        ]

    def text(self, at: int) -> str:
        from rollout.testing import simulated_tokenizer

        ids = self.trajectory.segments[at].transcript.ids()
        return str(simulated_tokenizer().decode(ids, clean_up_tokenization_spaces=False))

    def trained(self) -> int:
        return int(self.batch.tensors["response_mask"].sum())


async def tried(
    trial: Trial,
    scenario: Scenario,
    *,
    settings: GatewayConfig | None = None,
    lengths: LengthsConfig | None = None,
    samples: int = 1,
    **sections: Any,
) -> Asked:
    """Run a trial as the client of one trajectory."""
    TRIALS["it"] = trial
    SETTINGS.append(settings or GatewayConfig())
    recorder = Recorder()
    sections.setdefault("engine", SimulatedEngine(replicas=2))
    config = scenario.config(
        agent=AgentConfig(name="through_gateway", tokenization_check="strict"),
        lengths=lengths or LengthsConfig(prompt=1500, response=3000),
        scheduling=SchedulingConfig(samples_per_prompt=samples, max_retries=0),
        **sections,
    )
    async with recorder.open_rollout(config) as runtime:
        prompt = Prompt(messages=[{"role": "user", "content": "-"}], extra={"trial": "it"})
        batch = await runtime.generate([prompt])
    SETTINGS.pop()
    assert recorder.anomalies() == []
    assert balance_of(runtime).is_even  # type: ignore[arg-type]
    return Asked(batch, recorder)
