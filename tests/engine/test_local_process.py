"""Engines in real child processes behind real sockets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import trustme

from pools import generate, make_pool
from rollout.config import (
    ChannelConfig,
    InProcessPlacement,
    LocalProcessPlacement,
    ModelConfig,
    RolloutConfig,
    SGLangEngine,
    SimulatedEngine,
)
from rollout.engine import open_engines
from rollout.engine.channel.messages import ChannelSettings
from rollout.engine.channel.sockets import TlsFiles
from rollout.engine.placement.engine_process import LastOutput
from rollout.engine.placement.local_process import LocalProcess
from rollout.engine.placement.placement import CoreSpec
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.engine.routing import Router
from rollout.errors import ConfigError, EngineError
from rollout.testing import simulated_tokenizer
from slow_cases import slow_after

pytestmark = [pytest.mark.anyio, pytest.mark.process]


@pytest.fixture(params=slow_after(1, ["trio", "asyncio"]))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both backends, in real time."""
    return str(request.param)


def children() -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "rollout.engine.channel.child" in process.as_dict(["cmdline"], ad_value=[])["cmdline"]
    ]


def pool_of(
    core: str = "CountingCore",
    replicas: int = 1,
    token_s: float = 0.0,
    **pool: Any,
) -> EnginePool:
    specs = [{"token_s": token_s}] * replicas
    place = LocalProcess()
    return make_pool(f"fake_core:{core}", *specs, placement=place, start_timeout_s=30, **pool)


async def test_generate_many_requests_over_two_processes_each_gets_its_own_tokens() -> None:
    async with pool_of(replicas=2).serving() as pool:
        generations = [Generation() for _ in range(100)]
        async with anyio.create_task_group() as tasks:
            for last, generation in enumerate(generations):
                tasks.start_soon(generate, pool, [last], 20, generation)
        for last, generation in enumerate(generations):
            assert list(generation.ids) == list(range(last + 1, last + 21))
        assert {g.replica for g in generations} == {"engine-0", "engine-1"}
        assert len(children()) == 2
    assert children() == []


async def test_open_core_does_not_start_error_carries_its_words() -> None:
    with pytest.raises(EngineError, match=r"^engine-0: FileNotFoundError: no weights here$"):
        async with pool_of("BrokenCore").serving():
            pytest.fail("opened")
    assert children() == []


@pytest.mark.slow
async def test_open_worker_of_a_core_fails_error_carries_its_exception_too() -> None:
    with pytest.raises(EngineError) as raised:
        async with pool_of("BrokenWorkerCore").serving():
            pytest.fail("opened")
    assert str(raised.value) == (
        "engine-0: RuntimeError: the worker died; before that was said:\n"
        "    ValueError: no kernel for this GPU"
    )


@pytest.mark.parametrize(
    ("line", "is_told"),
    [
        ("torch.cuda.OutOfMemoryError: CUDA out of memory", True),
        ("[2026-11-26 14:23:56] ValueError: no kernel", True),
        ("RuntimeError: Rank 0 died", False),
        ("INFO: no Error: here", False),
    ],
)
def test_last_output_tells_exceptions_that_the_error_does_not(line: str, *, is_told: bool) -> None:
    output = LastOutput()
    output.add("Traceback (most recent call last):")
    output.add(line)
    error = "it did not start: RuntimeError: Rank 0 died\nmore"
    assert (line.rpartition("] ")[2] in output.describe_error(error).removeprefix(error)) is is_told


async def test_open_interpreter_does_not_exist_is_named() -> None:
    pool = make_pool("fake_core:CountingCore", {}, placement=LocalProcess(python="/nowhere/python"))
    with pytest.raises(EngineError, match=r"^engine-0: cannot run '/nowhere/python'"):
        async with pool.serving():
            pytest.fail("opened")


async def test_open_cancelled_while_starting_leaves_no_process() -> None:
    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:

            async def open_it() -> None:
                async with pool_of("EndlessStartCore", replicas=2).serving():
                    pytest.fail("opened")

            tasks.start_soon(open_it)
            while len(children()) < 2:
                await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
    assert children() == []


async def test_child_killed_in_mid_request_fails_it_and_is_replaced() -> None:
    async with pool_of(token_s=0.01, policy="fail").serving() as pool:
        generation = Generation()

        async def kill_soon() -> None:
            while len(generation.ids) < 3:
                await anyio.sleep(0.01)
            children()[0].kill()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill_soon)
            with anyio.fail_after(10), pytest.raises(EngineError, match=r"^engine-0: the "):
                await generate(pool, [5], 1000, generation)
        assert list(generation.ids[:3]) == [6, 7, 8]
        with anyio.fail_after(20):
            assert list((await generate(pool, [1], 2)).ids) == [2, 3]


async def test_child_frozen_is_given_up_after_the_heartbeat_timeout_and_replaced() -> None:
    settings = ChannelSettings(heartbeat_s=0.5, heartbeat_timeout_s=3.0, reconnect_s=0.5)
    async with pool_of(token_s=0.01, policy="fail", settings=settings).serving() as pool:
        (child,) = children()
        child.suspend()
        start = anyio.current_time()
        with anyio.fail_after(10), pytest.raises(EngineError, match=r"^engine-0: silent for"):
            await generate(pool, [5], 1000)
        assert anyio.current_time() - start < 3.0 + 0.5 + 0.5
        with anyio.fail_after(20):
            assert list((await generate(pool, [1], 2)).ids) == [2, 3]
    assert not child.is_running()


# An interpreter that lacks a package says which one, and what to install or set.


async def refusal(config: RolloutConfig) -> str:
    with pytest.raises(EngineError) as caught:
        async with open_engines(config):
            pytest.fail("opened")
    return str(caught.value)


async def test_interpreter_without_sglang_is_named_with_what_to_set(tmp_path: Path) -> None:
    simulated_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    said = await refusal(
        RolloutConfig(engine=SGLangEngine(), model=ModelConfig(path=str(tmp_path)))
    )
    assert said.startswith(
        f"engine-0: engine.kind = 'sglang': SGLang cannot be imported by {sys.executable}, which "
        "runs the engine (No module named 'sglang"
    )
    assert (
        "; install it there, or set placement.python to the interpreter of the environment that "
        "has it"
    ) in said


async def test_interpreter_without_this_library_is_told_what_to_install(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    said = await refusal(
        RolloutConfig(engine=SimulatedEngine(), placement=LocalProcessPlacement(python=str(bare)))
    )
    assert "ended with exit code 1 while starting" in said
    assert said.endswith(
        "placement.python needs the package rollout in its environment: `pip install anyio "
        "msgspec`, and this library by `pip install --no-deps`"
    )


# Encrypted channels, with certificates made here.


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    """A certificate of an authority that the driver trusts."""
    authority = trustme.CA()
    certificate = authority.issue_cert("engine.test")
    paths = [str(tmp_path / name) for name in ("certificate.pem", "key.pem", "authority.pem")]
    certificate.cert_chain_pems[0].write_to_path(paths[0])
    certificate.private_key_pem.write_to_path(paths[1])
    authority.cert_pem.write_to_path(paths[2])
    return TlsFiles(*paths)


def pool_with(files: TlsFiles | None) -> EnginePool:
    return EnginePool(
        placement=LocalProcess(),
        specs=[CoreSpec("fake_core:CountingCore", {}, tls=files)],
        router=Router(),
        start_timeout_s=60,
    )


@pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])
async def test_tls_tokens_arrive_over_an_encrypted_channel(files: TlsFiles) -> None:
    async with pool_with(files).serving() as pool:
        assert list((await generate(pool, [5], 200)).ids) == list(range(6, 206))


async def test_tls_engine_of_another_authority_is_refused(files: TlsFiles, tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(str(tmp_path / "other.pem"))
    other = TlsFiles(files.certificate, files.key, str(tmp_path / "other.pem"))
    with pytest.raises(EngineError, match="certificate verify failed"):
        async with pool_with(other).serving():
            pytest.fail("opened")


async def test_tls_engine_without_its_key_says_which_file(files: TlsFiles) -> None:
    missing = TlsFiles(files.certificate, "/nowhere/key.pem", files.authority)
    with pytest.raises(EngineError) as caught:
        async with pool_with(missing).serving():
            pytest.fail("opened")
    assert str(caught.value) == (
        f"engine-0: channel.tls_certificate = {files.certificate!r} with channel.tls_key = "
        "'/nowhere/key.pem': cannot be used: [Errno 2] No such file or directory"
    )


def test_tls_one_file_alone_is_a_fault() -> None:
    with pytest.raises(ConfigError) as caught:
        ChannelConfig(tls_certificate="c.pem", tls_key="k.pem")
    assert "channel.tls_authority: missing; expected a path beside channel.tls_certificate" in str(
        caught.value
    )


def test_tls_of_engines_in_process_is_a_fault() -> None:
    channel = ChannelConfig(tls_certificate="c.pem", tls_key="k.pem", tls_authority="a.pem")
    with pytest.raises(ConfigError) as caught:
        RolloutConfig(engine=SimulatedEngine(), placement=InProcessPlacement(), channel=channel)
    assert (
        "channel.tls_certificate = 'c.pem': expected None with placement.kind = 'in_process': "
        "nothing leaves the process"
    ) in str(caught.value)
