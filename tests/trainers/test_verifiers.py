"""verifiers itself takes turns of our gateway, and prime-rl's own types our rows."""

from __future__ import annotations

import importlib.util
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import pytest

from rollout import DiskWeights
from rollout.config import SchedulingConfig
from rollout.testing import Scenario, tool_call
from test_prime_rl_samples import check_samples


def prime_rl_types() -> ModuleType | None:
    """prime-rl's own types, where its source is; its package imports more than they need."""
    found = find_spec("prime_rl")
    if found is None or not found.submodule_search_locations:
        return None
    file = Path(next(iter(found.submodule_search_locations)), "transports/rollouts/types.py")
    spec = importlib.util.spec_from_file_location("prime_rl_types", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_prime_rl_itself_takes_samples_of_every_outcome() -> None:
    types = prime_rl_types()
    if types is None:
        pytest.skip("prime_rl is not there; see docs/trainers/verifiers.md")
    check_samples(types)


@pytest.fixture
def vf() -> Any:
    """verifiers' own code, where it is installed."""
    if find_spec("verifiers") is None:
        pytest.skip("verifiers is not installed; see docs/trainers/verifiers.md")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import verifiers.v1 as v1
        from verifiers.v1 import graph, trace, types
        from verifiers.v1.dialects import ChatDialect

        from rollout.integrations.verifiers import client
    return SimpleNamespace(
        v1=v1, graph=graph, trace=trace, types=types, chat=ChatDialect(), client=client
    )


SCENARIO = (
    Scenario(seed=1, weight_version=7)
    .reply("consult", tool_call("look", at="x"))
    .then("It is there.")
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]


def new_trace(vf: Any) -> Any:
    """A trace of no task and no agent: what turns are committed to."""
    return vf.trace.Trace.model_construct(
        id="rollout-1",
        verifiers=None,  # it would ask git for its version
        nodes=[],
        calls=[],
        tools=[],
        mm_token_type_id_map={},
    )


async def play(vf: Any, client: Any, trace: Any, runtime: Any) -> None:
    """Two turns, with a tool and other weights between them, as verifiers' server plays them."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "consult"}]
    for _ in range(2):
        body = {"model": "theirs", "messages": messages, "tools": TOOLS, "temperature": 1.0}
        request = vf.chat.parse_request(body)
        turn = vf.graph.prepare_turn(trace, request.messages, request.tools)
        response = await client.get_response(
            vf.chat, body, vf.types.SamplingConfig(), session_id=trace.id, turn=turn
        )
        assert isinstance(response, vf.types.Response)
        turn.commit(response)
        weights = DiskWeights(str(Path(__file__).parent))  # what is there makes no difference
        await runtime.update_weights(version=8, source=weights, mode="in_place")
        said = response.raw["choices"][0]["message"]
        messages = [*messages, {key: said[key] for key in ("role", "content") if key in said}]
        for call in said.get("tool_calls") or []:
            messages[-1]["tool_calls"] = said["tool_calls"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "x is there"})


def test_client_commits_exact_tokens_of_every_turn_to_a_trace(vf: Any) -> None:
    from rollout.integrations.verifiers import RolloutClient, RolloutClientConfig, open_door

    trace = new_trace(vf)

    async def run() -> dict[str, Any]:
        async with open_door(SCENARIO.config()) as door:
            client = RolloutClient(RolloutClientConfig(base_url=door.url), token=door.token)
            try:
                await play(vf, client, trace, door.runtime)
                return await client.finish(trace.id, reward=1.0)
            finally:
                await client.close()

    told = anyio.run(run)
    assert told["outcome"] == "completed"
    assert told["reward"] == 1.0
    [row] = told["rows"]
    [branch] = trace_branches(vf, trace)
    assert branch.token_ids == row["ids"]
    assert branch.sampled_mask == [bool(flag) for flag in row["mask"]]
    assert branch.logprobs == pytest.approx(row["log_probs"])
    assert {version for version in row["weight_versions"] if version >= 0} == {7, 8}
    assert sum(branch.sampled_mask) > 10


def trace_branches(vf: Any, trace: Any) -> list[Any]:
    """The paths of a trace, as prime-rl makes samples of them."""
    leaves = vf.graph.leaves(trace)
    found = []
    for index, leaf in enumerate(leaves):
        nodes, at = [], leaf
        while at is not None:
            nodes.append(trace.nodes[at])
            at = trace.nodes[at].parent
        found.append(vf.trace.Branch.model_construct(index=index, nodes=nodes[::-1]))
    return found


def test_client_refuses_other_dialects_and_errors_of_the_gateway_are_verifiers_own(vf: Any) -> None:
    from verifiers.v1.dialects import AnthropicDialect
    from verifiers.v1.errors import ProviderError

    from rollout.integrations.verifiers import RolloutClient, RolloutClientConfig, open_door

    sampling = vf.types.SamplingConfig()

    async def run() -> None:
        async with open_door(SCENARIO.config(), token="right") as door:
            client = RolloutClient(RolloutClientConfig(base_url=door.url), token=door.token)
            with pytest.raises(NotImplementedError, match="chat completions only"):
                await client.get_response(AnthropicDialect(), {}, sampling)
            body = {"messages": [{"role": "user", "content": "consult"}], "temperature": -1}
            with pytest.raises(ProviderError, match="temperature"):
                await client.get_response(vf.chat, body, sampling)
            await client.close()
            wrong = RolloutClient(RolloutClientConfig(base_url=door.url), token="wrong")
            with pytest.raises(ProviderError, match="token is wrong"):
                await wrong.get_response(vf.chat, body, sampling)
            await wrong.close()

    anyio.run(run)


def test_calls_without_a_session_that_fail_keep_no_trajectory(vf: Any) -> None:
    from verifiers.v1.errors import ProviderError

    from rollout.integrations.verifiers import RolloutClient, RolloutClientConfig, open_door

    config = SCENARIO.config(scheduling=SchedulingConfig(max_in_flight=1))
    sampling = vf.types.SamplingConfig()
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "consult"}]}

    async def run() -> None:
        async with open_door(config) as door:
            client = RolloutClient(RolloutClientConfig(base_url=door.url), token=door.token)
            with anyio.fail_after(30):
                for _ in range(2):
                    with pytest.raises(ProviderError, match="temperature"):
                        await client.get_response(vf.chat, body | {"temperature": -1}, sampling)
                response = await client.get_response(vf.chat, body, sampling)
            assert response.tokens.completion_ids
            await client.close()

    anyio.run(run)


def test_close_ends_every_session_although_one_fails(vf: Any) -> None:
    from verifiers.v1.errors import ProviderError

    from rollout.integrations.verifiers import RolloutClient, RolloutClientConfig, open_door

    body = {"messages": [{"role": "user", "content": "consult"}]}

    async def run() -> None:
        async with open_door(SCENARIO.config()) as door:
            client = RolloutClient(RolloutClientConfig(base_url=door.url), token=door.token)
            other = RolloutClient(RolloutClientConfig(base_url=door.url), token=door.token)
            sampling = vf.types.SamplingConfig()
            for name in ("one", "two", "three"):
                await client.get_response(vf.chat, body, sampling, session_id=name)
            other._sessions["two"] = client._sessions["two"]
            await other.finish("two")  # the gateway does not know it any more
            with pytest.raises(ProviderError, match="was deleted"):
                await client.close()
            await other.close()
            with anyio.fail_after(30):
                while door.runtime.statistics().running:
                    await anyio.sleep(0.01)
            assert client._http.is_closed

    anyio.run(run)


def test_install_makes_environments_take_our_configuration(vf: Any) -> None:
    from verifiers.v1.clients import EvalClient
    from verifiers.v1.interception import server

    from rollout.integrations.verifiers import RolloutClient, RolloutClientConfig, install

    before = server.resolve_client
    try:
        install()
        install()
        client = server.resolve_client(RolloutClientConfig(base_url="http://127.0.0.1:1"))
        assert isinstance(client, RolloutClient)
        assert isinstance(client, vf.v1.Client)
        anyio.run(client.close)
        other = server.resolve_client(vf.v1.EvalClientConfig(base_url="http://127.0.0.1:1"))
        assert isinstance(other, EvalClient)
        anyio.run(other.close)
    finally:
        server.resolve_client = before


@pytest.mark.parametrize("streams", [False, True])
def test_interception_server_of_verifiers_plays_an_agent_on_our_gateway(
    vf: Any, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.interception import server as interception
    from verifiers.v1.session import RolloutSession

    from rollout.integrations.verifiers import RolloutClientConfig, install, open_door

    monkeypatch.setenv("ROLLOUT_GATEWAY_TOKEN", "shown")
    monkeypatch.setattr(interception, "resolve_client", interception.resolve_client)
    trace = new_trace(vf)

    async def ask(http: Any, slot: Any, messages: list[dict[str, Any]]) -> str:
        """What the program of a harness asks, with the SDK that it likes."""
        body = {"model": "theirs", "messages": messages, "tools": TOOLS, "stream": streams}
        answer = await http.post(
            f"{slot[0]}/v1/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {slot[1]}"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        return str(answer.text)

    async def run() -> None:
        install()
        async with open_door(SCENARIO.config()) as door:
            config = RolloutClientConfig(base_url=door.url)
            session = RolloutSession(ctx=ModelContext(model="theirs", client=config), trace=trace)
            async with interception.InterceptionServer() as served, httpx.AsyncClient() as http:
                async with served.acquire(session) as slot:
                    said = await ask(http, slot, [{"role": "user", "content": "consult"}])
                    assert ("data: " in said) == streams
                    assert '"look"' in said

    anyio.run(run)
    [branch] = trace_branches(vf, trace)
    assert sum(branch.sampled_mask) == len([value for value in branch.logprobs if value])
    assert sum(branch.sampled_mask) > 5
