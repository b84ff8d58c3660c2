"""Harbor's tasks: what is read, refused, run and graded."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from harbor_material import IMAGED, RootedSandbox, write_task

from rollout import Prompt, Trajectory
from rollout.environments import TaskDirectory
from rollout.errors import ConfigError, SandboxError
from rollout.sandbox import SandboxSpec, open_provider

pytestmark = [pytest.mark.anyio, pytest.mark.process]


@pytest.fixture
def anyio_backend() -> str:
    """Real time: programs run."""
    return "trio"


@asynccontextmanager
async def rooted() -> AsyncIterator[RootedSandbox]:
    async with open_provider("none") as provider:
        sandbox = await provider.open(SandboxSpec())
        try:
            yield RootedSandbox(sandbox)
        finally:
            await sandbox.close()


def trajectory_of(prompt: Prompt) -> Trajectory:
    class Stub:
        extra = prompt.extra

    return cast("Trajectory", Stub())


async def grade(tasks: TaskDirectory, agent: str = "true") -> Any:
    (prompt,) = tasks.prompts()
    async with rooted() as sandbox:
        await sandbox.exec(prompt.extra["sandbox"]["setup"])
        await sandbox.exec(agent)
        return await tasks.reward(trajectory_of(prompt), sandbox)


def test_prompts_say_what_the_task_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK_TOKEN", "t")
    config = """
version = "1.0"
[agent]
timeout_sec = 120.0
user = 1000
[environment]
docker_image = "img:1"
cpus = 2
memory = "2G"
workdir = "/app"
network_mode = "allowlist"
allowed_hosts = ["pypi.org"]
build_timeout_sec = 30.0
env = {A = "${TASK_TOKEN}", B = "${NOT_SET_HERE:-b}", C = "x${A}", D = "${NOT_SET_HERE:-}"}
"""
    write_task(tmp_path / "one", config)
    write_task(tmp_path / "two", '[environment]\ndocker_image = "i"\nallow_internet = false')
    (tmp_path / "README.md").write_text("")
    tasks = TaskDirectory(tmp_path, provider="e2b")
    assert tasks.names == ("one", "two")
    assert (tasks.agent_timeout_s, tasks.verifier_timeout_s) == (120.0, 600.0)
    one, two = tasks.prompts(agent_name="swe", extra={"split": "train"})
    assert (one.extra["agent_timeout_s"], two.extra["agent_timeout_s"]) == (120.0, None)
    assert (one.uid, one.agent_name, one.extra["split"]) == ("one", "swe", "train")
    assert one.messages == Prompt("Do it.\n").messages
    spec = SandboxSpec().merge(one.extra["sandbox"])
    assert (spec.image, spec.user, spec.workdir, spec.cpus) == ("img:1", "1000", "/app", 2)
    assert (spec.memory_mb, spec.network, spec.setup_s) == (2048, ["pypi.org"], 30.0)
    assert spec.env == {"A": "t", "B": "b", "C": "x${A}", "D": ""}
    assert SandboxSpec().merge(two.extra["sandbox"]).network == "none"
    alone = TaskDirectory(tmp_path / "one")
    assert (alone.names, alone.agent_timeout_s) == (("one",), 120.0)
    assert alone.prompts()[0].extra["sandbox"] == one.extra["sandbox"]


@pytest.mark.parametrize(
    ("config", "files", "text"),
    [
        (
            IMAGED,
            {"environment__docker-compose.yaml": ""},
            "environment/docker-compose.yaml is not supported",
        ),
        (IMAGED + "[[steps]]\nname = 'a'", {}, "steps is not supported"),
        ("", {}, "expected environment.docker_image or environment/Dockerfile"),
        ("", {"environment__Dockerfile": ""}, "sandbox.provider = 'modal' builds no images"),
        (IMAGED + "gpus = 1", {}, "environment.gpus is not supported"),
        (IMAGED + 'network_mode = "some"', {}, "network_mode = 'some'"),
        (IMAGED + '[verifier]\nenvironment_mode = "x"', {}, "environment_mode = 'x'"),
        (IMAGED + '[verifier.environment]\ndocker_image = "j"', {}, "verifier.environment is not"),
        (
            IMAGED + '[verifier]\nenv = {K = "${NOT_SET_HERE}"}',
            {},
            "verifier.env.K = '${NOT_SET_HERE}'",
        ),
        (IMAGED + "[agent]\ntimeout_sec = 0", {}, "agent.timeout_sec = 0: expected a number > 0"),
        ("[[", {}, "task t: "),
        ("agent = 1\n" + IMAGED, {}, "agent = 1: expected a mapping"),
        (IMAGED + "memory = '2 GB'", {}, "environment.memory = '2 GB'"),
        (IMAGED + "cpus = 0", {}, "cpus = 0: expected a number > 0"),
        ("artifacts = [{path = 'a'}]\n" + IMAGED, {}, "artifacts"),
        (IMAGED + "healthcheck = {command = 'true'}", {}, "environment.healthcheck is not"),
        (IMAGED + "[[verifier.collect]]\ncommand = 'true'", {}, "verifier.collect is not"),
    ],
)
def test_task_that_is_not_supported_is_refused_by_name(
    tmp_path: Path, config: str, files: dict[str, str], text: str
) -> None:
    write_task(tmp_path / "t", config, **files)
    with pytest.raises(ConfigError) as refusal:
        TaskDirectory(tmp_path, provider="modal")
    assert "task t: " in str(refusal.value)
    assert text in str(refusal.value)


def test_directory_without_a_task_is_refused(tmp_path: Path) -> None:
    for make in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"expected a directory with task\.toml"):
            TaskDirectory(make)
    (write_task(tmp_path / "t") / "tests" / "test.sh").unlink()
    with pytest.raises(ConfigError, match=r"tests/test\.sh is missing"):
        TaskDirectory(tmp_path)


async def test_reward_is_what_the_tests_write(tmp_path: Path) -> None:
    tasks = TaskDirectory(write_task(tmp_path))
    assert (await grade(tasks, "echo right >answer")).value == 1.0
    assert (await grade(tasks, "echo wrong >answer")).value == 0.0
    # The agent's own reward file and tests are gone before.
    assert (await grade(tasks, "mkdir /tests; echo 1 >/logs/verifier/reward.json")).value == 0.0


@pytest.mark.parametrize(
    ("test", "value"),
    [
        ('echo \'{"reward": 0.5, "style": 1}\' >/logs/verifier/reward.json', 0.5),
        (
            "echo '{\"pass\": 1}' >/logs/verifier/reward.json; echo 3 >/logs/verifier/reward.txt",
            1.0,
        ),
        ("echo 0.25 >/logs/verifier/reward.json", 0.25),
        ("echo $K >/logs/verifier/reward.txt; exit 7", 4.0),
    ],
)
async def test_reward_files_are_read_as_harbor_reads_them(
    tmp_path: Path, test: str, value: float
) -> None:
    tasks = TaskDirectory(write_task(tmp_path, IMAGED + "[verifier.env]\nK = '4'", test))
    assert (await grade(tasks)).value == value


@pytest.mark.parametrize(
    ("test", "text"),
    [
        ("echo broken; exit 3", r"wrote no reward \(exit code 3\): broken"),
        ("echo nan >/logs/verifier/reward.txt", "expected a finite number"),
        ('echo \'{"a": 1, "b": 2}\' >/logs/verifier/reward.json', "expected a key 'reward'"),
        ("echo '{' >/logs/verifier/reward.json", "reward.json of task"),
        ("sleep 100", "its tests ran for 1 s"),
    ],
)
async def test_tests_without_a_reward_are_an_error_and_not_zero(
    tmp_path: Path, test: str, text: str
) -> None:
    tasks = TaskDirectory(write_task(tmp_path, IMAGED + "[verifier]\ntimeout_sec = 1.0", test))
    with pytest.raises(SandboxError, match=text):
        await grade(tasks)


@pytest.mark.parametrize(
    ("builds", "text"),
    [("echo no such base >&2; exit 125", "no such base"), ("exec sleep 60", "timed out after 0.2")],
)
def test_image_that_cannot_be_built_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: str, text: str
) -> None:
    engine = tmp_path / "bin" / "podman"
    engine.parent.mkdir()
    engine.write_text(f'#!/bin/sh\n[ "$1" = build ] || exit 125\n{builds}\n')
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{engine.parent}:{os.environ['PATH']}")
    config = "[environment]\nbuild_timeout_sec = 0.2"
    task = write_task(tmp_path / "t", config, environment__Dockerfile="FROM nothing")
    tasks = TaskDirectory(task, provider="podman")
    with pytest.raises(SandboxError, match=f"task t: podman build: .*{text}"):
        tasks.prompts()
