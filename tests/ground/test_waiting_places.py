"""Where code waits, as `explain` and errors say it: in the user's own lines, never in a loop's."""

from __future__ import annotations

import asyncio  # noqa: TID251  (what such agents wait for)
import importlib
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import rollout
from rollout import AgentConfig, AgentLoop, Prompt, function_tool, wait_places
from rollout.agents import AgentContext
from rollout.config import LimitsConfig
from rollout.scopes import open_task_group
from rollout.testing import Scenario

pytestmark = pytest.mark.anyio

BOTH = pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
LOOPS = ("trio/", "anyio/", "asyncio/", "outcome/", "_traps", "contextlib.py", "site-packages")

Waiting = Callable[[], Awaitable[object]]
#: How the agent of a test waits, and a function of an installed library.
WAYS: dict[str, Waiting] = {}
release = threading.Event()


def way(function: Waiting) -> Waiting:
    WAYS[function.__name__] = function
    return function


@way
async def in_a_nested_helper() -> None:
    async def helper() -> None:
        await anyio.sleep(60)  # here

    await helper()


@way
async def context_manager() -> None:
    @asynccontextmanager
    async def opened() -> AsyncIterator[None]:
        await anyio.sleep(60)
        yield

    async with opened():  # here
        pass


@way
async def task_group() -> None:
    async with anyio.create_task_group() as tasks:  # here
        tasks.start_soon(anyio.sleep, 60)


@way
async def library() -> None:
    await WAYS["of_a_library"]()  # here


async def wait_for_on_asyncio() -> None:
    await asyncio.wait_for(asyncio.sleep(60), 50)  # here


def line_of(function: Waiting) -> str:
    """File and line that are marked in it."""
    lines, first = inspect.getsourcelines(function)
    (at,) = [number for number, line in enumerate(lines, first) if "# here" in line]
    return f"{__file__}:{at}"


def config(agent: str, **limits: Any) -> Any:
    return (
        Scenario(seed=1)
        .reply("", '<tool_call>\n{"name": "stuck", "arguments": {}}\n</tool_call>')
        .timing(base_s=0.001)
        .config(agent=AgentConfig(name=agent, tool_format="hermes"), limits=LimitsConfig(**limits))
    )


PROMPT = Prompt(messages=[{"role": "user", "content": "Q"}], uid="task-0")


async def explained(waits: Waiting) -> str:
    """What a runtime says while its agent waits so."""

    begun = anyio.Event()

    class Waits(AgentLoop):
        async def run(self, context: AgentContext) -> None:
            begun.set()
            await waits()

    rollout.register_agent("waits")(Waits)
    async with rollout.open_rollout(config("waits")) as runtime, open_task_group() as tasks:
        tasks.start_soon(runtime.generate, [PROMPT])
        await begun.wait()
        await anyio.sleep(0.1)
        text = str(runtime.explain())
        release.set()
        tasks.cancel_scope.cancel()
    release.clear()
    return text


@pytest.fixture
def of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that was installed, whose functions wait deep down."""
    package = tmp_path / "lib" / "site-packages" / "installed_client"
    package.mkdir(parents=True)
    package.joinpath("__init__.py").write_text(
        "import anyio\n"
        "async def read():\n    await anyio.sleep(60)\n"
        "async def get():\n    await read()\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setitem(WAYS, "of_a_library", importlib.import_module("installed_client").get)


@BOTH
@pytest.mark.parametrize("name", [name for name in WAYS if name != "of_a_library"])
@pytest.mark.usefixtures("of_a_library")
async def test_explain_where_an_agent_waits_names_the_line_of_its_own_code(
    anyio_backend: str, name: str
) -> None:
    text = await explained(WAYS[name])

    assert line_of(WAYS[name]) in text
    assert not [each for each in LOOPS if each in text.replace(__file__, "")]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_explain_where_an_agent_waits_for_asyncio_names_the_line_of_its_own_code(
    anyio_backend: str,
) -> None:
    assert line_of(wait_for_on_asyncio) in await explained(wait_for_on_asyncio)


@BOTH
@pytest.mark.usefixtures("of_a_library")
async def test_explain_where_an_installed_agent_waits_names_the_line_of_its_package(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import installed_client

    ours = str(Path(rollout.__file__).parent)
    monkeypatch.setattr(wait_places, "INSTALLED", (*wait_places.INSTALLED, ours))
    rollout.register_agent("installed")(
        type(
            "Installed",
            (AgentLoop,),
            {"run": lambda self, context: installed_client.get()},
        )
    )
    async with rollout.open_rollout(config("installed")) as runtime, open_task_group() as tasks:
        tasks.start_soon(runtime.generate, [PROMPT])
        await anyio.sleep(0.1)
        text = str(runtime.explain())
        tasks.cancel_scope.cancel()
    assert f"{installed_client.__file__}:3" in text


@rollout.agent("waits_on_asyncio")
async def waits_on_asyncio(task: Any) -> None:
    await asyncio.sleep(60)  # here


@rollout.agent("waits_in_a_thread")
def waits_in_a_thread(task: Any) -> None:
    release.wait(1)  # here


@BOTH
@pytest.mark.parametrize("function", [waits_on_asyncio, waits_in_a_thread])
async def test_explain_where_an_agent_over_http_waits_names_the_line_of_its_own_code(
    anyio_backend: str, function: Any
) -> None:
    settings = config(function.__name__)
    async with (
        rollout.open_rollout(settings) as runtime,
        rollout.open_gateway(runtime),
        open_task_group() as tasks,
    ):
        tasks.start_soon(runtime.generate, [PROMPT])
        await anyio.sleep(0.2)
        text = str(runtime.explain())
        release.set()
        tasks.cancel_scope.cancel()
    release.clear()
    assert line_of(function) in text
    assert not [each for each in LOOPS if each in text.replace(__file__, "")]


async def error_of(tool: Any, caplog: pytest.LogCaptureFixture) -> str:
    """What the log says of a tool that could not be ended."""
    limits = {"generation_s": 0.2, "tool_s": 0.1, "turn_s": 0.3, "cleanup_s": 0.2}
    async with rollout.open_rollout(config("tool_agent", **limits), [tool]) as runtime:
        await runtime.generate([PROMPT])
        release.set()
    release.clear()
    return next(each for each in caplog.messages if "did not end within" in each)


@BOTH
async def test_tool_in_a_thread_is_given_up_the_error_names_the_line_of_its_own_code(
    anyio_backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    @function_tool
    async def stuck() -> str:
        """Wait for a thread of anyio's that cannot be abandoned."""
        await anyio.to_thread.run_sync(release.wait, 1)  # here
        return ""

    assert f"it waits at {line_of(stuck)}" in await error_of(stuck, caplog)
