"""Tasks in Harbor's layout: an instruction, an image, and tests that are the reward."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import subprocess
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from rollout.chat.reward_values import BadRewardError, finite_number
from rollout.config.checks import PlainMapping, Positive, Texts, validate
from rollout.config.sandbox_section import SandboxSpec, Variables
from rollout.errors import ConfigError, SandboxError, SandboxTimeout, SandboxUnsupported
from rollout.limits import AGENT_TIMEOUT_S
from rollout.sandbox.api import check_exit
from rollout.types import Prompt, Reward

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.chat.trajectory import Trajectory
    from rollout.config import LimitsConfig
    from rollout.sandbox import Sandbox

logger = logging.getLogger("rollout.environments")

_LOGS = "/logs/agent /logs/verifier /logs/artifacts"
_SETUP = f"mkdir -p {_LOGS} 2>/dev/null && chmod 777 {_LOGS} || :"
_TESTS = "(/tests/test.sh) >/logs/verifier/test-stdout.txt 2>&1"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-(.*))?\}", re.DOTALL)
#: Where these stand, the task needs what is not here. A healthcheck waits for services of the
#: image's entry point, which a sandbox does not run.
_UNSUPPORTED_KEYS = {
    "": ("steps",),
    "environment": ("gpus", "tpu", "mcp_servers", "healthcheck"),
    "verifier": ("environment", "collect"),
}
_UNSUPPORTED_FILES = ("*/docker-compose.y*ml", "steps", "trajectory.json", "tests/Dockerfile")
Verification = Literal["shared", "separate"]


class TaskDirectory:
    """A Harbor task, or a directory of some: prompts, and the reward of their tests.

    ``open_rollout(config, tools=[ShellTool(), EditTool()], reward=tasks.reward)`` runs the prompts
    of `prompts`, with ``sandbox.provider`` of the configuration as here. What is not supported is
    refused with its name: compose files, several steps, GPUs, MCP servers, a healthcheck, an image
    or `collect` of the verifier's own, and a Dockerfile where `provider` builds none.

    Args:
        path: A directory with ``task.toml``, or one whose subdirectories have it.
        provider: Who makes the sandboxes; "docker" and "podman" also build a Dockerfile's image.

    Attributes:
        names: Of the tasks: the names of their directories.
        agent_timeout_s: The longest that an agent may have, which ``limits.trajectory_s`` should
            leave it; None where no task bounds it.
        verifier_timeout_s: The longest that tests may take, which ``limits.reward_s`` should leave.

    Raises:
        ConfigError: There is no task, a file of it is missing or wrong, or see above.
    """

    def __init__(self, path: str | os.PathLike[str], *, provider: str = "docker") -> None:
        root = Path(path).resolve()
        is_one = (root / "task.toml").is_file()
        found = [root] if is_one else sorted(each.parent for each in root.glob("*/task.toml"))
        if not found:
            raise ConfigError(f"{path}: expected a directory with task.toml, or one of such")
        self._provider = provider
        self._tasks = {each.name: _read_task(each, provider) for each in found}
        self.names = tuple(self._tasks)
        tasks = self._tasks.values()
        self.agent_timeout_s = max(each.agent_timeout_s or 0.0 for each in tasks) or None
        self.verifier_timeout_s = max(each.tests["timeout_s"] for each in tasks)

    def check_limits(self, limits: LimitsConfig) -> None:
        """Log which limits are shorter than what a task leaves its agent or its tests."""
        wanted = {"trajectory_s": self.agent_timeout_s, "reward_s": self.verifier_timeout_s}
        for key, seconds in wanted.items():
            limit = getattr(limits, key)
            if limit and seconds and limit < seconds:
                logger.warning("limits.%s = %g: tasks want %g s", key, limit, seconds)

    def prompts(self, **fields: Any) -> list[Prompt]:
        """A prompt for each task, whose uid is the task's name; it builds images that are missing.

        Building blocks: call it before the loop runs, or in a thread.

        Args:
            fields: Further ones of every `Prompt`, such as `agent_name`.

        Raises:
            SandboxError: An image could not be built; with the engine's words.
        """
        extra = fields.pop("extra", {})
        made = []
        for task in self._tasks.values():
            image = task.sandbox.get("image") or _build_image(task, self._provider)
            sandbox = {**task.sandbox, "image": image}
            own = {"task": task.name, AGENT_TIMEOUT_S: task.agent_timeout_s, "sandbox": sandbox}
            settings = {"uid": task.name, "data_source": "harbor", **fields}
            made.append(Prompt(task.instruction, extra={**extra, **own}, **settings))
        return made

    async def reward(self, trajectory: Trajectory, sandbox: Any) -> Reward:
        """What the task's tests say: its `value`, and in `extra` all that they wrote.

        With ``environment_mode = "separate"`` they run in a fresh sandbox, to which the task's
        artifacts are copied; else where the agent was, which may have tampered with it.

        Raises:
            SandboxError: They took too long, or left no reward.
        """
        task = self._tasks[trajectory.extra["task"]]
        if not task.is_separate:
            return await _verify(task, sandbox)
        artifacts = [
            path
            for path in dict.fromkeys(["/logs/artifacts", *task.artifacts])
            if (await sandbox.exec(["test", "-e", path])).exit_code == 0
        ]
        async with sandbox.fresh(artifacts=artifacts) as judge:
            return await _verify(task, judge)


@attrs.frozen(kw_only=True)
class _Task:
    name: str
    path: Path
    instruction: str
    #: What goes to the prompt's ``extra["sandbox"]``.
    sandbox: dict[str, Any]
    agent_timeout_s: float | None
    #: How ``test.sh`` is executed.
    tests: dict[str, Any]
    is_separate: bool
    artifacts: tuple[str, ...]


def _read_task(path: Path, provider: str) -> _Task:
    try:
        config = tomllib.loads((path / "task.toml").read_text(encoding="utf-8"))
        environment, agent, verifier = (
            _check(name, PlainMapping, config.get(name, {}))
            for name in ("environment", "agent", "verifier")
        )
        tables = {"": config, "environment": environment, "agent": agent, "verifier": verifier}
        _refuse_unsupported(path, tables, provider)
        setup_s = environment.get("build_timeout_sec", 600.0)
        sandbox = {
            "image": environment.get("docker_image"),
            "workdir": environment.get("workdir"),
            "user": str(agent["user"]) if "user" in agent else None,
            "env": _read_variables("environment", environment) or None,
            "network": _choose_network(tables),
            "cpus": environment.get("cpus"),
            "memory_mb": _read_memory(environment),
            "setup": _SETUP,
            "setup_s": _check("environment.build_timeout_sec", Positive, setup_s),
        }
        sandbox = {key: value for key, value in sandbox.items() if value is not None}
        SandboxSpec(**sandbox)  # refuses what else is wrong
        tests_s = verifier.get("timeout_sec", 600.0)
        mode = verifier.get("environment_mode", "shared")
        artifacts = config.get("artifacts", [])
        if isinstance(artifacts, list):
            artifacts = [a.get("source", a) if isinstance(a, dict) else a for a in artifacts]
        return _Task(
            name=path.name,
            path=path,
            instruction=(path / "instruction.md").read_text(encoding="utf-8"),
            sandbox=sandbox,
            agent_timeout_s=_check("agent.timeout_sec", Positive | None, agent.get("timeout_sec")),
            tests={
                "timeout_s": _check("verifier.timeout_sec", Positive, tests_s),
                "env": _read_variables("verifier", verifier),
                "user": str(verifier["user"]) if "user" in verifier else None,
            },
            is_separate=_check("verifier.environment_mode", Verification, mode) == "separate",
            artifacts=_check("artifacts", Texts, artifacts),
        )
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"task {path.name}: {error}") from error


def _check(name: str, annotation: Any, value: Any) -> Any:
    """The value, where it is as `annotation` wants."""
    value, faults = validate(annotation, value)
    if faults:
        raise ConfigError(str(faults[0].below(name)))
    return value


def _refuse_unsupported(path: Path, tables: Mapping[str, Any], provider: str) -> None:
    for table, names in _UNSUPPORTED_KEYS.items():
        for name in names:
            if tables[table].get(name):
                raise ConfigError(f"{table and table + '.'}{name} is not supported")
    for pattern in _UNSUPPORTED_FILES:
        for file in path.glob(pattern):
            raise ConfigError(f"{file.relative_to(path)} is not supported")
    environment = tables["environment"]
    _check("environment.os", Literal["linux"], environment.get("os", "linux"))
    if not (path / "tests" / "test.sh").is_file():
        raise ConfigError("tests/test.sh is missing")
    if environment.get("docker_image"):
        return
    if not (path / "environment" / "Dockerfile").is_file():
        raise ConfigError("expected environment.docker_image or environment/Dockerfile")
    if provider not in ("docker", "podman"):
        raise ConfigError(
            f"it has environment/Dockerfile, and sandbox.provider = {provider!r} builds no images; "
            "expected 'docker' or 'podman', or a built image in environment.docker_image"
        )


def _read_variables(name: str, table: Mapping[str, Any]) -> dict[str, str]:
    """Its ``env``; ``${VAR}`` and ``${VAR:-default}`` are of this process's environment."""
    resolved = {}
    for key, value in _check(f"{name}.env", Variables, table.get("env", {})).items():
        match = _VARIABLE.fullmatch(value)
        resolved[key] = value if match is None else os.environ.get(match[1], match[2])
        if resolved[key] is None:
            raise ConfigError(f"{name}.env.{key} = {value!r}: expected a variable that is set here")
    return resolved


def _choose_network(tables: Mapping[str, Mapping[str, Any]]) -> Any:
    """One for all phases: a sandbox's network does not change."""
    environment = tables["environment"]
    default = "public" if environment.get("allow_internet", True) else "no-network"
    mode, hosts = environment.get("network_mode", default), environment.get("allowed_hosts", [])
    for name in ("agent", "verifier"):
        own = tables[name].get("network_mode", mode), tables[name].get("allowed_hosts", hosts)
        if own != (mode, hosts):
            raise ConfigError(f"{name}.network_mode = {own[0]!r}: expected the environment's")
    networks = {"public": "public", "no-network": "none", "allowlist": hosts}
    return networks[_check("environment.network_mode", Literal[*networks], mode)]


def _read_memory(environment: Mapping[str, Any]) -> Any:
    """Its ``memory_mb``, or an older task's ``memory``, such as "2G"."""
    if "memory_mb" in environment or "memory" not in environment:
        return environment.get("memory_mb")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([GMK])", str(environment["memory"]).upper())
    if match is None:
        raise ConfigError(f"environment.memory = {environment['memory']!r}: expected such as '2G'")
    return math.ceil(float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2]])


def hash_directory(path: Path) -> str:
    """SHA-256 of its files' names, modes and contents."""
    digest = hashlib.sha256()
    for file in sorted(each for each in path.rglob("*") if each.is_file()):
        mode, size = file.stat().st_mode, file.stat().st_size
        digest.update(f"{file.relative_to(path)}\0{mode}\0{size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _build_image(task: _Task, engine: str) -> str:
    """The image of a task's Dockerfile, named by what it is made of."""
    folder = task.path / "environment"
    image = f"localhost/rollout-task:{hash_directory(folder)[:16]}"
    inspect = [engine, "image", "inspect", image]
    build = [engine, "build", "--tag", image, str(folder)]
    try:
        if subprocess.run(inspect, capture_output=True, check=False).returncode:
            limit_s = task.sandbox["setup_s"]
            subprocess.run(build, capture_output=True, check=True, timeout=limit_s)
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "stderr", None) or b"")[-1000:].decode(errors="replace").strip()
        raise SandboxError(f"task {task.name}: {engine} build: {error} {output}") from error
    return image


async def _verify(task: _Task, sandbox: Sandbox) -> Reward:
    """Upload the tests, run them and read what they wrote."""
    clear = "rm -rf /tests /logs/verifier/reward.txt /logs/verifier/reward.json"
    await _run_as_root(sandbox, f"{_SETUP}; {clear}; mkdir /tests; chmod 777 /tests")
    await sandbox.upload(task.path / "tests", "/tests")
    await _run_as_root(
        sandbox, "chown -R 0:0 /tests || :; chmod -R a+rX,go-w /tests; chmod a+x /tests/test.sh"
    )
    try:
        result = await sandbox.exec(_TESTS, **task.tests)
    except SandboxTimeout as error:
        raise SandboxError(f"task {task.name}: its tests ran for {error.seconds:g} s") from error
    for name in ("reward.json", "reward.txt"):
        try:
            text = (await sandbox.read_file(f"/logs/verifier/{name}")).decode(errors="replace")
        except FileNotFoundError:
            continue
        return _read_reward(task, name, text)
    log = (await sandbox.exec("tail -c 500 /logs/verifier/test-stdout.txt")).stdout
    raise SandboxError(
        f"task {task.name}: its tests wrote no reward (exit code {result.exit_code}): "
        f"{log.decode(errors='replace').strip()}"
    )


async def _run_as_root(sandbox: Sandbox, command: str) -> None:
    """Run it as root, or as whom there is: a provider or an image may know no users."""
    for user in ("root", None):
        with suppress(SandboxUnsupported):
            result = await sandbox.exec(f"set -e; {command}", user=user)
            if result.exit_code == 0:
                return
    check_exit(result, f"putting tests into {sandbox.id}")


def _read_reward(task: _Task, name: str, text: str) -> Reward:
    """Of several rewards the one named ``reward`` is the trajectory's."""
    who = f"{name} of task {task.name}"
    try:
        value = json.loads(text) if name == "reward.json" else float(text)
        rewards = value if isinstance(value, dict) else {"reward": value}
        numbers = {key: finite_number(value, who) for key, value in rewards.items()}
    except (ValueError, BadRewardError) as error:
        raise SandboxError(f"{who}: {error}: {text[:200]!r}") from error
    if "reward" not in numbers and len(numbers) != 1:
        raise SandboxError(f"{who} has {list(numbers)}; expected a key 'reward'")
    first = next(iter(numbers.values()))
    return Reward(value=numbers.get("reward", first), extra={"rewards": numbers})
