"""Trajectories that trainers in other processes open, over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import msgspec
import pytest

import http_agents  # noqa: F401  # registers its agents
from forked import rollout_command
from rollout import GatewayConfig, open_rollout
from rollout.config import (
    AgentConfig,
    JournalConfig,
    LengthsConfig,
    RecoveryConfig,
    SchedulingConfig,
    SimulatedEngine,
)
from rollout.testing import Scenario
from slow_cases import slow_after

pytest.importorskip("h11")
from rollout.gateway.gateway import Gateway
from rollout.gateway.served_trajectories import OpenBody, TrajectoryServer
from rollout.gateway.serving import open_trajectory_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

pytestmark = pytest.mark.process
CHAT = Scenario(seed=3).reply("One", "First.").then("Second.").then("Third.")
PROMPT = {"messages": [{"role": "user", "content": "-"}], "uid": "task-7"}
BODY = json.dumps({"prompt": PROMPT}).encode()


@pytest.fixture(params=slow_after(1, ["trio", "asyncio"]))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real sockets, so real time."""
    return str(request.param)


@asynccontextmanager
async def trainer(
    journal: JournalConfig | None = None,
    *,
    scenario: Scenario = CHAT,
    resume: bool = False,
    sections: dict[str, Any] | None = None,
    **gateway: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    config = scenario.config(
        engine=SimulatedEngine(replicas=1),
        lengths=LengthsConfig(prompt=1500, response=3000),
        gateway=GatewayConfig(**gateway),
        journal=journal or JournalConfig(),
        **(sections or {}),
    )
    async with open_trajectory_server(config, "secret", resume=resume) as (_, served):
        async with client_of(served.url) as client:
            yield client


def client_of(url: str) -> httpx.AsyncClient:
    headers = {"authorization": "Bearer secret"}
    return httpx.AsyncClient(
        base_url=url, headers=headers, trust_env=False, verify=False, timeout=30
    )


async def opened(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    got = await client.post("/trajectories", json={"prompt": PROMPT} | fields)
    assert got.status_code == 201, got.text
    body: dict[str, Any] = got.json()
    return body


async def chat(address: dict[str, Any], *messages: Any) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=30) as agent:
        return await agent.post(
            f"{address['base_url']}/chat/completions",
            json={"model": address["model"], "messages": list(messages)},
            headers={"authorization": f"Bearer {address['api_key']}"},
        )


@pytest.mark.anyio
async def test_trajectory_is_opened_finished_and_read() -> None:
    async with trainer() as client:
        address = await opened(client)
        path = f"/trajectories/{address['id']}"
        one = {"role": "user", "content": "One"}
        first = (await chat(address, one)).json()["choices"][0]["message"]
        await chat(address, one, first, {"role": "user", "content": "More"})
        assert (await client.get(path)).json() == {"id": address["id"], "state": "running"}
        assert (await client.get(f"{path}/rows")).status_code == 400
        ended = (await client.post(f"{path}/finish", json={"reward": 0.5})).json()
        assert (ended["state"], ended["outcome"], ended["reward"]) == ("ended", "completed", 0.5)
        again = (await client.post(f"{path}/finish", json={"reward": 1.0})).json()
        assert again["reward"] == 0.5
        assert (await chat(address, one)).json()["error"]["code"] == "trajectory_ended"
        told = (await client.get(f"{path}/rows")).json()
        assert (await client.delete(path)).json()["state"] == "forgotten"
        assert (await client.get(path)).status_code == 410
    (row,) = told["rows"]
    assert (told["uid"], row["purpose"], row["parent"], row["reward"]) == (
        "task-7",
        "main",
        None,
        0.5,
    )
    names = ("ids", "mask", "log_probs", "weight_versions")
    assert len({len(row[name]) for name in names}) == 1
    assert 0 < sum(row["mask"]) < len(row["ids"]) - row["prompt_length"]
    sampled = [v >= 0 for v in row["weight_versions"]]
    assert sampled == [mask == 1 for mask in row["mask"]]


@pytest.mark.anyio
async def test_trajectories_are_served_beside_a_journal_and_after_a_resume(tmp_path: Path) -> None:
    journal = JournalConfig(path=str(tmp_path / "journal"))
    async with trainer(journal) as client:
        await opened(client)
    async with trainer(journal, resume=True) as client:
        address = await opened(client)
        assert (await chat(address, {"role": "user", "content": "One"})).status_code == 200
        path = f"/trajectories/{address['id']}"
        ended = (await client.post(f"{path}/finish", json={"reward": 0.5})).json()
        assert (ended["outcome"], ended["reward"]) == ("completed", 0.5)
        (row,) = (await client.get(f"{path}/rows")).json()["rows"]
    assert sum(row["mask"]) > 0


@pytest.mark.anyio
async def test_finish_without_a_reward_leaves_it_unknown() -> None:
    async with trainer() as client:
        address = await opened(client)
        ended = (await client.post(f"/trajectories/{address['id']}/finish")).json()
        assert (ended["state"], ended["reward"]) == ("ended", None)


@pytest.mark.anyio
async def test_finish_gives_rows_and_tokens_rewards_of_their_own() -> None:
    async with trainer() as client:
        address = await opened(client)
        path = f"/trajectories/{address['id']}"
        one = {"role": "user", "content": "One"}
        await chat(address, one)
        await chat(address, one)
        refused = await client.post(
            f"{path}/finish", json={"reward": 1.0, "segment_values": {"2": 0.0}}
        )
        assert refused.status_code == 400
        assert "segment_values of the segment 2; the trajectory has 2" in refused.text
        assert refused.json()["error"]["param"] == "segment_values"
        short = await client.post(f"{path}/finish", json={"reward": 1.0, "token_values": [1.0]})
        assert short.json()["error"]["param"] == "token_values"
        bare = await client.post(f"{path}/finish", json={"segment_values": {"1": 0.0}})
        assert (bare.status_code, bare.json()["error"]["param"]) == (400, "reward")
        assert (await client.get(path)).json()["reward"] is None
        rows = (await client.get(f"{path}/rows")).json()["rows"]
        assert [row["token_rewards"] for row in rows] == [None, None]
        told = len(rows[0]["ids"]) - rows[0]["prompt_length"]
        values = [0.25] * told
        body = {"reward": 1.0, "segment_values": {"1": -1.0}, "token_values": values}
        assert (await client.post(f"{path}/finish", json=body)).json()["reward"] == 1.0
        rows = (await client.get(f"{path}/rows")).json()["rows"]
    assert [row["reward"] for row in rows] == [1.0, -1.0]
    assert rows[0]["token_rewards"] == [0.0] * rows[0]["prompt_length"] + values
    assert rows[1]["token_rewards"] is None


@pytest.mark.anyio
async def test_finish_gives_turns_rewards_of_their_own() -> None:
    async with trainer() as client:
        address = await opened(client)
        path = f"/trajectories/{address['id']}"
        await chat(address, {"role": "user", "content": "One"})
        bare = await client.post(f"{path}/finish", json={"turn_values": [1.0]})
        assert (bare.status_code, bare.json()["error"]["param"]) == (400, "reward")
        body = {"reward": 1.0, "turn_values": [0.5]}
        assert (await client.post(f"{path}/finish", json=body)).json()["reward"] == 1.0
        [row] = (await client.get(f"{path}/rows")).json()["rows"]
    values = row["token_rewards"]
    assert (sum(values), values.count(0.5)) == (0.5, 1)


@pytest.mark.anyio
async def test_limits_of_one_trajectory_hold() -> None:
    async with trainer() as client:
        address = await opened(client, limits={"max_calls": 1})
        other = await opened(client)
        one = {"role": "user", "content": "One"}
        assert (await chat(address, one)).status_code == 200
        assert (await chat(address, one)).status_code == 403
        with anyio.fail_after(20):
            told = (await client.post(f"/trajectories/{address['id']}/finish")).json()
        assert told["outcome"] == "limit"
        assert [(await chat(other, one)).status_code for _ in range(2)] == [200, 200]
        late = await opened(client, limits={"trajectory_s": 0.05})
        with anyio.fail_after(20):
            path = f"/trajectories/{late['id']}"
            while (told := (await client.get(path)).json())["state"] != "ended":
                await anyio.sleep(0.02)
        assert (told["outcome"], told["limit_source"]) == ("deadline", "limits.trajectory_s")


@pytest.mark.anyio
async def test_limits_of_one_trajectory_raise_none_of_the_configuration() -> None:
    async with trainer(max_calls=1) as client:
        address = await opened(client, limits={"max_calls": 5, "max_branches": 5})
        one = {"role": "user", "content": "One"}
        assert [(await chat(address, one)).status_code for _ in range(2)] == [200, 403]


@pytest.mark.anyio
async def test_lost_engine_is_the_cause_of_a_trajectory_and_runs_nothing_again() -> None:
    recovery = {"recovery": RecoveryConfig(policy="fail")}
    async with trainer(scenario=CHAT.fault(die_after_tokens=8), sections=recovery) as client:
        address = await opened(client)
        got = [await chat(address, {"role": "user", "content": "One"}) for _ in range(3)]
        assert got[-1].json()["error"]["code"] == "trajectory_ended"
        path = f"/trajectories/{address['id']}"
        ended = (await client.post(f"{path}/finish", json={"reward": 1.0})).json()
        assert (ended["outcome"], ended["reason"], ended["reward"]) == ("failed", "engine", None)
        assert ended["cause"]["type"] == "EngineError"
        assert sum((await client.get(f"{path}/rows")).json()["rows"][0]["mask"]) > 0


@pytest.mark.anyio
async def test_agent_that_needs_the_gateway_takes_no_address_from_the_server() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agent = {"agent": AgentConfig(name="http_agent_by_need")}
    async with trainer(port=port, sections=agent) as client:
        await opened(client)


@pytest.mark.anyio
async def test_main_row_without_a_token_is_not_trained() -> None:
    async with trainer() as client:
        address = await opened(client)
        headers = {"authorization": f"Bearer {address['api_key']}", "x-openai-subagent": "b"}
        body = {"messages": [{"role": "user", "content": "One"}]}
        async with httpx.AsyncClient(
            trust_env=False, verify=False, headers=headers, timeout=30
        ) as agent:
            await agent.post(f"{address['base_url']}/chat/completions", json=body)
        await client.post(f"/trajectories/{address['id']}/finish", json={"reward": 1.0})
        rows = (await client.get(f"/trajectories/{address['id']}/rows")).json()["rows"]
    assert [(bool(row["ids"]), row["trainable"]) for row in rows] == [(False, False), (True, True)]


@pytest.mark.anyio
async def test_bad_trajectory_is_refused() -> None:
    bad = [
        ({}, "prompt"),
        ({"prompt": PROMPT, "limit": {}}, "limit"),
        ({"prompt": PROMPT, "limits": {"max_calls": 0}}, "limits.max_calls"),
    ]
    async with trainer() as client:
        for body, word in bad:
            got = await client.post("/trajectories", json=body)
            assert (got.status_code, word in got.text) == (400, True), got.text


@pytest.mark.anyio
async def test_prompt_that_is_rejected_is_an_invalid_value_of_a_field() -> None:
    bad: list[tuple[dict[str, Any], str, str]] = [
        ({"messages": []}, "prompt.messages", "expected at least one message"),
        ({"sampling": {"nope": 1}}, "prompt.sampling.nope", "unknown key"),
        ({"sampling": {"stop": ["x"]}}, "prompt.sampling.stop", "expected stop_token_ids"),
    ]
    async with trainer() as client:
        for fields, param, words in bad:
            got = await client.post("/trajectories", json={"prompt": PROMPT | fields})
            error = got.json()["error"]
            told = (got.status_code, error["code"], error["param"])
            assert told == (400, "invalid_value", param)
            assert words in error["message"]


@pytest.mark.anyio
async def test_wrong_token_opens_nothing() -> None:
    async with trainer() as client:
        for headers in ({"authorization": "Bearer other"}, {"authorization": ""}):
            got = await client.post("/trajectories", json={"prompt": PROMPT}, headers=headers)
            assert got.status_code == 401
        address = await opened(client)
        headers = {"authorization": f"Bearer {address['api_key']}"}
        got = await client.get(f"/trajectories/{address['id']}", headers=headers)
        assert got.status_code == 401


@pytest.mark.anyio
async def test_forgotten_trajectory_that_runs_is_cancelled() -> None:
    async with trainer() as client:
        address = await opened(client)
        assert (await client.delete(f"/trajectories/{address['id']}")).status_code == 200
        with anyio.fail_after(20):
            while (await chat(address, {"role": "user", "content": "One"})).status_code != 403:
                await anyio.sleep(0.02)


@pytest.mark.anyio
async def test_ended_trajectories_past_the_memory_for_them_are_gone() -> None:
    async with trainer(max_ended_bytes=12_500) as client:
        paths = []
        for _ in range(3):
            address = await opened(client)
            assert (await chat(address, {"role": "user", "content": "One"})).status_code == 200
            paths.append(f"/trajectories/{address['id']}")
            await client.post(f"{paths[-1]}/finish", json={"reward": 1.0})
        gone, *kept = [await client.get(f"{path}/rows") for path in paths]
        assert [each.status_code for each in (gone, *kept)] == [410, 200, 200]
        assert gone.json()["error"]["code"] == "gone"
        other = await client.post(f"{paths[0]}/finish")
        unknown = await client.get(f"/trajectories/trajectory-{'0' * 32}")
        assert (other.status_code, unknown.status_code) == (410, 404)


@pytest.mark.anyio
async def test_post_given_up_as_soon_as_it_came_begins_nothing_that_stays() -> None:
    async with open_rollout(CHAT.config()) as runtime, anyio.create_task_group() as tasks:
        runtime.services.gateway = Gateway(GatewayConfig())
        server = TrajectoryServer(runtime, tasks)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await server.open(server.make_id(), msgspec.json.decode(BODY, type=OpenBody))
        await anyio.wait_all_tasks_blocked()
        await until(lambda: runtime.statistics().finished == runtime.statistics().admitted)
        assert runtime.statistics().running == 0


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_sockets_that_close_without_reading_leave_no_trajectory(backend: str) -> None:
    config = CHAT.config(engine=SimulatedEngine(), scheduling=SchedulingConfig(max_in_flight=1))

    def post(url: str) -> socket.socket:
        """A connection that has posted a trajectory and read nothing."""
        host, port = url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)))
        head = "POST /trajectories HTTP/1.1\r\nhost: x\r\nauthorization: Bearer secret\r\n"
        connection.sendall(f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY)
        return connection

    async def main() -> None:
        async with open_trajectory_server(config, "secret") as (runtime, gateway):
            unread = post(gateway.url)
            await until(lambda: runtime.statistics().running == 1)
            waiting = post(gateway.url)
            await until(lambda: runtime.statistics().admitted == 2)
            waiting.close()
            await until(lambda: runtime.statistics().outcomes.get("cancelled") == 1)
            assert unread.recv(1, socket.MSG_PEEK)  # its reply is there
            unread.close()
            await until(lambda: runtime.statistics().outcomes.get("cancelled") == 2)
            async with client_of(gateway.url) as client:
                with anyio.fail_after(10):
                    address = await opened(client)
                    await client.post(f"/trajectories/{address['id']}/finish")
            now = runtime.statistics()
            assert (now.running, now.admitted, now.finished) == (0, 3, 3)

    anyio.run(main, backend=backend)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.005)


@pytest.mark.parametrize("backend", slow_after(1, ["asyncio", "trio"]))
def test_command_serves_until_it_is_terminated(tmp_path: Path, backend: str) -> None:
    config = tmp_path / "config.py"
    config.write_text(
        "from rollout.config import *\n"
        "from rollout.testing import Scenario\n"
        "config = Scenario(seed=3).reply('One', 'First.').config(engine=SimulatedEngine(), "
        f"journal=JournalConfig(path={str(tmp_path / 'journal')!r}))\n"
    )
    arguments = ["serve-gateway", str(config), "--backend", backend, "--resume"]
    environment, pipe = os.environ | {"ROLLOUT_GATEWAY_TOKEN": "secret"}, subprocess.PIPE
    with rollout_command(*arguments, env=environment, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().split()[1]
        assert process.stdout.readline().split(maxsplit=1)[1] == "that of ROLLOUT_GATEWAY_TOKEN\n"
        headers = {"authorization": "Bearer secret"}
        with httpx.Client(
            base_url=url, headers=headers, trust_env=False, verify=False, timeout=30
        ) as client:
            got = client.post("/trajectories", content=BODY)
            assert got.status_code == 201
            process.send_signal(signal.SIGUSR1)
            said = []
            for line in process.stderr:
                said.append(line)
                if "engine-0: serving" in line or "cannot be told" in line:
                    break
            assert any("1 trajectory not ended" in line for line in said), said
            assert any(got.json()["id"] in line for line in said), said
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_python_ends_by_itself_after_the_gateway_was_imported() -> None:
    """Types of bodies are freed at its end; with its debug allocator each fault there shows."""
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", "import rollout.gateway.serving"], check=False
    )
    assert ended.returncode == 0
