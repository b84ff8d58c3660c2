"""The gateway of a runtime, through its public API: sections of the configuration, over HTTP."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from harness import Recorder
from http_agents import Client, config_of, prompt_of, tried, user
from rollout import (
    AgentError,
    AgentTask,
    ConfigError,
    GatewayConfig,
    Outcome,
    Prompt,
    RolloutConfig,
    agent,
    open_gateway,
    open_rollout,
)
from rollout.config import AgentConfig, config_from_dict, dump_config
from rollout.gateway import http
from rollout.testing import Scenario
from slow_cases import slow_but

pytest.importorskip("h11")

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.anyio, pytest.mark.process]

QUICK = Scenario(seed=3).timing(base_s=0.001)
CHAT = QUICK.reply("One", "First.").then("Second.").then("Third.")


@pytest.fixture(params=slow_but(["trio", "asyncio"], "trio"))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real sockets, so real time."""
    return str(request.param)


def said(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


def talk(client: Client) -> list[str]:
    """Three turns, each given back as it came."""
    messages: list[Any] = [user("One")]
    for _ in range(3):
        messages += [said(client.chat(*messages)), user("More")]
    return [each["content"] for each in messages[1::2]]


async def test_linear_conversation_is_one_row_of_the_engines_tokens() -> None:
    recorder = Recorder()
    trajectory = await tried(recorder.open_rollout, talk, CHAT)
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert trajectory.extra["result"] == ["First.", "Second.", "Third."]
    assert [segment.purpose for segment in trajectory.segments] == ["main"]
    assert recorder.anomalies() == []


async def test_streamed_conversation_is_the_same_row() -> None:
    def stream(client: Client) -> list[str]:
        first = client.chat(user("One"), stream=True).text
        assert first.endswith("data: [DONE]\n\n")
        assert '"content":"First."' in first
        told = {"role": "assistant", "content": "First."}
        return [said(client.chat(user("One"), told, user("More")))["content"]]

    trajectory = await tried(open_rollout, stream, CHAT)
    assert (trajectory.outcome, len(trajectory.segments)) == (Outcome.COMPLETED, 1)
    assert trajectory.extra["result"] == ["Second."]


async def test_later_calls_of_a_finished_trajectory_get_a_final_error() -> None:
    config = config_of(CHAT, GatewayConfig())
    async with open_rollout(config) as runtime:
        batch = await runtime.generate([prompt_of(talk)])
        address = batch.trajectories[0].extra["address"]
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            got = await client.post(
                f"{address.base_url}/chat/completions",
                json={"messages": [user("One")]},
                headers={"x-api-key": address.api_key},
            )
        assert (got.status_code, got.headers["x-should-retry"]) == (403, "false")
        assert got.json()["error"]["code"] == "trajectory_ended"


async def test_opened_gateway_serves_agents_until_it_is_left() -> None:
    async with open_rollout(config_of(CHAT, GatewayConfig())) as runtime:
        async with open_gateway(runtime) as gateway:
            batch = await runtime.generate([prompt_of(talk)])
            address = batch.trajectories[0].extra["address"]
            assert address.root_url.startswith(f"{gateway.url}/t/")
            assert address.base_url == f"{address.root_url}/v1"
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            with pytest.raises(httpx.ConnectError):
                await client.head(gateway.url)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock.getsockname()[1]


async def test_address_that_is_taken_is_a_fault_of_the_configuration(taken: int) -> None:
    with pytest.raises(ConfigError, match=f"gateway.port = {taken}: cannot listen there"):
        async with open_rollout(config_of(CHAT, GatewayConfig(port=taken, start="always"))):
            pass
    needy = config_of(CHAT, GatewayConfig(port=taken), agent=AgentConfig(name="http_agent_by_need"))
    with pytest.raises(ConfigError, match="cannot listen there"):
        async with open_rollout(needy):
            pass
    trajectory = await tried(open_rollout, talk, CHAT, port=taken)
    assert trajectory.outcome == Outcome.FAILED
    assert trajectory.cause is not None
    assert "cannot listen there" in trajectory.cause.message


async def test_always_starts_the_server_with_the_runtime(taken: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        free = sock.getsockname()[1]
    config = config_of(CHAT, GatewayConfig(port=free, start="always", host="127.0.0.1"))
    async with open_rollout(config), httpx.AsyncClient(trust_env=False, verify=False) as client:
        assert (await client.head(f"http://127.0.0.1:{free}/")).status_code == 200


@pytest.mark.parametrize(
    ("host", "told"),
    [("0.0.0.0", "http://127.0.0.1:"), ("::", "http://[::1]:")],
)
async def test_agents_are_told_an_address_that_they_can_reach(host: str, told: str) -> None:
    def ask(client: Client) -> str:
        assert said(client.chat(user("One")))["content"] == "First."
        return client.address.base_url

    trajectory = await tried(open_rollout, ask, CHAT, host=host)
    assert trajectory.outcome == Outcome.COMPLETED
    assert trajectory.extra["result"].startswith(told)


async def test_agents_of_a_proxy_are_told_its_url() -> None:
    config = config_of(CHAT, GatewayConfig(public_url="https://proxy.example/models/"))
    addresses: list[Any] = []

    @agent("by_a_proxy", backend="native")
    async def by_a_proxy(task: AgentTask) -> None:
        addresses.append((task.root_url, task.base_url))

    asked = Prompt(messages=[user("One")], agent_name="by_a_proxy")
    async with open_rollout(config) as runtime:
        await runtime.generate([asked])
    ((root_url, base_url),) = addresses
    assert root_url.startswith("https://proxy.example/models/t/")
    assert base_url == f"{root_url}/v1"


async def test_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "h11", None)
    with pytest.raises(ConfigError) as caught:
        async with open_rollout(config_of(CHAT, GatewayConfig(start="always"))):
            pytest.fail("it opened")
    assert str(caught.value) == (
        "the gateway needs the package h11: pip install 'rollout-rl[gateway]'"
    )


async def test_model_and_aliases_are_what_clients_may_ask_for() -> None:
    def names(client: Client) -> Any:
        served = [
            client.post("/v1/chat/completions", messages=[user("One")], model=name)
            for name in ("policy", "small", "rollout")
        ]
        return client.address.model, [each.status_code for each in served]

    trajectory = await tried(open_rollout, names, CHAT, model="policy", model_aliases=("small",))
    assert trajectory.extra["result"] == ("policy", [200, 200, 404])


async def test_call_that_no_request_may_give_back_is_told_as_text() -> None:
    """Its arguments are nested more deeply than those of a request may be."""
    arguments = '{"a": ' + "[" * 64 + "]" * 64 + "}"
    call = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "add"}}]

    def ask(client: Client) -> tuple[Any, int]:
        first = said(client.chat(user("One"), tools=tools))
        return first, client.chat(user("One"), first, user("Go on"), tools=tools).status_code

    trajectory = await tried(
        open_rollout, ask, QUICK.reply("One", "First. " + call).then("Second.")
    )
    first, status = trajectory.extra["result"]
    assert "tool_calls" not in first
    assert "<tool_call>" in first["content"]
    assert status == 200
    assert [each.purpose for each in trajectory.segments] == ["main"]


async def test_calls_that_generate_nothing_do_not_count() -> None:
    def ask(client: Client) -> list[int]:
        bodies = [
            {"messages": []},
            {"messages": [user("x" * 9999)]},
            {"messages": [user("One")], "n": -1},
            {"messages": [user("One")], "top_logprobs": 20, "logprobs": True, "top_k": -7},
        ]
        refused = [client.post("/v1/chat/completions", **body).status_code for body in bodies]
        return refused + [client.chat(user("One")).status_code for _ in range(3)]

    trajectory = await tried(open_rollout, ask, CHAT, max_calls=2)
    assert trajectory.extra["result"] == [400, 400, 400, 400, 200, 200, 403]
    assert trajectory.limit_source == "gateway.max_calls"


async def test_branches_past_the_limit_are_refused() -> None:
    def ask(client: Client) -> Any:
        got = [client.chat(user(f"One {number}")) for number in range(3)]
        return [each.status_code for each in got], got[2].json()["error"]["message"]

    trajectory = await tried(open_rollout, ask, CHAT, max_branches=1)
    limit = "gateway.max_branches = 1: the trajectory has as many rows beside its main one"
    assert trajectory.extra["result"] == ([200, 200, 403], limit)
    assert [each.purpose for each in trajectory.segments] == ["main", "branch"]


async def test_calls_at_once_past_the_limit_are_refused() -> None:
    def ask(client: Client) -> list[int]:
        statuses: list[int] = []

        def one(number: int) -> None:
            statuses.append(client.chat(user(f"One {number}")).status_code)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(statuses)

    slow = Scenario(seed=3).reply("One", "First. " * 20)
    trajectory = await tried(open_rollout, ask, slow, max_concurrent_calls=1)
    assert trajectory.extra["result"][0] == 200
    assert 403 in trajectory.extra["result"]


@pytest.mark.parametrize("trained", [False, True])
async def test_side_calls_are_trained_on_where_asked_for(trained: bool) -> None:
    def ask(client: Client) -> None:
        title = {"role": "system", "content": "You are a title generator."}
        said(client.chat(user("One")))
        said(client.chat(title, user("One")))

    trajectory = await tried(open_rollout, ask, CHAT, train_side_calls=trained)
    main, side = trajectory.segments
    assert (main.purpose, side.purpose) == ("main", "side")
    assert trajectory.is_trainable(side) is trained


async def test_several_samples_and_their_ids_are_the_engines() -> None:
    def ask(client: Client) -> Any:
        got = client.chat(user("One"), n=3, return_token_ids=True, logprobs=True).json()
        return [(each["token_ids"], each["logprobs"]["content"]) for each in got["choices"]]

    recorder = Recorder()
    trajectory = await tried(recorder.open_rollout, ask, CHAT)
    assert recorder.anomalies() == []
    rows = [segment.transcript.ids().tolist() for segment in trajectory.segments]
    assert len(rows) == 3
    for ids, log_probs in trajectory.extra["result"]:
        assert len(log_probs) == len(ids)
        assert any(row[-len(ids) :] == ids for row in rows)


async def test_log_probs_spell_parts_of_characters_byte_by_byte() -> None:
    def ask(client: Client) -> Any:
        got = client.chat(user("One"), logprobs=True).json()["choices"][0]["logprobs"]["content"]
        return b"".join(bytes(each["bytes"]) for each in got)

    trajectory = await tried(open_rollout, ask, Scenario(seed=3).reply("One", "漢 😀."))
    assert trajectory.extra["result"] == "漢 😀.<|im_end|>".encode()


async def test_agent_without_a_gateway_says_how_to_open_one() -> None:
    async with open_rollout(config_of(CHAT, GatewayConfig())) as runtime:
        runtime.services.gateway = None
        batch = await runtime.generate([prompt_of(talk)])
    cause = batch.trajectories[0].cause
    assert cause is not None
    assert cause.type == AgentError.__name__
    assert "rollout.open_gateway(runtime)" in cause.message


def test_gateway_section_round_trips_and_refuses_what_is_wrong() -> None:
    config = RolloutConfig(gateway=GatewayConfig(port=8081, model_aliases=("small",)))
    assert config_from_dict(dump_config(config)) == config
    for fields, word in (
        ({"port": 70000}, "gateway.port"),
        ({"model_aliases": ("rollout",)}, "gateway.model_aliases"),
        ({"dropped_reasoning": "maybe"}, "gateway.dropped_reasoning"),
        ({"max_calls": 0}, "gateway.max_calls"),
    ):
        with pytest.raises(ConfigError, match=word):
            GatewayConfig(**fields)
