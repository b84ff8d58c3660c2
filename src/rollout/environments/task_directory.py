"""Tasks in Harbor's layout: an instruction, an image, and tests that are the reward."""

from __future__ import annotations

import hashlib
import json
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
from rollout.reward_values import BadRewardError, finite_number
from rollout.types import Prompt, Reward

if TYPE_CHECKING:
    from rollout.sandbox import Sandbox
    from rollout.types import Trajectory

#: Providers that build images.
ENGINES = ("docker", "podman")
_LOGS = "/logs/agent /logs/verifier /logs/artifacts"
_TESTS = "(/tests/test.sh) >/logs/verifier/test-stdout.txt 2>&1"
_VARIABLE = re.compile(r"\$\{(\w+)(?::-(.*))?\}", re.DOTALL)
#: What would be another task without it, by section.
_REFUSED = {
    "environment": ("gpus", "tpu", "mcp_servers"),
    "verifier": ("environment",),
    "": ("steps",),
}


@attrs.frozen(kw_only=True)
class _Task:
    name: str
    path: Path
    instruction: str
    #: What goes to the prompt's ``extra["sandbox"]``.
    sandbox: dict[str, Any]
    build_timeout_s: float
    agent_timeout_s: float | None
    timeout_s: float
    env: dict[str, str]
    user: str | None
    is_separate: bool
    artifacts: list[str]
    collect: list[dict[str, Any]]


class TaskDirectory:
    """A Harbor task, or a directory of some: prompts, and the reward of their tests.

    ``open_rollout(config, tools=[ShellTool(), EditTool()], reward=tasks.reward)`` runs the prompts
    of `prompts`, with ``sandbox.provider`` of the configuration as here. What is not supported is
    refused with its name: compose files, several steps, GPUs, MCP servers, an image of the
    verifier's own, and a Dockerfile where `provider` builds none.

    Args:
        path: A directory with ``task.toml``, or one whose subdirectories have it.
        provider: Who makes the sandboxes; "docker" and "podman" also build a Dockerfile's image.

    Attributes:
        names: Of the tasks: the names of their directories.
        agent_timeout_s: The longest that an agent may have, a value for ``limits.trajectory_s``;
            None where a task does not bound it.

    Raises:
        ConfigError: There is no task, a file of it is missing or wrong, or see above.
    """

    def __init__(self, path: str | os.PathLike[str], *, provider: str = "docker") -> None:
        root = Path(path)
        found = [root] if (root / "task.toml").is_file() else []
        found += sorted(each.parent for each in root.glob("*/task.toml") if not found)
        if not found:
            raise ConfigError(f"{root}: expected a directory with task.toml, or one of such")
        self._provider = provider
        self._tasks = {each.resolve().name: _read(each.resolve(), provider) for each in found}
        self.names = tuple(self._tasks)
        limits = [each.agent_timeout_s for each in self._tasks.values()]
        self.agent_timeout_s = max((s for s in limits if s), default=None) if all(limits) else None

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
            sandbox = dict(task.sandbox)
            if "image" not in sandbox:
                sandbox["image"] = _build(task, self._provider)
            own = {"task": task.name, "agent_timeout_s": task.agent_timeout_s, "sandbox": sandbox}
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
            await sandbox.exec(
                hook["command"], user=_text(hook.get("user")), timeout_s=hook.get("timeout_sec", 60)
            )
        artifacts = [
            path
            for path in dict.fromkeys(["/logs/artifacts", *task.artifacts])
            if (await sandbox.exec(["test", "-e", path])).exit_code == 0
        ]
        async with sandbox.fresh(artifacts=artifacts) as judge:
            return await _verify(task, judge)


def _read(path: Path, provider: str) -> _Task:
    try:
        config = tomllib.loads((path / "task.toml").read_text(encoding="utf-8"))
        instruction = (path / "instruction.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"task {path.name}: {error}") from error
    sections = {name: config.get(name, {}) for name in ("environment", "agent", "verifier")}
    if not all(isinstance(section, Mapping) for section in sections.values()):
        raise ConfigError(f"task {path.name}: expected tables in task.toml")
    environment, agent, verifier = sections.values()
    if not (path / "tests" / "test.sh").is_file():
        raise ConfigError(f"task {path.name}: tests/test.sh is missing")
    _refuse(path, {**sections, "": config}, provider)
    user, workdir = _text(agent.get("user")), environment.get("workdir")
    sandbox = {
        "image": environment.get("docker_image"),
        "workdir": workdir,
        "user": user,
        "env": _resolve(path, "environment.env", environment.get("env")),
        "network": _read_network(path, sections),
        "cpus": environment.get("cpus"),
        "memory_mb": environment.get("memory_mb") or _read_size(environment.get("memory")),
        "setup": _write_setup(environment.get("healthcheck")),
        "setup_s": environment.get("build_timeout_sec", 600.0),
    }
    mode = verifier.get("environment_mode", "shared")
    if mode not in ("shared", "separate"):
        raise ConfigError(
            f"task {path.name}: verifier.environment_mode = {mode!r}: expected 'shared' or "
            "'separate'"
        )
    artifacts = [{"source": a} if isinstance(a, str) else a for a in config.get("artifacts", [])]
    for entry in (*artifacts, *verifier.get("collect", [])):
        if entry.get("service", "main") != "main":
            raise ConfigError(f"task {path.name}: service {entry['service']!r} needs compose")
    return _Task(
        name=path.name,
        path=path,
        instruction=instruction,
        sandbox={key: value for key, value in sandbox.items() if value not in (None, {})},
        build_timeout_s=environment.get("build_timeout_sec", 600.0),
        agent_timeout_s=agent.get("timeout_sec"),
        timeout_s=verifier.get("timeout_sec", 600.0),
        env=_resolve(path, "verifier.env", verifier.get("env")),
        user=_text(verifier.get("user")),
        is_separate=mode == "separate",
        artifacts=[entry["source"] for entry in artifacts],
        collect=list(verifier.get("collect", [])),
    )


def _refuse(path: Path, sections: Mapping[str, Mapping[str, Any]], provider: str) -> None:
    for section, names in _REFUSED.items():
        for name in names:
            if sections[section].get(name):
                where = f"{section}.{name}" if section else name
                raise ConfigError(f"task {path.name}: {where} is not supported")
    if str(sections["environment"].get("os", "linux")).lower() != "linux":
        raise ConfigError(f"task {path.name}: environment.os: expected 'linux'")
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        for folder in ("environment", "tests"):
            if (path / folder / name).exists():
                raise ConfigError(f"task {path.name}: {folder}/{name}: compose is not supported")
    for name in ("steps", "trajectory.json", "tests/Dockerfile"):
        if (path / name).exists():
            raise ConfigError(f"task {path.name}: {name} is not supported")
    if sections["environment"].get("docker_image"):
        return
    if not (path / "environment" / "Dockerfile").is_file():
        raise ConfigError(
            f"task {path.name}: expected environment.docker_image or environment/Dockerfile"
        )
    if provider not in ENGINES:
        raise ConfigError(
            f"task {path.name}: it has a Dockerfile and no environment.docker_image, and sandbox "
            f"provider {provider!r} builds no images; build and publish it, and name it there"
        )


def _resolve(path: Path, where: str, variables: Any) -> dict[str, str]:
    """Values with ``${VAR}`` and ``${VAR:-default}`` taken from this process's environment."""
    resolved = {}
    for name, value in (variables or {}).items():
        match = _VARIABLE.fullmatch(str(value))
        text = str(value) if match is None else os.environ.get(match[1], match[2])
        if text is None:
            assert match is not None
            raise ConfigError(f"task {path.name}: {where}.{name}: {match[1]} is not set here")
        resolved[name] = text
    return resolved


def _read_network(path: Path, sections: Mapping[str, Mapping[str, Any]]) -> str | Sequence[str]:
    """One for all phases: a sandbox's network does not change."""
    environment = sections["environment"]
    is_public = environment.get("allow_internet", True)
    usual = environment.get("network_mode", "public" if is_public else "no-network")
    hosts = environment.get("allowed_hosts", [])
    for name in ("agent", "verifier"):
        section = sections[name]
        mode = section.get("network_mode", usual)
        if (mode, section.get("allowed_hosts", hosts)) != (usual, hosts):
            raise ConfigError(
                f"task {path.name}: {name}.network_mode = {mode!r}: expected that of the "
                f"environment, {usual!r}"
            )
    modes = {"public": "public", "no-network": "none", "allowlist": hosts}
    if usual not in modes or not modes[usual]:
        known = ", ".join(map(repr, modes))
        raise ConfigError(
            f"task {path.name}: environment.network_mode = {usual!r}: expected one of {known}, "
            "the last with allowed_hosts"
        )
    return modes[usual]  # type: ignore[no-any-return]


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


def _build(task: _Task, engine: str) -> str:
    """The image of a task's Dockerfile, named by what it is made of."""
    folder = task.path / "environment"
    digest = hashlib.sha256()
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        mode = file.stat().st_mode
        digest.update(f"{file.relative_to(folder)}\0{mode}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    image = f"localhost/rollout-task:{digest.hexdigest()[:16]}"
    try:
        look = [engine, "image", "inspect", image]
        there = subprocess.run(look, capture_output=True, check=False)
        if there.returncode:
            command = [engine, "build", "--tag", image, str(folder)]
            subprocess.run(command, capture_output=True, check=True, timeout=task.build_timeout_s)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout)[-1000:].decode(errors="replace").strip()
        raise SandboxError(f"task {task.name}: {engine} build: {said}") from error
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
        result = await sandbox.exec(_TESTS, user=task.user, env=task.env, timeout_s=task.timeout_s)
    except SandboxTimeout as error:
        raise SandboxError(f"task {task.name}: its tests ran for {task.timeout_s:g} s") from error
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
    said = b""
    for user in ("root", None):
        try:
            result = await sandbox.exec(f"set -e; {command}", user=user)
        except SandboxUnsupported:
            continue
        if result.exit_code == 0:
            return
        said = result.stderr
    raise SandboxError(f"cannot put tests into {sandbox.id}: {said.decode(errors='replace')}")


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
