"""Tasks in Harbor's layout: an instruction, an image, and tests that are the reward."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from rollout.errors import ConfigError, SandboxError, SandboxTimeout, SandboxUnsupported
from rollout.limits import AGENT_TIMEOUT_S
from rollout.reward_values import BadRewardError, finite_number
from rollout.types import Prompt, Reward

if TYPE_CHECKING:
    from rollout.config import LimitsConfig
    from rollout.sandbox import Sandbox
    from rollout.types import Trajectory

logger = logging.getLogger("rollout.environments")

#: Providers that build images.
ENGINES = ("docker", "podman")
_LOGS = "/logs/agent /logs/verifier /logs/artifacts"
_TESTS = "(/tests/test.sh) >/logs/verifier/test-stdout.txt 2>&1"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-(.*))?\}", re.DOTALL)
#: What would be another task without it: keys by section, and files.
_REFUSED_KEYS = {
    "": ("steps",),
    "environment": ("gpus", "tpu", "mcp_servers"),
    "verifier": ("environment",),
}
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml")
_REFUSED_FILES = (
    *(f"{folder}/{name}" for folder in ("environment", "tests") for name in _COMPOSE),
    *("steps", "trajectory.json", "tests/Dockerfile"),
)


class TaskDirectory:
    """A Harbor task, or a directory of some: prompts, and the reward of their tests.

    ``open_rollout(config, tools=[ShellTool(), EditTool()], reward=tasks.reward)`` runs the prompts
    of `prompts`, with ``sandbox.provider`` of the configuration as here. What is not supported is
    refused with its name: compose files, several steps, GPUs, MCP servers, an image of the
    verifier's own, and a Dockerfile where `provider` builds none. Of ``storage_mb`` a warning says
    that nothing bounds it.

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
        self.agent_timeout_s = max(
            filter(None, (each.agent_timeout_s for each in tasks)), default=None
        )
        self.verifier_timeout_s = max(each.tests["timeout_s"] for each in tasks)

    def warn_of(self, limits: LimitsConfig) -> None:
        """Log which limits are shorter than what a task leaves its agent or its tests."""
        wanted = {"trajectory_s": self.agent_timeout_s, "reward_s": self.verifier_timeout_s}
        for key, seconds in wanted.items():
            limit = getattr(limits, key)
            if limit is not None and seconds is not None and limit < seconds:
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
        for hook in task.collect:
            user, seconds = _text(hook.get("user")), hook.get("timeout_sec", 60)
            await sandbox.exec(hook["command"], user=user, timeout_s=seconds)
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
    artifacts: list[str]
    collect: list[dict[str, Any]]


def _read_task(path: Path, provider: str) -> _Task:
    try:
        return _read(path, provider)
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"task {path.name}: {error}") from error


def _read(path: Path, provider: str) -> _Task:
    config = tomllib.loads((path / "task.toml").read_text(encoding="utf-8"))
    sections = {name: config.get(name, {}) for name in ("environment", "agent", "verifier")}
    if not all(isinstance(section, Mapping) for section in sections.values()):
        raise ConfigError("expected tables in task.toml")
    environment, agent, verifier = sections.values()
    _refuse_unsupported(path, {**sections, "": config}, provider)
    mode = verifier.get("environment_mode", "shared")
    if mode not in ("shared", "separate"):
        raise ConfigError(f"verifier.environment_mode = {mode!r}: expected 'shared' or 'separate'")
    artifacts = [{"source": a} if isinstance(a, str) else a for a in config.get("artifacts", [])]
    collect = list(verifier.get("collect", []))
    for entry in (*artifacts, *collect):
        if entry.get("service", "main") != "main":
            raise ConfigError(f"service {entry['service']!r} needs compose")
    if environment.get("storage_mb") or environment.get("storage"):
        logger.warning("task %s: environment.storage_mb: nothing bounds it here", path.name)
    sandbox = {
        "image": environment.get("docker_image"),
        "workdir": environment.get("workdir"),
        "user": _text(agent.get("user")),
        "env": _resolve_variables("environment.env", environment.get("env")),
        "network": _read_network(sections),
        "cpus": environment.get("cpus"),
        "memory_mb": environment.get("memory_mb") or _read_size(environment.get("memory")),
        "setup": _write_setup(environment.get("healthcheck")),
        "setup_s": _read_seconds("environment.build_timeout_sec", environment, 600.0),
    }
    return _Task(
        name=path.name,
        path=path,
        instruction=(path / "instruction.md").read_text(encoding="utf-8"),
        sandbox={key: value for key, value in sandbox.items() if value not in (None, {})},
        agent_timeout_s=_read_seconds("agent.timeout_sec", agent, None),
        tests={
            "timeout_s": _read_seconds("verifier.timeout_sec", verifier, 600.0),
            "env": _resolve_variables("verifier.env", verifier.get("env")),
            "user": _text(verifier.get("user")),
        },
        is_separate=mode == "separate",
        artifacts=[entry["source"] for entry in artifacts],
        collect=collect,
    )


def _refuse_unsupported(
    path: Path, sections: Mapping[str, Mapping[str, Any]], provider: str
) -> None:
    for section, names in _REFUSED_KEYS.items():
        for name in names:
            if sections[section].get(name):
                raise ConfigError(f"{section and section + '.'}{name} is not supported")
    for name in _REFUSED_FILES:
        if (path / name).exists():
            raise ConfigError(f"{name}{': compose' * name.endswith(_COMPOSE)} is not supported")
    environment = sections["environment"]
    if str(environment.get("os", "linux")).lower() != "linux":
        raise ConfigError("environment.os: expected 'linux'")
    if not (path / "tests" / "test.sh").is_file():
        raise ConfigError("tests/test.sh is missing")
    if environment.get("docker_image"):
        return
    if not (path / "environment" / "Dockerfile").is_file():
        raise ConfigError("expected environment.docker_image or environment/Dockerfile")
    if provider not in ENGINES:
        raise ConfigError(
            f"it has environment/Dockerfile and no environment.docker_image, and sandbox.provider "
            f"= {provider!r} builds no images; expected 'docker' or 'podman', or an image that is "
            "built and published, in environment.docker_image"
        )


def _read_seconds(name: str, section: Mapping[str, Any], default: Any) -> Any:
    value = section.get(name.partition(".")[2], default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise ConfigError(f"{name} = {value!r}: expected a number > 0")
    return value


def _resolve_variables(where: str, variables: Any) -> dict[str, str]:
    """Values with ``${VAR}`` and ``${VAR:-default}`` taken from this process's environment."""
    resolved = {}
    for name, value in (variables or {}).items():
        match = _VARIABLE.fullmatch(str(value))
        text = str(value) if match is None else os.environ.get(match[1], match[2])
        if text is None:
            raise ConfigError(f"{where}.{name}: {match and match[1]} is not set here")
        resolved[name] = text
    return resolved


def _read_network(sections: Mapping[str, Mapping[str, Any]]) -> str | Sequence[str]:
    """One for all phases: a sandbox's network does not change."""
    environment = sections["environment"]
    default = "public" if environment.get("allow_internet", True) else "no-network"
    mode = environment.get("network_mode", default)
    hosts = environment.get("allowed_hosts", [])
    for name in ("agent", "verifier"):
        own = sections[name].get("network_mode", mode)
        if (own, sections[name].get("allowed_hosts", hosts)) != (mode, hosts):
            raise ConfigError(
                f"{name}.network_mode = {own!r}: expected that of the environment, {mode!r}"
            )
    networks = {"public": "public", "no-network": "none", "allowlist": hosts}
    if not networks.get(mode):
        raise ConfigError(
            f"environment.network_mode = {mode!r}: expected one of "
            f"{', '.join(map(repr, networks))}, the last with allowed_hosts"
        )
    network: str | Sequence[str] = networks[mode]
    return network


def _read_size(text: Any) -> int | None:
    """Megabytes of an older task's ``"2G"``."""
    match = re.fullmatch(r"([\d.]+)\s*([GMK])", str(text).strip().upper())
    if match is None:
        return None
    return max(1, math.ceil(float(match[1]) * {"G": 1024, "M": 1, "K": 1 / 1024}[match[2]]))


def _write_setup(healthcheck: Mapping[str, Any] | None) -> str:
    setup = f"mkdir -p {_LOGS} 2>/dev/null && chmod 777 {_LOGS} || :"
    if healthcheck is None:
        return setup
    interval_s = healthcheck.get("interval_sec", 5.0)
    spare = math.ceil(healthcheck.get("start_period_sec", 0.0) / max(interval_s, 0.1))
    attempts = healthcheck.get("retries", 3) + spare
    check = f"timeout {healthcheck.get('timeout_sec', 30.0)} /bin/sh -c "
    check += shlex.quote(healthcheck["command"])
    wait = f"n=$((n+1)); [ $n -lt {attempts} ] || exit 1; sleep {interval_s}"
    return f"{setup}; n=0; until {check}; do {wait}; done"


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
    try:
        inspect = [engine, "image", "inspect", image]
        if subprocess.run(inspect, capture_output=True, check=False).returncode:
            build = [engine, "build", "--tag", image, str(folder)]
            subprocess.run(build, capture_output=True, check=True, timeout=task.sandbox["setup_s"])
    except subprocess.CalledProcessError as error:
        output = (error.stderr or error.stdout)[-1000:].decode(errors="replace").strip()
        raise SandboxError(f"task {task.name}: {engine} build: {output}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"task {task.name}: {engine} build: {error}") from error
    return image


async def _verify(task: _Task, sandbox: Sandbox) -> Reward:
    """Upload the tests, run them and read what they wrote."""
    await _run_as_root(
        sandbox,
        f"mkdir -p {_LOGS}; chmod 777 {_LOGS}; rm -rf /tests; mkdir /tests; chmod 777 /tests; "
        "rm -rf /logs/verifier/reward.txt /logs/verifier/reward.json",
    )
    await sandbox.upload(task.path / "tests", "/tests")
    await _run_as_root(
        sandbox, "chown -R 0:0 /tests || :; chmod -R a+rX,go-w /tests; chmod a+x /tests/test.sh"
    )
    try:
        result = await sandbox.exec(_TESTS, **task.tests)
    except SandboxTimeout as error:
        seconds = task.tests["timeout_s"]
        raise SandboxError(f"task {task.name}: its tests ran for {seconds:g} s") from error
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
    output = b""
    for user in ("root", None):
        try:
            result = await sandbox.exec(f"set -e; {command}", user=user)
        except SandboxUnsupported:
            continue
        if result.exit_code == 0:
            return
        output = result.stderr
    raise SandboxError(f"cannot put tests into {sandbox.id}: {output.decode(errors='replace')}")


def _read_reward(task: _Task, name: str, text: str) -> Reward:
    """Of several rewards the one named ``reward`` is the trajectory's."""
    who = f"{name} of task {task.name}"
    try:
        given = json.loads(text) if name == "reward.json" else float(text)
        rewards = given if isinstance(given, dict) else {"reward": given}
        numbers = {key: finite_number(value, who) for key, value in rewards.items()}
    except (ValueError, BadRewardError) as error:
        raise SandboxError(f"{who}: {error}: {text[:200]!r}") from error
    if "reward" not in numbers and len(numbers) != 1:
        known = ", ".join(map(repr, numbers))
        raise SandboxError(f"{who} has {known or 'nothing'}; expected a key 'reward'")
    value = numbers["reward"] if "reward" in numbers else next(iter(numbers.values()))
    return Reward(value=value, extra={"rewards": numbers})


def _text(user: Any) -> str | None:
    return None if user is None else str(user)
