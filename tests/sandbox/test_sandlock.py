"""Sandboxes of sandlock, where that is installed: what gets out, and what is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import anyio
import psutil
import pytest
from sandbox_material import directories, processes_with

from rollout.errors import SandboxLost, SandboxTimeout, SandboxUnsupported
from rollout.sandbox import SandboxSpec, open_provider

pytest.importorskip("sandlock")
pytestmark = [pytest.mark.anyio, pytest.mark.process]
DRIVER = """
import anyio, sys
from rollout.sandbox import SandboxSpec, open_provider
async def main():
    async with open_provider("sandlock") as provider:
        sandbox = await provider.open(SandboxSpec())
        await sandbox.exec(f"setsid sleep {sys.argv[1]} >/dev/null 2>&1 & kill -STOP $PPID")
anyio.run(main)
"""


@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both backends, in real time."""
    return str(request.param)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = directories()
    yield
    assert psutil.Process().children(recursive=True) == []
    assert directories() <= before


async def wait_for_processes(token: str, count: int) -> None:
    with anyio.fail_after(30):
        while len(processes_with(token)) != count:
            await anyio.sleep(0.02)


def new_token() -> str:
    return str(uuid.uuid4().int % 10**9 + 10**9)  # noqa: TID251


async def test_checked_sandbox_reaches_nothing_outside(tmp_path: Path) -> None:
    await anyio.Path(tmp_path, "secret").write_text("s")
    async with open_provider("sandlock") as provider:
        sandbox = await provider.open(SandboxSpec(max_processes=16))
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            program = f"""
import os, socket
def tell(function, *arguments):
    try: function(*arguments); print("open")
    except OSError as error: print("refused")
tell(socket.create_connection, ("127.0.0.1", {port}), 5)
tell(open, {str(tmp_path / "secret")!r})
tell(open, "/etc/shadow")
tell(open, "/tmp/rollout-escape", "w")
tell(open, "/proc/sys/kernel/core_pattern", "w")
tell(open, "/proc/{os.getpid()}/environ")
tell(os.kill, {os.getpid()}, 0)
tell(lambda: open(f"/proc/{{os.getppid()}}/mem", "r+b"))
print(os.getuid() != 0)
"""
            result = await sandbox.exec(["/usr/bin/python3", "-I", "-S", "-c", program])
        assert result.stdout.decode().splitlines() == ["refused"] * 8 + ["True"]
        forks = "for i in $(seq 40); do sleep 9 & done; echo all"
        assert (await sandbox.exec(forks, timeout_s=30)).stdout == b""
        await sandbox.close()


async def test_host_that_is_killed_or_stopped_from_inside_takes_all_along() -> None:
    async with open_provider("sandlock") as provider:
        for attack in ("KILL", "STOP"):
            sandbox, token = await provider.open(SandboxSpec()), new_token()
            command = f"setsid sleep {token} >/dev/null 2>&1 & sleep 0.2; kill -{attack} $PPID"
            with pytest.raises((SandboxLost, SandboxTimeout)):
                await sandbox.exec(f"{command}; sleep 100", timeout_s=2)
            await sandbox.close()
            await wait_for_processes(token, 0)


async def test_driver_that_is_killed_leaves_nothing_though_the_host_is_stopped() -> None:
    token = new_token()
    before = directories()
    command = [sys.executable, "-c", DRIVER, token]
    with subprocess.Popen(command, start_new_session=True) as driver:
        try:
            await wait_for_processes(token, 1)
        finally:
            os.kill(driver.pid, signal.SIGKILL)
    await wait_for_processes(token, 0)
    with anyio.fail_after(30):
        while directories() - before:
            await anyio.sleep(0.02)


async def test_what_sandlock_cannot_do_is_refused() -> None:
    async with open_provider("sandlock") as provider:
        with pytest.raises(SandboxUnsupported, match="has no image"):
            await provider.open(SandboxSpec(image="debian"))
        sandbox = await provider.open(SandboxSpec())
        with pytest.raises(SandboxUnsupported, match="no server of this machine"):
            await sandbox.host_url("http://127.0.0.1:1")
        await sandbox.close()
