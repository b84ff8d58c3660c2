"""LangChain's chat model over a trajectory: rows, tools, forks, samples, limits."""

from __future__ import annotations

import asyncio  # noqa: TID251
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

import rollout
from harness import Recorder
from race_situations import user
from rollout import AgentContext, AgentLoop, Outcome, RolloutBatch, register_agent
from rollout.config import AgentConfig, GatewayConfig, LengthsConfig, LimitsConfig
from rollout.gateway.calls import GatewayError
from rollout.integrations.langgraph import GraphAgent, RolloutChatModel, open_chat_model
from rollout.testing import Scenario, tool_call
from slow_cases import slow_after

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", slow_after(1, ["asyncio", "trio"])),
]

TRIALS: dict[str, Any] = {}
SCENARIO = (
    Scenario(seed=1)
    .timing(base_s=0.001)
    .reply("Name a", "Rome.", "Oslo.", "Lima.")
    .reply("question", "Let me see. " + tool_call("multiply", a=6, b=7))
    .then("It is 42.")
)


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@register_agent("tries_chat_model")
class TriesChatModel(AgentLoop):
    """Does what its test says with a chat model."""

    async def run(self, context: AgentContext) -> None:
        TRIALS["context"] = context
        async with open_chat_model(context) as model:
            await context.services.threads.run_asyncio("trial", TRIALS["it"], model)


async def tried(trial: Any, agent: str = "tries_chat_model", **options: Any) -> RolloutBatch:
    TRIALS["it"] = trial
    recorder = Recorder()
    config = SCENARIO.config(agent=AgentConfig(name=agent), **options)
    async with recorder.open_rollout(config) as runtime:
        batch: RolloutBatch = await runtime.generate([user("question")], step=1)
    assert recorder.anomalies() == []
    return batch


async def react(model: RolloutChatModel) -> list[Any]:
    bound = model.bind_tools([multiply])
    messages: list[Any] = [SystemMessage("Be brief."), HumanMessage("question")]
    while True:
        said = await bound.ainvoke(messages)
        messages.append(said)
        if not said.tool_calls:
            return messages
        messages += [await multiply.ainvoke(call) for call in said.tool_calls]


async def test_chat_model_conversation_with_a_tool_is_one_row_of_exact_tokens() -> None:
    heard: list[Any] = []

    async def trial(model: RolloutChatModel) -> None:
        heard.extend(await react(model))

    batch = await tried(trial)
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert [s.purpose for s in trajectory.segments] == ["main"]
    _, _, asked, answered, final = heard
    assert (asked.content, final.content) == ("Let me see.", "It is 42.")
    assert asked.tool_calls[0]["args"] == {"a": 6, "b": 7}
    assert isinstance(answered, ToolMessage)
    assert answered.content == "42"
    spans = list(trajectory.transcript.generated_spans())
    ids = trajectory.transcript.prefix.ids
    assert [list(ids[s.start : s.stop]) for s in spans] == [
        asked.response_metadata["token_ids"],
        final.response_metadata["token_ids"],
    ]
    assert asked.usage_metadata["output_tokens"] == len(asked.response_metadata["token_ids"])
    assert int(batch.tensors["response_mask"].sum()) == sum(len(span) for span in spans)


async def test_chat_model_history_that_was_edited_begins_another_segment() -> None:
    async def trial(model: RolloutChatModel) -> None:
        messages = await react(model)
        edited = [*messages[:4], AIMessage("It is 41."), HumanMessage("Sure?")]
        await model.bind_tools([multiply]).ainvoke(edited)

    batch = await tried(trial)
    (trajectory,) = batch.trajectories
    assert trajectory.outcome is Outcome.COMPLETED
    assert [s.purpose for s in trajectory.segments] == ["main", "branch"]
    generated = sum(t.generated_length for t in trajectory.transcripts)
    assert int(batch.tensors["response_mask"].sum()) == generated


async def test_chat_model_samples_at_once_are_rows_of_their_own() -> None:
    async def trial(model: RolloutChatModel) -> None:
        asked = [HumanMessage("Name a city.")]
        said = await asyncio.gather(*(model.ainvoke(asked) for _ in range(3)))
        assert len({each.id for each in said}) == 3
        result = await model.agenerate([asked], n=2)
        assert len(result.generations[0]) == 2

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert len(trajectory.segments) == 5


async def test_chat_model_arguments_of_a_call_are_kept() -> None:
    async def trial(model: RolloutChatModel) -> None:
        asked = [HumanMessage("question")]
        cut = await model.bind(max_tokens=3).ainvoke(asked)
        assert cut.response_metadata["finish_reason"] == "length"
        assert cut.usage_metadata["output_tokens"] == 3
        stopped = await model.ainvoke(asked, stop=["see"])
        assert stopped.content == "Let me"
        none = await model.bind_tools([multiply], tool_choice="none").ainvoke(asked)
        assert none.tool_calls == []

    (trajectory,) = (await tried(trial)).trajectories
    assert trajectory.cause is None
    assert [s.purpose for s in trajectory.segments] == ["main", "branch", "branch"]


async def test_chat_model_every_field_of_sampling_takes_effect() -> None:
    fields = {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "top_p": 0.5,
        "min_p": 0.1,
        "stop_token_ids": [2, 3],
        "top_log_probs": 2,
    }

    async def trial(model: RolloutChatModel) -> None:
        asked = [HumanMessage("question")]
        await model.bind(**fields, top_k=0, max_tokens=20).ainvoke(asked, stop="see")
        TRIALS["sampling"] = TRIALS["context"].sampling
        await model.bind(greedy=True, top_k=5, seed=2**70).ainvoke([AIMessage("x"), *asked])

    (trajectory,) = (await tried(trial)).trajectories
    assert trajectory.cause is None
    sampling = TRIALS["sampling"]
    fields["stop_token_ids"] = (2, 3)
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (sampling.top_k, sampling.max_new_tokens) == (-1, 20)
    greedy = list(TRIALS["context"].all())[1].sampling
    assert (greedy.temperature, greedy.top_k) == (0.0, 5)
    assert trajectory.transcript.top_ids() is not None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"seed": 1.5}, "seed = 1.5: expected `int | null`, got `float`"),
    ({"n": 200}, "n = 200: expected `int` <= 128"),
    ({"stop": ["x", ""]}, "stop[1] = ['x', '']: expected `str` of length >= 1"),
    ({"stop": ""}, "stop = '': expected `str` of length >= 1"),
    ({"temperature": float("nan")}, "temperature = nan: expected `float` >= 0.0"),
    ({"max_tokens": 0}, "max_tokens = 0: expected `int` >= 1"),
    ({"tools": [{"function": {}}]}, "tools[0].function: Object missing required field `name`"),
    ({"tools": [{"function": {"name": len}}]}, "tools[0]: {'function': {'name': <built-in"),
    ({"topp": 1}, "topp = 1: unknown argument; known: temperature, top_p, top_k, min_p,"),
]


async def test_chat_model_wrong_arguments_are_refused_by_name_and_end_nothing() -> None:
    async def trial(model: RolloutChatModel) -> None:
        asked = [HumanMessage("question")]
        for given, message in REFUSED:
            with pytest.raises(GatewayError) as caught:
                await model.bind(**given).ainvoke(asked)
            assert str(caught.value)[: len(message)] == message
            assert str(caught.value.field).startswith(next(iter(given)))
        assert (await model.ainvoke(asked)).tool_calls

    (trajectory,) = (await tried(trial)).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert len(trajectory.segments) == 1


@pytest.mark.parametrize("unenforced", ["accept", "refuse"])
async def test_chat_model_choices_that_would_force_a_call_are_as_the_gateways(
    unenforced: Literal["accept", "refuse"],
) -> None:
    named = {"type": "function", "function": {"name": "multiply"}}
    asked = [HumanMessage("question")]
    refused: list[Any] = []

    async def trial(model: RolloutChatModel) -> None:
        for choice in (None, "auto", "none", False):
            await model.bind_tools([multiply], tool_choice=choice).ainvoke(asked)
        for choice in ("any", "required", "multiply", True, named):
            try:
                await model.bind_tools([multiply], tool_choice=choice).ainvoke(asked)
            except GatewayError as error:
                refused.append((choice, error.field))

    (trajectory,) = (await tried(trial, gateway=GatewayConfig(unenforced=unenforced))).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert len(refused) == (5 if unenforced == "refuse" else 0)
    assert {field for _, field in refused} <= {"tool_choice"}


async def test_chat_model_length_that_nobody_handles_ends_the_trajectory_by_it() -> None:
    async def trial(model: RolloutChatModel) -> None:
        messages = await react(model)
        await model.bind_tools([multiply]).ainvoke([*messages, HumanMessage("x" * 3000)])

    batch = await tried(trial, lengths=LengthsConfig(prompt=2000, response=800))
    (trajectory,) = batch.trajectories
    assert (trajectory.outcome, trajectory.limit_source) == (Outcome.LENGTH, "lengths.response")


class Graph:
    """What `create_react_agent` makes, as far as it is used."""

    def __init__(self, model: RolloutChatModel) -> None:
        self.model = model

    async def ainvoke(self, state: Any, config: Any) -> Any:
        assert config == {"recursion_limit": 5}
        (message,) = state["messages"]
        assert message == {"role": "user", "content": "question"}
        return {"messages": await react(self.model)}


async def test_graph_agent_runs_a_graph_and_keeps_what_it_is_asked_to() -> None:
    agent = GraphAgent(
        Graph,
        config={"recursion_limit": 5},
        result=lambda state: {"answer": state["messages"][-1].content},
    )
    register_agent("a_graph")(agent)
    (trajectory,) = (await tried(None, "a_graph")).trajectories
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert trajectory.extra == {"answer": "It is 42."}


async def test_graph_agent_at_its_turn_limit_ends_with_that() -> None:
    class Endless(Graph):
        async def ainvoke(self, state: Any, config: Any) -> Any:
            while True:
                await self.model.ainvoke("question")

    register_agent("an_endless_graph")(GraphAgent(Endless))
    config = SCENARIO.config(agent=AgentConfig(name="an_endless_graph", max_assistant_turns=2))
    async with rollout.open_rollout(config) as runtime:
        (trajectory,) = (await runtime.generate([user("question")])).trajectories
    assert (trajectory.outcome, trajectory.reason) == (Outcome.LIMIT, "turns")
    assert trajectory.limit_source == "agent.max_assistant_turns"
    assert len(trajectory.segments) == 2


async def test_graph_agent_at_its_deadline_is_cancelled() -> None:
    class Stuck(Graph):
        async def ainvoke(self, state: Any, config: Any) -> Any:
            await react(self.model)
            await asyncio.sleep(1000)

    register_agent("a_stuck_graph")(GraphAgent(Stuck))
    limits = LimitsConfig(generation_s=1, tool_s=1, turn_s=1, trajectory_s=1, batch_s=60)
    batch = await tried(None, "a_stuck_graph", limits=limits)
    assert batch.trajectories[0].outcome is Outcome.DEADLINE
    assert batch.trajectories[0].transcript.generated_length > 0
