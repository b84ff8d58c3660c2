"""An agent that raises after a call was refused for a length: whose error it is decides."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest

import rollout
from fake_gateway import FakeGateway, fake_gateway
from rollout import AgentTask, GatewayConfig, Outcome, ProgramAgent, Prompt, Trajectory
from rollout.agents import AgentContext
from rollout.agents.services import GatewayAddress
from rollout.config import LengthsConfig, SandboxConfig
from rollout.gateway.calls import ClientMessage, GatewayCall, GatewayError
from rollout.gateway.session import GatewaySession, open_session
from rollout.testing import Scenario

pytestmark = [pytest.mark.anyio, pytest.mark.process]
on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])  # real sockets

LENGTHS = LengthsConfig(prompt=1500, response=3000)
SCENARIO = Scenario(seed=1).reply("", "Well.").timing(base_s=1.0)
LONG = "x" * 5000
Trial = Callable[[GatewaySession], Awaitable[Any]]
TRIAL: list[Trial] = []
URL = "http://127.0.0.1:9/t"


@rollout.agent("raises_after_length", backend="native")
async def raises_after_length(task: AgentTask) -> None:
    await TRIAL[0](SESSIONS[0])


SESSIONS: list[GatewaySession] = []


async def ask(session: GatewaySession, text: str) -> None:
    await session.complete(
        GatewayCall(api="chat", messages=(ClientMessage(role="user", text=text),))
    )


async def refused(session: GatewaySession, text: str = LONG) -> GatewayError:
    """The refusal of a call that is too long."""
    with pytest.raises(GatewayError) as caught:
        await ask(session, text)
    assert caught.value.code == "context_length"
    return caught.value


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> FakeGateway:
    gateway = fake_gateway(monkeypatch)

    @asynccontextmanager
    async def serve(context: AgentContext) -> AsyncIterator[GatewayAddress]:
        async with open_session(context, GatewayConfig()) as session:
            SESSIONS[:] = [session]
            yield GatewayAddress(root_url=URL, api_key="key", model="m")

    monkeypatch.setattr(gateway, "open", serve)
    return gateway


async def tried(trial: Trial) -> Trajectory:
    TRIAL[:] = [trial]
    prompt = Prompt(messages=[{"role": "user", "content": "-"}], agent_name="raises_after_length")
    async with rollout.open_rollout(SCENARIO.config(lengths=LENGTHS)) as runtime:
        return (await runtime.generate([prompt])).trajectories[0]


def is_length(trajectory: Trajectory) -> bool:
    return (trajectory.outcome, trajectory.limit_source) == (Outcome.LENGTH, "lengths.prompt")


def failed_with(trajectory: Trajectory) -> str:
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "agent")
    assert not trajectory.trainable
    assert trajectory.cause is not None
    return trajectory.cause.message


class StatusError(Exception):
    """As SDKs raise it, with the reply's words or without."""

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


def words_of_sdk(error: GatewayError, _session: GatewaySession) -> Exception:
    return StatusError(f"Error code: 400 - {{'error': {{'message': {str(error)!r}}}}}", 400)


def wrapped(error: GatewayError, session: GatewaySession) -> Exception:
    outer = RuntimeError("the model failed")
    outer.__cause__ = ValueError("a framework's")
    outer.__cause__.__cause__ = words_of_sdk(error, session)
    return outer


def http_status(status: int, words: str, path: str) -> httpx.HTTPStatusError:
    response = httpx.Response(
        status, json={"error": words}, request=httpx.Request("POST", f"{URL}/{path}/v1/chat")
    )
    with pytest.raises(httpx.HTTPStatusError) as caught:
        response.raise_for_status()
    return caught.value


def of_httpx(error: GatewayError, session: GatewaySession) -> Exception:
    return http_status(400, str(error), session.path)


def of_urllib(_error: GatewayError, session: GatewaySession) -> Exception:
    url = f"{URL}/{session.path}/v1/chat/completions"
    return urllib.error.HTTPError(url, 400, "Bad Request", {}, None)  # type: ignore[arg-type]


def in_group(error: GatewayError, session: GatewaySession) -> Exception:
    return ExceptionGroup("tasks", [words_of_sdk(error, session), of_urllib(error, session)])


@pytest.mark.parametrize(
    "error_of",
    [words_of_sdk, wrapped, of_httpx, in_group],
)
async def test_error_that_the_refusal_made_ends_as_length(
    gateway: FakeGateway, error_of: Any
) -> None:
    async def trial(session: GatewaySession) -> None:
        await ask(session, "go")
        raise error_of(await refused(session), session)

    assert is_length(await tried(trial))


def bug(_error: GatewayError, _session: GatewaySession) -> Exception:
    return KeyError("bug")


def of_another_server(_error: GatewayError, _session: GatewaySession) -> Exception:
    return http_status(400, "bug", "elsewhere")


def group_with_a_bug(error: GatewayError, session: GatewaySession) -> Exception:
    return ExceptionGroup("bug", [words_of_sdk(error, session), KeyError("bug")])


@pytest.mark.parametrize("error_of", [bug, of_another_server, group_with_a_bug])
async def test_error_of_the_agents_own_after_a_length_fails_with_its_message(
    gateway: FakeGateway, error_of: Any
) -> None:
    raised: list[Exception] = []

    async def trial(session: GatewaySession) -> None:
        await ask(session, "go")
        error = await refused(session)
        raised.append(error_of(error, session))
        raise raised[0]

    message = failed_with(await tried(trial))
    assert "bug" in message or message == str(raised[0])


@pytest.mark.parametrize("order", ["refusal first", "answer first", "answer last"])
async def test_calls_at_once_outcome_does_not_depend_on_which_ends_last(
    gateway: FakeGateway, order: str
) -> None:
    async def trial(session: GatewaySession) -> None:
        errors: list[GatewayError] = []

        async def too_long() -> None:
            await anyio.sleep({"refusal first": 0, "answer first": 100, "answer last": 0.5}[order])
            errors.append(await refused(session))

        async def answered() -> None:
            await anyio.sleep(1 if order == "refusal first" else 0)
            await ask(session, "go")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(too_long)
            tasks.start_soon(answered)
        raise words_of_sdk(errors[0], session)

    assert is_length(await tried(trial))


#: Asks twice, the second time too long; then does what its argument says.
PROGRAM = """
import json, os, sys, urllib.error, urllib.request
def ask(text):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    message = {"role": "user", "content": text}
    body = {"model": os.environ["ROLLOUT_MODEL"], "messages": [message]}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), key))
ask("go").read()
end = sys.argv[1]
try:
    ask("x" * 5000)
except urllib.error.HTTPError as error:
    said = json.load(error)["error"]["message"]
if end == "words":
    print("BadRequestError:", said)
    print("-" * 500)
if end == "bug":
    {}["bug"]
if end == "goes on":
    ask("go on").read()
    sys.exit("on, and a bug")
sys.exit(3)
"""


@on_asyncio
@pytest.mark.usefixtures("own_temporary_directory")
@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("words", None),
        ("bug", "KeyError: 'bug'"),
        ("goes on", "on, and a bug"),
    ],
)
async def test_program_that_fails_after_a_length_ends_as_what_it_prints(
    end: str, message: str | None
) -> None:
    command = [sys.executable, "-c", PROGRAM, end]
    rollout.register_agent("a_long_program")(ProgramAgent(command))
    prompt = Prompt(messages=[{"role": "user", "content": "-"}], agent_name="a_long_program")
    config = (
        Scenario(seed=1)
        .reply("", "Well.")
        .config(
            lengths=LENGTHS,
            gateway=GatewayConfig(start="always"),
            sandbox=SandboxConfig(provider="none"),
        )
    )
    async with rollout.open_rollout(config) as runtime:
        trajectory = (await runtime.generate([prompt])).trajectories[0]
    if message is None:
        assert is_length(trajectory), trajectory.cause
    else:
        assert message in failed_with(trajectory)


@on_asyncio
@pytest.mark.usefixtures("own_temporary_directory")
async def test_program_that_cannot_be_started_says_why() -> None:
    rollout.register_agent("a_large_argument")(ProgramAgent(["/bin/echo", "{prompt}"]))
    said = "L" * 140_000  # Linux takes 128 KiB an argument
    prompt = Prompt(messages=[{"role": "user", "content": said}], agent_name="a_large_argument")
    config = Scenario(seed=1).config(sandbox=SandboxConfig(provider="none"))
    async with rollout.open_rollout(config) as runtime:
        trajectory = (await runtime.generate([prompt])).trajectories[0]
    assert "Argument list too long" in failed_with(trajectory)
