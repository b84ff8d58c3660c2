"""Programs as agents: what they are given, what comes out of them, and how they end."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest
from anyio.abc import SocketStream
from sandbox_material import (
    ENGINE,
    IMAGE,
    PROVIDERS,
    directories,
    processes_with,
    skip_where_missing,
    unique_seconds,
)

import rollout
from fake_gateway import FakeGateway, fake_gateway
from rollout import (
    AgentError,
    Outcome,
    ProgramAgent,
    Prompt,
    RolloutBatch,
    register_agent,
)
from rollout.config import AgentConfig, GatewayConfig, LimitsConfig, SandboxConfig
from rollout.errors import SandboxUnavailable, SandboxUnsupported
from rollout.sandbox.local import NoneProvider
from rollout.testing import Scenario
from slow_cases import slow_but

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.usefixtures("own_temporary_directory"),
    pytest.mark.process,
]


@pytest.fixture
def anyio_backend() -> str:
    """Real time: programs run."""
    return "asyncio"


#: Asks the gateway that its environment names, as an SDK would.
CLIENT = """
import json, os, sys, urllib.request
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
message = {"role": "user", "content": sys.argv[1]}
body = {"model": os.environ["ROLLOUT_MODEL"], "messages": [message]}
request = urllib.request.Request(url, json.dumps(body).encode(), key)
answer = json.load(urllib.request.urlopen(request))
open("answer.json", "w").write(json.dumps(answer))
print("heard", answer["heard"])
"""


@pytest.fixture(params=slow_but(PROVIDERS, "bubblewrap"))
def provider(request: pytest.FixtureRequest) -> str:
    skip_where_missing(request.param)
    return str(request.param)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> FakeGateway:
    return fake_gateway(monkeypatch)


@asynccontextmanager
async def listening(gateway: FakeGateway) -> AsyncIterator[list[bytes]]:
    """An HTTP server that answers each request with what it heard; the gateway leads there."""
    heard: list[bytes] = []

    async def serve(stream: SocketStream) -> None:
        async with stream:
            request = b""
            while b"\r\n\r\n" not in request:
                request += await stream.receive()
            head, _, body = request.partition(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            while len(body) < length:
                body += await stream.receive()
            heard.append(head + b"\r\n\r\n" + body)
            said = json.dumps({"heard": json.loads(body)["messages"][-1]["content"]}).encode()
            await stream.send(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(said), said)
            )

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        gateway.root_url = f"http://127.0.0.1:{port}/t/1"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, serve)
            yield heard
            tasks.cancel_scope.cancel()


def sandboxes(provider: str) -> SandboxConfig:
    if provider == "container":
        return SandboxConfig(provider=ENGINE, image=IMAGE, workdir="/work")
    return SandboxConfig(provider=provider)


async def ran(
    command: Any,
    *,
    provider: str = "none",
    trajectory_limits: Any = None,
    prompt: str = "go",
    **options: Any,
) -> Any:
    register_agent("a_program")(ProgramAgent(command, **options))
    sections = {} if trajectory_limits is None else {"limits": trajectory_limits}
    config = Scenario().reply("", "Well.").config(sandbox=sandboxes(provider), **sections)
    asked = Prompt(messages=[{"role": "user", "content": prompt}], agent_name="a_program")
    async with rollout.open_rollout(config) as runtime:
        batch: RolloutBatch = await runtime.generate([asked])
    return batch.trajectories[0]


async def test_program_agent_reaches_the_gateway_and_nothing_else(
    gateway: FakeGateway, provider: str
) -> None:
    async with listening(gateway) as heard, await anyio.create_tcp_listener() as other:
        port = other.extra(anyio.abc.SocketAttribute.local_port)
        reach = (
            f"import socket\nfor place in (('127.0.0.1', {port}), ('192.0.2.1', 9)):\n"
            "    try:\n        socket.create_connection(place, 1)\n        print('reached')\n"
            "    except OSError as error:\n        print('no')\n"
        )
        trajectory = await ran(
            "python3 client.py {prompt} && python3 other.py",
            provider=provider,
            prompt="it's $HOME; {api_key}",
            files={"client.py": CLIENT, "other.py": reach},
            collect=["*.json"],
        )
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    program, files = trajectory.extra["program"], trajectory.extra["files"]
    elsewhere = "reached\nno\n" if provider == "none" else "no\nno\n"  # which is no wall
    assert program["output"] == "heard it's $HOME; {api_key}\n" + elsewhere
    assert program["exit_code"] == 0
    assert files == {"answer.json": '{"heard": "it\'s $HOME; {api_key}"}'}
    assert b"Authorization: Bearer key-of-0/prompt-0/0" in heard[0]
    assert heard[0].startswith(b"POST /t/1/v1/chat/completions ")
    assert (gateway.contexts, directories()) == ({}, set())


async def test_program_agent_sees_files_variables_and_nothing_of_the_driver(
    gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    monkeypatch.setenv("SECRET", "driver")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/one.txt").write_text("one")
    (tmp_path / "two.bin").write_bytes(b"\xff\x00")
    trajectory = await ran(
        ["./run.sh", "{uid}"],
        provider=provider,
        env={"LEVEL": "3", "WHO": "{model}"},
        files=lambda task: {
            "run.sh": "#!/bin/sh\necho $1 $LEVEL $WHO [$SECRET]; cat repo/deep/one.txt > out.txt\n",
            "repo": tmp_path,
            "note.txt": task.prompt.messages[0]["content"],
        },
        collect=["repo", "out.txt", "nothing.txt"],
    )
    assert trajectory.extra["program"]["output"] == "prompt-0 3 served-model []\n"
    assert trajectory.extra["files"] == {
        "out.txt": "one",
        "repo/deep/one.txt": "one",
        "repo/two.bin": b"\xff\x00",
    }


async def test_program_agent_exit_code_fails_unless_it_is_not_checked(gateway: FakeGateway) -> None:
    trajectory = await ran("echo broken >&2; exit 3")
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "agent")
    assert trajectory.cause.message == "the program failed: exit code 3: broken"
    assert trajectory.extra["program"]["exit_code"] == 3
    trajectory = await ran("exit 3", check=False)
    assert (trajectory.outcome, trajectory.extra["program"]["exit_code"]) == (
        Outcome.COMPLETED,
        3,
    )
    trajectory = await ran(["no-such-program"])
    assert trajectory.cause.message.startswith("the program failed: exit code 127: ")
    assert "no-such-program: not found" in trajectory.cause.message


async def test_program_agent_keeps_the_end_of_a_long_output(gateway: FakeGateway) -> None:
    trajectory = await ran("echo first >&2; seq 1 200000")
    output = trajectory.extra["program"]["output"]
    assert output.endswith("199999\n200000\n")
    assert len(output) == 2**20


async def test_program_agent_files_that_are_too_much_are_named(gateway: FakeGateway) -> None:
    command = (
        "head -c 2000 /dev/zero > long; echo short > short; ln -s /etc/passwd link; mkfifo pipe"
    )
    trajectory = await ran(command, collect=["*"], max_collected_bytes=1000)
    assert trajectory.extra["files"] == {"short": "short\n"}
    assert trajectory.extra["program"]["left_out"] == ["link", "long", "pipe"]


async def test_program_agent_names_what_it_did_not_collect(
    gateway: FakeGateway, provider: str
) -> None:
    command = "mkdir -p d/e; echo x > d/e/x; ln -s e d/link; ln -s d linked; ln -s nowhere dangling"
    collect = ["d", "linked", "linked/e/x", "dang*", "nothing.txt", "none/*"]
    trajectory = await ran(command, collect=collect, provider=provider)
    assert trajectory.extra["files"] == {"d/e/x": "x\n"}
    assert trajectory.extra["program"]["left_out"] == [
        *("d/link", "dangling", "linked", "linked/e/x", "nothing.txt", "none/*"),
    ]


async def test_program_agent_past_its_timeout_ends_by_that_limit_with_its_files(
    gateway: FakeGateway, provider: str
) -> None:
    seconds = unique_seconds()
    begun = f"echo begun; echo 1 > a; sleep {seconds}"
    trajectory = await ran(begun, timeout_s=2.0, collect=["a"], provider=provider)
    assert processes_with(seconds) == []
    assert trajectory.extra["program"]["output"] == "begun\n"
    assert trajectory.extra["files"] == {"a": "1\n"}
    assert (trajectory.outcome, trajectory.reason, trajectory.limit_source) == (
        Outcome.LIMIT,
        "timeout",
        "ProgramAgent.timeout_s",
    )


SHORT = LimitsConfig(
    generation_s=1.5, tool_s=1.5, turn_s=1.5, trajectory_s=1.5, batch_s=60, cleanup_s=5
)


async def test_program_agent_at_its_deadline_is_killed_with_its_group(
    gateway: FakeGateway, provider: str
) -> None:
    tokens = [unique_seconds() for _ in range(3)]
    one, two, three = tokens
    limits = SHORT if provider != "container" else attrs.evolve(SHORT, trajectory_s=8.0)
    trajectory = await ran(
        f"sleep {one} & setsid sleep {two} & sleep {three}",
        trajectory_limits=limits,
        provider=provider,
    )
    assert (trajectory.outcome, trajectory.reason) == (Outcome.DEADLINE, "trajectory")
    assert [processes_with(token) for token in tokens] == [[], [], []]
    assert (gateway.contexts, directories()) == ({}, set())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": []}, "command = []; expected a text, or a list of a program and its"),
        ({"command": "x", "env": ["a"]}, "env = ['a']; expected a mapping"),
        ({"command": "x", "collect": ["/a"]}, "collect: '/a'; expected a relative path without"),
    ],
)
async def test_program_agent_refuses_wrong_arguments(arguments: Any, message: str) -> None:
    with pytest.raises(AgentError) as caught:
        ProgramAgent(**arguments)
    assert message in str(caught.value)


async def test_program_agent_without_a_sandbox_is_refused_when_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout.sandbox.bubblewrap.find_bwrap", lambda: "/bin/false")
    monkeypatch.setitem(sys.modules, "rollout.sandbox.sandlock", None)
    register_agent("a_program")(ProgramAgent("true"))
    config = Scenario().config(agent=AgentConfig(name="a_program"))
    with pytest.raises(SandboxUnavailable, match="no sandbox for what models write"):
        async with rollout.open_rollout(config):
            pytest.fail("it opened")


class Remote:
    """A provider whose programs reach no server of this machine; else one without walls."""

    name, max_open = "remote", 4

    def __init__(self) -> None:
        self._within = NoneProvider()
        self.check, self.close = self._within.check, self._within.close

    async def open(self, spec: Any) -> Any:
        sandbox: Any = await self._within.open(spec)

        async def refuse(url: str) -> str:
            raise SandboxUnsupported("remote-1: no server of this machine can be reached")

        sandbox._host_url = refuse
        return sandbox


@pytest.mark.parametrize("public_url", [None, "https://gateway.example"])
async def test_program_agent_far_away_needs_a_public_gateway(
    gateway: FakeGateway, public_url: str | None
) -> None:
    register_agent("a_program")(ProgramAgent("echo $OPENAI_BASE_URL"))
    asked = Prompt(messages=[{"role": "user", "content": "go"}], agent_name="a_program")
    config = (
        Scenario()
        .reply("", "Well.")
        .config(
            sandbox=SandboxConfig(provider="test_program_agent:Remote"),
            gateway=GatewayConfig(public_url=public_url),
        )
    )
    gateway.root_url = f"{public_url}/t/1"
    async with rollout.open_rollout(config) as runtime:
        (trajectory,) = (await runtime.generate([asked])).trajectories
    if public_url is None:
        assert trajectory.cause is not None
        assert trajectory.cause.message.endswith(
            "can be reached: set gateway.public_url to an address of the gateway that programs "
            "there reach"
        )
    else:
        assert trajectory.extra["program"]["output"] == "https://gateway.example/t/1/v1\n"


async def test_program_agent_wrong_files_fail_their_trajectory(gateway: FakeGateway) -> None:
    trajectory = await ran("true", files=lambda task: {"a": 5})
    assert trajectory.cause.message == (
        "ProgramAgent: files['a'] = 5; expected text, bytes or a Path"
    )
