"""Adapters to remote providers, against stubs of their SDKs' classes: nothing remote is called."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import remote_stubs
from sandbox_material import processes_with, unique_seconds

from rollout.errors import (
    ConfigError,
    SandboxError,
    SandboxLimit,
    SandboxLost,
    SandboxTimeout,
    SandboxUnavailable,
    SandboxUnsupported,
)
from rollout.sandbox import Sandbox, SandboxSpec, open_provider

pytestmark = [pytest.mark.anyio, pytest.mark.process]
NAMES = ("e2b", "modal", "inspect:stub")
MODULES = ("e2b", "modal", "inspect_ai.util", "inspect_ai.util._sandbox.registry")


@pytest.fixture
def anyio_backend() -> str:
    """What the SDKs run on, in real time."""
    return "asyncio"


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    for module in MODULES:
        monkeypatch.setitem(sys.modules, module, remote_stubs)
    monkeypatch.setenv("STUB_DIRECTORY", str(tmp_path))
    made: list[Any] = []
    monkeypatch.setattr(remote_stubs.AsyncSandbox, "made", made, raising=False)
    return made


@asynccontextmanager
async def opened(name: str, workdir: Path, **settings: Any) -> AsyncIterator[Sandbox]:
    async with open_provider(name) as provider:
        sandbox = await provider.open(SandboxSpec(workdir=str(workdir), **settings))
        try:
            yield sandbox
        finally:
            await sandbox.close()


async def test_exec_gives_what_the_protocol_says(name: str, tmp_path: Path) -> None:
    async with opened(name, tmp_path, env={"A": "a b", "B": "1"}) as sandbox:
        result = await sandbox.exec("printf 'o:%s' \"$A$B\"; pwd >&2; exit 3", env={"B": "2"})
        assert (result.exit_code, result.stdout) == (3, b"o:a b2")
        assert result.stderr.decode() == f"{tmp_path}\n"
        result = await sandbox.exec(["cat"], input=b"in 'q'\n" * 9)
        assert result.stdout == b"in 'q'\n" * 9
        assert (await sandbox.exec(["no-such-program"])).exit_code == 127
        assert (await sandbox.exec(["no-such-program"], timeout_s=9)).exit_code == 127
        with pytest.raises(FileNotFoundError):
            await sandbox.exec("true", cwd="nothing")
        loud = "head -c 3000000 /dev/zero | tr '\\0' y; echo end"
        result = await sandbox.exec(loud, max_output_bytes=10)
        assert (result.stdout, result.truncated) == (b"yyyyyyend\n", True)
        result = await sandbox.exec(loud, max_output_bytes=10, keep="head")
        assert (result.stdout, result.truncated) == (b"y" * 10, True)


async def test_exec_past_its_timeout_is_killed_with_its_children(name: str, tmp_path: Path) -> None:
    seconds = unique_seconds()
    async with opened(name, tmp_path) as sandbox:
        with pytest.raises(SandboxTimeout) as timeout:
            await sandbox.exec(f"echo so far; sleep {seconds} & sleep {seconds}", timeout_s=0.5)
        assert processes_with(seconds) == []
        expected = b"" if name.startswith("inspect") else b"so far\n"
        assert timeout.value.stdout == expected, "inspect_ai gives output at the end alone"


async def test_exec_that_is_cancelled_is_killed(tmp_path: Path) -> None:
    seconds = unique_seconds()
    async with opened("modal", tmp_path) as sandbox:
        with anyio.move_on_after(0.5):
            await sandbox.exec(f"sleep {seconds}")
        assert processes_with(seconds) == []


async def test_files_are_bytes_whatever_the_output_is(name: str, tmp_path: Path) -> None:
    data = bytes(range(256)) * 8192
    async with opened(name, tmp_path, files={"given": b"\xff"}) as sandbox:
        await sandbox.write_file("d/f", data, mode=0o755)
        assert await sandbox.read_file("d/f") == data
        assert await sandbox.read_file("given") == b"\xff"
        with pytest.raises(SandboxLimit):
            await sandbox.read_file("d/f", max_bytes=10)
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("nothing")
        with pytest.raises(IsADirectoryError):
            await sandbox.read_file("d")
        await sandbox.download("d", tmp_path / "down")
        assert Path(tmp_path, "down", "f").read_bytes() == data
        await sandbox.upload(tmp_path / "down", "up")
        assert await sandbox.read_file("up/f") == data


async def test_closed_and_lost_sandboxes_say_so(
    name: str, tmp_path: Path, stubs: list[Any]
) -> None:
    async with opened(name, tmp_path) as sandbox:
        if not name.startswith("inspect"):
            stubs[0].is_alive = False
            with pytest.raises(SandboxLost):
                await sandbox.exec("true")
        await sandbox.close()
        await sandbox.close()
        assert not stubs[0].is_alive
        with pytest.raises(SandboxLost):
            await sandbox.exec("true")


async def test_setup_that_fails_closes_the_sandbox(
    name: str, tmp_path: Path, stubs: list[Any]
) -> None:
    with pytest.raises(SandboxError, match="exit code 7"):
        async with opened(name, tmp_path, setup="exit 7"):
            pytest.fail("it opened")
    assert [box.is_alive for box in stubs] == [False]


async def test_spec_becomes_the_sdks_arguments(tmp_path: Path, stubs: list[Any]) -> None:
    common = {"image": "img", "lifetime_s": 99.5, "labels": {"run": "1"}}
    async with opened("e2b", tmp_path, **common) as sandbox:
        assert await sandbox.expose_port(80) == "https://80-i1.e2b.app"
        assert await sandbox.snapshot() == "s1"
    async with opened("e2b", tmp_path, network=["pypi.org"]):
        pass
    more = {"cpus": 2, "memory_mb": 512, "options": {"ports": [8000], "gpu": "T4"}}
    async with opened("modal", tmp_path, network="public", **common, **more) as sandbox:
        assert await sandbox.expose_port(8000) == "https://t.modal.host"
        with pytest.raises(SandboxUnsupported, match="name port 81"):
            await sandbox.expose_port(81)
        with pytest.raises(SandboxUnsupported, match="one user"):
            await sandbox.exec("true", user="root")
    first, second, third = (box.settings for box in stubs)
    assert first == {
        "template": "img",
        "timeout": 100,
        "metadata": {"run": "1"},
        "allow_internet_access": False,
    }
    assert second["network"] == {"allow_out": ["pypi.org"], "deny_out": ["0.0.0.0/0"]}
    assert third == {
        "app": "app:rollout:True",
        "timeout": 100,
        "block_network": False,
        "image": "registry:img",
        "cpu": 2,
        "memory": 512,
        "tags": {"run": "1"},
        "encrypted_ports": [8000],
        "gpu": "T4",
    }


@pytest.mark.parametrize(
    ("name", "spec", "text"),
    [
        ("e2b", {"cpus": 2}, "e2b has no cpus"),
        ("modal", {"options": {"x": 1}}, r"unknown options\['x'\]; known: ports, gpu"),
        ("inspect:stub", {"image": "i"}, "inspect:stub has no image"),
    ],
)
async def test_what_a_provider_cannot_do_is_refused(
    name: str, spec: dict[str, Any], text: str
) -> None:
    async with open_provider(name) as provider:
        with pytest.raises(SandboxUnsupported, match=text):
            await provider.open(SandboxSpec(**spec))


async def test_inspect_provider_ends_as_its_task_does_and_unknown_ones_are_refused() -> None:
    before = remote_stubs.Environment.task_cleanup_calls
    async with open_provider("inspect:stub"):
        pass
    assert remote_stubs.Environment.task_cleanup_calls == before + 1
    with pytest.raises(ConfigError, match=r"inspect:other.*not recognized"):
        async with open_provider("inspect:other"):
            pytest.fail("it opened")


async def test_missing_sdk_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SandboxUnavailable, match=r"needs the package .*: pip install 'rollout"):
        async with open_provider(name):
            pytest.fail("it opened")


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_trio_is_refused(name: str) -> None:
    with pytest.raises(SandboxUnsupported, match="runs on asyncio alone"):
        async with open_provider(name):
            pytest.fail("it opened")
