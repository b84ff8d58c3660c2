"""Harbor's tasks: what is read, refused, run and graded."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from rollout import Prompt, Trajectory
from rollout.environments import TaskDirectory
from rollout.errors import ConfigError, SandboxError
from rollout.sandbox import Sandbox, SandboxSpec, open_provider

sys.path.insert(0, str(Path(__file__).parents[1] / "sandbox"))
from sandbox_material import ENGINE, IMAGE

pytestmark = pytest.mark.anyio
IMAGED = '[environment]\ndocker_image = "img"\n'
PASSES = "#!/bin/sh\ngrep -q right answer && r=1 || r=0\necho $r >/logs/verifier/reward.txt\n"


@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both backends, in real time."""
    return str(request.param)


def write_task(root: Path, config: str = IMAGED, test: str = PASSES, **files: str) -> Path:
    """A task; `files` by path, with ``__`` for a slash."""
    contents = {"task.toml": config, "instruction.md": "Do it.\n", "tests/test.sh": test}
    contents |= {name.replace("__", "/"): text for name, text in files.items()}
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


class Rooted:
    """A sandbox of `none`, in whose directory ``/logs`` and ``/tests`` are."""

    def __init__(self, sandbox: Sandbox, open_another: Any = None) -> None:
        self.sandbox, self._open = sandbox, open_another
        self.id, self.workdir = sandbox.id, sandbox.workdir

    def place(self, text: str) -> str:
        for name in ("/logs", "/tests"):
            text = text.replace(name, self.workdir + name)
        return text

    async def exec(self, command: Any, **settings: Any) -> Any:
        words = self.place(command) if isinstance(command, str) else list(map(self.place, command))
        return await self.sandbox.exec(words, **settings)

    async def read_file(self, path: str, **settings: Any) -> bytes:
        return await self.sandbox.read_file(self.place(path), **settings)

    async def upload(self, local: Path, path: str) -> None:
        await self.sandbox.upload(local, self.place(path))
        test = self.place(path) + "/test.sh"
        script = (await self.sandbox.read_file(test)).decode()
        await self.sandbox.write_file(test, self.place(script))

    @asynccontextmanager
    async def fresh(self, *, artifacts: list[str]) -> AsyncIterator[Rooted]:
        async with rooted() as other:
            for path in artifacts:
                words = [
                    "cp",
                    "-r",
                    self.place(path),
                    f"{Path(other.workdir, other.place(path)).parent}/",
                ]
                await other.sandbox.exec(["mkdir", "-p", words[-1]])
                assert (await other.sandbox.exec(words, cwd=self.workdir)).exit_code == 0
            yield other


@asynccontextmanager
async def rooted() -> AsyncIterator[Rooted]:
    async with open_provider("none") as provider:
        sandbox = await provider.open(SandboxSpec())
        try:
            yield Rooted(sandbox)
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
storage = "10G"
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
    assert tasks.agent_timeout_s is None
    one, two = tasks.prompts(agent_name="swe", extra={"split": "train"})
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
        (IMAGED, {"environment__docker-compose.yaml": ""}, "docker-compose.yaml: compose is not"),
        (IMAGED + "[[steps]]\nname = 'a'", {}, "steps is not supported"),
        (IMAGED, {"steps__a__instruction.md": ""}, "steps is not supported"),
        ("", {}, "expected environment.docker_image or environment/Dockerfile"),
        ("", {"environment__Dockerfile": ""}, "provider 'modal' builds no images"),
        (IMAGED + "gpus = 1", {}, "environment.gpus is not supported"),
        (IMAGED + 'os = "windows"', {}, "environment.os"),
        (IMAGED + 'network_mode = "some"', {}, "network_mode = 'some'"),
        (IMAGED + 'network_mode = "allowlist"', {}, "the last with allowed_hosts"),
        (IMAGED + '[agent]\nnetwork_mode = "no-network"', {}, "agent.network_mode"),
        (IMAGED + '[verifier]\nenvironment_mode = "x"', {}, "environment_mode = 'x'"),
        (IMAGED + '[verifier.environment]\ndocker_image = "j"', {}, "verifier.environment is not"),
        (IMAGED + '[verifier]\nenv = {K = "${NOT_SET_HERE}"}', {}, "verifier.env.K: NOT_SET_HERE"),
        ("[[", {}, "task t: "),
        ("agent = 1\n" + IMAGED, {}, "expected tables"),
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
        (": >/logs/verifier/reward.txt", "could not convert"),
        ('echo \'{"a": "b"}\' >/logs/verifier/reward.json', "expected a number"),
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


async def test_separate_verification_sees_the_artifacts_alone(tmp_path: Path) -> None:
    config = (
        'artifacts = ["answer", "missing"]\n'
        + IMAGED
        + '[verifier]\nenvironment_mode = "separate"\n'
        + '[[verifier.collect]]\ncommand = "echo right >answer"\n'
    )
    test = "[ ! -e cheat ] && [ -e /logs/artifacts/log ] && " + PASSES.splitlines()[1]
    test += "\necho $r >/logs/verifier/reward.txt"
    tasks = TaskDirectory(write_task(tmp_path, config, test))
    assert (await grade(tasks, "touch cheat /logs/artifacts/log")).value == 1.0


async def test_healthcheck_is_waited_for(tmp_path: Path) -> None:
    config = IMAGED + "[environment.healthcheck]\ncommand = '''{}'''\ninterval_sec = 0.01\n"
    count = "echo x >>tries; test $(wc -l <tries) -ge 3"
    for command, code in ((count, 0), ("false", 1)):
        (prompt,) = TaskDirectory(write_task(tmp_path, config.format(command))).prompts()
        async with rooted() as sandbox:
            result = await sandbox.exec(prompt.extra["sandbox"]["setup"])
            assert result.exit_code == code


def test_image_that_cannot_be_built_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / "bin" / "podman"
    engine.parent.mkdir()
    engine.write_text('#!/bin/sh\n[ "$1" = build ] && echo no such base >&2\nexit 125\n')
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{engine.parent}:{os.environ['PATH']}")
    task = write_task(tmp_path / "t", "", environment__Dockerfile="FROM nothing")
    tasks = TaskDirectory(task, provider="podman")
    with pytest.raises(SandboxError, match="task t: podman build: no such base"):
        tasks.prompts()


@pytest.mark.skipif(not ENGINE, reason="containers are tested by `make test-sandboxes`")
async def test_task_with_a_dockerfile_runs_in_a_container(tmp_path: Path) -> None:
    config = '[environment]\nnetwork_mode = "no-network"\n[verifier]\nenvironment_mode = "{}"\n'
    config += 'env = {{KEY = "right"}}\n'
    test = "#!/bin/sh\npython3 /tests/check.py && r=1 || r=0\necho $r >/logs/verifier/reward.txt\n"
    files = {
        "environment__Dockerfile": f"FROM {IMAGE}\nWORKDIR /app\nRUN echo built >/app/made\n",
        "tests__check.py": "import os\nassert open('/logs/artifacts/a').read() == os.environ['KEY']"
        "\nassert open('made').read() == 'built\\n'\n",
    }
    for mode, agent, value in (("shared", "right", 1.0), ("shared", "wrong", 0.0)):
        task = write_task(tmp_path / mode, config.format(mode), test, **files)
        tasks = TaskDirectory(task, provider=ENGINE)
        (prompt,) = tasks.prompts()
        async with open_provider(ENGINE) as provider:
            sandbox = await provider.open(SandboxSpec().merge(prompt.extra["sandbox"]))
            try:
                await sandbox.exec(f"printf {agent} >/logs/artifacts/a")
                reward = await tasks.reward(trajectory_of(prompt), sandbox)
            finally:
                await sandbox.close()
        assert reward.value == value
