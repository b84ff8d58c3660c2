"""`gateway.sampling`: whose temperature, seed and the like a client's turns are sampled with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness import Recorder
from http_agents import Client, config_of, prompt_of, user
from rollout import Prompt
from rollout.config import GatewayConfig, SamplingConfig
from rollout.testing import Scenario

pytest.importorskip("h11")

pytestmark = [pytest.mark.anyio, pytest.mark.process]

ANSWERS = Scenario(seed=3).timing(base_s=0.001).reply("", "One two three four five six seven.")
#: What each API lets a client set of how tokens are drawn.
WISHES: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "temperature": 0.1,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "seed": 7,
    },
    "responses": {"temperature": 0.1, "top_p": 0.5},
    "messages": {"temperature": 0.1, "top_p": 0.5, "top_k": 3},
}
#: The configuration's, and a prompt's over it.
OWN = SamplingConfig(temperature=0.75, top_p=0.875)
PROMPTS = {"top_k": 40}


@pytest.fixture
def anyio_backend() -> str:
    """Real sockets, so real time."""
    return "trio"


def ask(api: str, *bodies: dict[str, Any]) -> Any:
    """A program that asks once for each body; it returns the statuses and texts of the replies."""
    length = {"chat/completions": "max_completion_tokens", "responses": "max_output_tokens"}
    messages = {"input": "One"} if api == "responses" else {"messages": [user("One")]}
    usual = {length.get(api, "max_tokens"): 5, **messages}

    def program(client: Client) -> Any:
        replies = [client.post(f"/v1/{api}", **{**usual, **body}) for body in bodies]
        return [(got.status_code, got.text) for got in replies]

    return program


async def run(program: Any, policy: str, own: SamplingConfig = OWN, prompts: Any = PROMPTS) -> Any:
    recorder = Recorder()
    gateway = GatewayConfig(sampling=policy)  # type: ignore[arg-type]
    config = config_of(ANSWERS, gateway, sampling=own)
    async with recorder.open_rollout(config) as runtime:
        prompt = prompt_of(program)
        batch = await runtime.generate(
            [Prompt(messages=prompt.messages, extra=prompt.extra, sampling=prompts)]
        )
    records = recorder.runtimes[0].calls[0].all_generations()
    return batch, [each.sampling for each in records]


@pytest.mark.parametrize("api", WISHES)
async def test_pin_samples_with_the_configuration_whatever_the_client_sends(api: str) -> None:
    batch, (sampled,) = await run(ask(api, WISHES[api]), "pin")
    plain, (expected,) = await run(ask(api, {}), "pin")
    assert batch.trajectories[0].extra["result"][0][0] == 200
    assert sampled == expected
    assert (sampled.temperature, sampled.top_p, sampled.top_k) == (0.75, 0.875, 40)
    assert sampled.max_new_tokens == 5
    assert batch.metrics["gateway/pinned_calls"] == 1
    assert "gateway/pinned_calls" not in plain.metrics


@pytest.mark.parametrize("api", WISHES)
async def test_accept_samples_with_what_the_client_sends(api: str) -> None:
    _, (sampled,) = await run(ask(api, WISHES[api]), "accept")
    for name, value in WISHES[api].items():
        if name != "seed":
            assert getattr(sampled, name) == value


@pytest.mark.parametrize("api", WISHES)
async def test_refuse_refuses_only_what_differs(api: str) -> None:
    differing = [{field: value} for field, value in WISHES[api].items()]
    same = {"temperature": 0.75, "top_p": 0.875}
    batch, (sampled,) = await run(ask(api, *differing, same), "refuse")
    *refused, (status, _) = batch.trajectories[0].extra["result"]
    for field, (refusal, text) in zip(WISHES[api], refused, strict=True):
        assert refusal == 400, field
        assert f"{field} = " in text
        assert "gateway.sampling" in text
    assert (status, sampled.temperature, sampled.max_new_tokens) == (200, 0.75, 5)


async def test_pinned_call_that_is_refused_does_not_count() -> None:
    program = ask("chat/completions", {"temperature": 0.1, "stop_token_ids": [-1]})
    batch, sampled = await run(program, "pin")
    assert batch.trajectories[0].extra["result"][0][0] == 400
    assert sampled == []
    assert "gateway/pinned_calls" not in batch.metrics


async def test_pin_leaves_stop_strings_to_the_client() -> None:
    program = ask("chat/completions", {"stop": ["three"], "max_completion_tokens": 50})
    batch, _ = await run(program, "pin")
    ((_, text),) = batch.trajectories[0].extra["result"]
    assert '"content":"One two"' in text.replace(' "', '"')


async def test_stop_id_outside_the_vocabulary_is_refused_by_name() -> None:
    program = ask("chat/completions", {"stop_token_ids": [2_000_000_000]})
    batch, sampled = await run(program, "accept")
    ((status, text),) = batch.trajectories[0].extra["result"]
    error = json.loads(text)["error"]
    assert (status, error["code"], error["param"]) == (400, "invalid_value", "stop_token_ids")
    assert (sampled, batch.trajectories[0].reason) == ([], "never_generated")


@pytest.mark.parametrize("policy", ["accept", "pin"])
async def test_client_that_wants_fewer_likely_tokens_leaves_those_of_the_row(policy: str) -> None:
    program = ask("chat/completions", {"logprobs": True, "top_logprobs": 2})
    batch, (sampled,) = await run(program, policy, SamplingConfig(top_log_probs=5))
    assert sampled.top_log_probs == 5
    ((_, text),) = batch.trajectories[0].extra["result"]
    (choice,) = json.loads(text)["choices"]
    assert {len(each["top_logprobs"]) for each in choice["logprobs"]["content"]} == {2}


async def test_temperature_of_a_client_stands_over_a_greedy_prompt() -> None:
    program = ask("chat/completions", {"temperature": 0.25})
    _, (sampled,) = await run(program, "accept", prompts={"greedy": True})
    assert sampled.temperature == 0.25
