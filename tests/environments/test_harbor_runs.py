"""Harbor's tasks end to end by `rollout run`: in containers by `make test-sandboxes`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harbor_material import write_task

from rollout import Outcome, RolloutBatch, Trajectory
from rollout.cli import main
from slow_cases import slow_but

sys.path.insert(0, str(Path(__file__).parents[1] / "sandbox"))
from sandbox_material import ENGINE, IMAGE

pytestmark = pytest.mark.process

#: Who makes sandboxes, and what a task's environment begins with there.
HERE = "harbor_material:RootedProvider"
PROVIDERS = [
    HERE,
    pytest.param(
        ENGINE or "podman",
        marks=pytest.mark.skipif(not ENGINE, reason="`make test-sandboxes` has containers"),
    ),
]
CONFIG = """
from rollout.config import LengthsConfig, SandboxConfig
from rollout.testing import Scenario, tool_call
from rollout.tools import EditTool, ShellTool

shell, edit = ShellTool(), EditTool()
script = Scenario().timing(base_s=0.001)
for word in ("right", "wrong"):
    script = (
        script.reply(f"Write {word}", tool_call("shell", command="echo old >answer; pwd"))
        .then(tool_call("edit", command="str_replace", path="answer", old_str="old", new_str=word))
        .then("Done.")
    )
script = script.reply("Write slowly", tool_call("shell", command="echo right >answer; sleep 60"))
lengths = LengthsConfig(prompt=4096, response=8192)
config = script.config(sandbox=SandboxConfig(provider=PROVIDER), lengths=lengths)
"""
TEST = """#!/bin/sh
[ -e /logs/artifacts/cheat ] && exit 3
grep -q "$KEY" answer && r=1 || r=0
echo $r >/logs/verifier/reward.txt
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent)])
    return tmp_path


def write(
    folder: Path, provider: str, name: str, words: str, test: str = TEST, **more: str
) -> None:
    config = (
        'artifacts = ["answer", "missing"]\n[verifier]\ntimeout_sec = 60\nenv = {KEY = "right"}\n'
    )
    config += f'environment_mode = "{more.get("mode", "shared")}"\n{more.get("agent", "")}\n'
    config += '[environment]\nnetwork_mode = "no-network"\n'
    files = {"instruction.md": f"{words}\n"}
    if provider == HERE:
        config += 'docker_image = "img"\n'
    else:
        files["environment__Dockerfile"] = f"FROM {IMAGE}\nWORKDIR /app\nRUN echo built >made\n"
        test = test.replace("#!/bin/sh\n", "#!/bin/sh\n[ -e made ] || exit 4\n")
    write_task(folder / "tasks" / name, config, test, **files)


def run(provider: str, *options: str) -> tuple[int, dict[str, Trajectory]]:
    Path("config.py").write_text(CONFIG.replace("PROVIDER", repr(provider)))
    given = ["--prompts", "tasks", "--tools", "config.py", "--out", "out", *options]
    code = main(["run", "config.py", *given])
    batch = RolloutBatch.load("out")
    return code, {each.uid: each for each in batch.trajectories}


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("mode", slow_but(["shared", "separate"], "shared"))
def test_harbor_task_gets_one_for_the_right_patch_and_zero_for_a_wrong_one(
    folder: Path, provider: str, mode: str
) -> None:
    for word in ("right", "wrong"):
        write(folder, provider, word, f"Write {word}.", mode=mode)
    code, ended = run(provider)
    assert code == 0
    assert [(each.uid, each.outcome, each.reward) for each in ended.values()] == [
        ("right", Outcome.COMPLETED, 1.0),
        ("wrong", Outcome.COMPLETED, 0.0),
    ]
    assert ended["right"].metrics["sandboxes"] == 1 + (mode == "separate")


@pytest.mark.parametrize("provider", PROVIDERS)
def test_harbor_agent_timeout_ends_the_agent_and_what_it_did_is_graded(
    folder: Path, provider: str
) -> None:
    seconds = 2 if provider == HERE else 15  # its sandbox opens within them
    write(folder, provider, "slow", "Write slowly.", agent=f"[agent]\ntimeout_sec = {seconds}")
    code, ended = run(provider)
    assert code == 0
    trajectory = ended["slow"]
    assert (trajectory.outcome, trajectory.reason) == (Outcome.LIMIT, "agent_timeout")
    assert (trajectory.reward, trajectory.trainable) == (1.0, True)


@pytest.mark.slow
def test_harbor_task_that_has_another_reward_or_tests_that_are_cut_says_so(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(folder, HERE, "right", "Write right.")
    (folder / "rewards.py").write_text("def score(trajectory):\n    return 0.25\n")
    limits = ["--set", "limits.reward_s=2", "--set", "limits.trajectory_s=50"]
    code, ended = run(HERE, "--reward", "rewards.py:score", *limits)
    assert (code, ended["right"].reward) == (0, 0.25)
    assert "limits.reward_s = 2: tasks want 60 s" in capfd.readouterr().err


def test_harbor_tasks_are_part_of_what_a_resumed_run_must_agree_with(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write(folder, HERE, "right", "Write right.")
    assert run(HERE)[0] == 0
    assert run(HERE, "--resume")[0] == 0
    capfd.readouterr()
    write(folder, HERE, "right", "Write right.", TEST + "# changed\n")
    given = ["--prompts", "tasks", "--tools", "config.py", "--out", "out", "--resume"]
    assert main(["run", "config.py", *given]) != 0
    assert "tasks, SHA-256" in capfd.readouterr().err


def test_harbor_task_that_cannot_run_is_refused_by_name_before_any_work(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_task(folder / "tasks" / "t", "", environment__Dockerfile="FROM x")
    (folder / "config.py").write_text(CONFIG.replace("PROVIDER", repr(HERE)))
    assert main(["run", "config.py", "--prompts", "tasks", "--out", "out"]) == 2
    assert "task t: it has environment/Dockerfile, and" in " ".join(capfd.readouterr().err.split())
    assert not (folder / "out").exists()


EXAMPLE = Path(__file__).parents[2] / "examples" / "swe_agent"


def copy_example(folder: Path, provider: str) -> Path:
    """The example's tasks, on an image that is here."""
    tasks = folder / "tasks"
    shutil.copytree(EXAMPLE / "tasks", tasks)
    environment = tasks / "fix-median" / "environment"
    if provider == HERE:
        config = environment.parent / "task.toml"
        image = f"[environment]\ndocker_image = {str(environment)!r}"
        config.write_text(config.read_text().replace("[environment]", image))
    else:
        file = environment / "Dockerfile"
        first, *rest = file.read_text().splitlines()
        assert first.startswith("FROM ")
        file.write_text("\n".join([f"FROM {IMAGE}", *rest]))
    return tasks


@pytest.mark.slow
@pytest.mark.parametrize("provider", PROVIDERS)
def test_swe_agent_example_solves_its_task(folder: Path, provider: str) -> None:
    tasks = copy_example(folder, provider)
    command = [sys.executable, str(EXAMPLE / "run.py"), "--provider", provider]
    done = subprocess.run(
        [*command, "--tasks", str(tasks)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "fix-median completed, reward 1.0\n"), done.stderr
