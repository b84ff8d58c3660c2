"""The command line, on simulated engines and once on the embedded model."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import rollout
from forked import rollout_command
from own_processes import marked
from rollout import Outcome, RolloutBatch
from rollout.agents import agent_names
from rollout.chat import tool_parser_names
from rollout.cli import commands, foreground, main
from rollout.scopes import open_task_group
from rollout.testing import simulated_tokenizer
from slow_cases import slow_after

pytestmark = pytest.mark.process
CONFIG = """
from rollout.config import *
from rollout.testing import Scenario

scenario = (
    Scenario(seed=1)
    .reply("sum", '<tool_call>\\n{"name": "add", "arguments": {"a": 2, "b": 3}}\\n</tool_call>')
    .then("It is 5.")
    .reply("slow", filler=4000)
    .timing(base_s=BASE_S)
)
config = scenario.config(placement=PLACEMENT())
"""
TOOLS = '''
from __future__ import annotations

import sys

import rollout


@rollout.function_tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def score(trajectory):
    sys.stderr.write("scored\\n")
    sys.stderr.flush()
    return float(trajectory.answer == f"It is {trajectory.prompt.ground_truth}.")


number = 7
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a configuration, tools and prompts in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_config(tmp_path)
    (tmp_path / "tools.py").write_text(TOOLS)
    prompt = {"prompt": "the sum of 2 and 3?", "reward_model": {"ground_truth": "5"}}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(prompt))
    return tmp_path


def write_config(
    folder: Path, *, base_s: float = 0.0, placement: str = "InProcessPlacement"
) -> None:
    text = CONFIG.replace("BASE_S", str(base_s)).replace("PLACEMENT", placement)
    (folder / "config.py").write_text(text)


def run(*options: str, config: str = "config.py", prompts: str = "prompts.jsonl") -> int:
    return main(["run", config, "--prompts", prompts, "--out", "out", *options])


CODE = ("--tools", "tools.py", "--reward", "tools.py:score")


def test_cli_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom rollout.cli import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'anyio', 'rich', 'transformers', 'msgspec', 'numpy'} & {*sys.modules}\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "exit codes:" in done.stdout


def test_cli_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"rollout {rollout.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["demo", "--samples", "0"], "argument --samples: '0': expected an integer ≥ 1"),
        (["demo", "--seed", "x"], "argument --seed: 'x': expected an integer ≥ 0"),
        (
            ["run", "c.py", "--prompts", "p", "--out", "o", "--step", str(2**63)],
            f"argument --step: '{2**63}': expected an integer from 0 to {2**63 - 1}",
        ),
    ],
)
def test_cli_bad_usage_exits_with_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_cli_run_saves_and_summarizes(
    folder: Path, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    assert run(*CODE, "--samples", "3", "--backend", backend) == 0
    output, errors = capsys.readouterr()
    lines = output.splitlines()
    assert lines[0].startswith("rows      3 trajectories of 1 prompt in ")
    assert lines[0].endswith(" s; 3 trainable")
    assert lines[1] == "outcomes  3 completed"
    assert lines[3] == "tools     3 calls, no errors"
    assert lines[4] == "reward    mean 1.000 over 3 rows"
    assert lines[5].startswith("files     out: tensors.safetensors, samples.jsonl, ")
    assert errors.startswith("starting 1 engine (simulated, in_process)\n")
    assert "\n3/3 done · 0 running · " in errors
    batch = RolloutBatch.load(folder / "out")
    assert [(sample.uid, sample.member) for sample in batch.samples] == [
        ("prompt-0", member) for member in range(3)
    ]


def test_cli_run_with_rejected_and_failed_trajectories_exits_with_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [{"prompt": "sum?"}, {"prompt": "sum?", "agent_name": "nobody"}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (folder / "tools.py").write_text(
        TOOLS.replace("return float(", "raise OSError('no judge')  # ")
    )
    assert run(*CODE) == 1
    output = capsys.readouterr().out
    assert "outcomes  1 failed (reward), 1 rejected (unknown_agent)\n" in output
    assert "cause     1 failed (reward): OSError: no judge\n" in output
    outcomes = [sample.outcome for sample in RolloutBatch.load(folder / "out").samples]
    assert outcomes == [Outcome.FAILED, Outcome.REJECTED]


def test_cli_run_whose_every_prompt_names_an_unknown_agent_starts_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [{"prompt": "sum?", "agent_name": "tool_agnet"}] * 100
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    assert run(*CODE) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: no prompt can run, since nobody registered:",
        "  prompts[0].agent_name = 'tool_agnet': no agent is registered as 'tool_agnet'; known: "
        + ", ".join(agent_names())
        + " (and 99 further prompts)",
    ]
    assert not (folder / "out").exists()


def test_cli_run_with_full_directory_starts_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "mine.txt").write_text("precious")
    assert run(*CODE) == 2
    assert capsys.readouterr().err == (
        "error: --out out: is not empty; expected an empty or new directory, or --overwrite\n"
    )
    assert run(*CODE, "--overwrite") == 0
    assert len(RolloutBatch.load(folder / "out")) == 1
    assert (folder / "out" / "mine.txt").read_text() == "precious"


def test_cli_run_with_faulty_prompts_names_the_line_and_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "prompts.jsonl").write_text('{"prompt": "sum?"}\n{"prompt": }\n')
    assert run(*CODE) == 2
    assert capsys.readouterr().err == (
        "error: 1 fault in prompts file prompts.jsonl:\n"
        "  line 2: not readable as JSON: JSON is malformed: invalid character (byte 11)\n"
    )
    assert not (folder / "out").exists()


def test_cli_run_with_missing_model_starts_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--set", "engine.kind=transformers", "--set", "placement.kind=local_process")
    assert run(*options, "--set", "model.path=/no/model") == 2
    assert capsys.readouterr().err == (
        "error: the configuration cannot run here:\n  model.path = '/no/model': no such directory\n"
    )
    assert not (folder / "out").exists()


def test_cli_run_with_engine_that_does_not_start_exits_with_3(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken_core.py").write_text("class Core:\n    pass\n")
    options = ("--set", "engine.kind=custom", "--set", "engine.core=broken_core:Core")
    sys.path.append(str(folder))
    assert run(*options, "--set", "engine.options.size=1") == 3
    assert "TypeError: Core() takes no arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--tools", "config.py"),
            "--tools config.py: no tools; expected functions decorated with "
            "@rollout.function_tool, or Tool objects, at the top level of the file",
        ),
        (("--tools", "broken.py"), "--tools broken.py: line 2: ZeroDivisionError: division by"),
        (("--tools", "syntax.py"), "--tools syntax.py: SyntaxError: "),
        (
            ("--reward", "score"),
            "--reward score: expected path.py:function or package.module:function",
        ),
        (("--reward", "tools.py:number"), "--reward tools.py:number: number cannot be called in"),
        (("--reward", "judge.py:two"), "--reward judge.py:two = two (/"),
        (("--group-reward", "judge.py:two"), "--group-reward judge.py:two = two (/"),
        (("--reward", "no.such:f"), "--reward no.such:f: ModuleNotFoundError: No module named 'no"),
        (("--set", "seed"), "1 fault in the configuration config.py with overrides:\n  override ="),
    ],
)
def test_cli_run_with_bad_code_names_the_option(
    folder: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    (folder / "broken.py").write_text("x = 0\n1 / x\n")
    (folder / "syntax.py").write_text("def\n")
    (folder / "judge.py").write_text("def two(question, answer):\n    return 0\n")
    assert run(*options) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")
    assert not (folder / "out").exists()


def test_cli_reward_of_a_module_is_found_in_the_working_directory(folder: Path) -> None:
    (folder / "cli_judges.py").write_text("def half(trajectory):\n    return 0.5\n")
    assert run("--tools", "tools.py", "--reward", "cli_judges:half") == 0
    assert RolloutBatch.load(folder / "out").samples[0].reward == 0.5


def test_cli_group_reward_and_reward_of_files_run_in_processes(folder: Path) -> None:
    (folder / "rank.py").write_text(
        "import os\n"
        "def own(trajectory):\n    return os.getpid()\n"
        "def rank(group):\n"
        "    assert all(each.reward != os.getppid() for each in group.trajectories)\n"
        "    return [each.member + 0.5 for each in group.trajectories]\n"
    )
    options = ("--reward", "rank.py:own", "--group-reward", "rank.py:rank", "--samples", "2")
    assert run("--tools", "tools.py", *options, "--set", "rewards.processes=1") == 0
    assert [row.reward for row in RolloutBatch.load(folder / "out").samples] == [0.5, 1.5]


def test_cli_check_refuses_a_reward_that_no_process_can_import(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "made.py").write_text("score = (lambda: lambda trajectory: 1.0)()\n")
    assert main(["check", "config.py", "--reward", "made.py:score"]) == 0
    asked = ["check", "config.py", "--reward", "made.py:score", "--set", "rewards.processes=1"]
    assert main(asked) == 2
    said = "reward: rewards.processes = 1 needs a function that its process can import"
    assert said in capsys.readouterr().err


def test_cli_reward_written_for_verl_is_called_as_verl_does(folder: Path) -> None:
    (folder / "verl_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    right = f'It is {ground_truth}.' in solution_str\n"
        "    return {'score': right, 'data_source': data_source, 'index': extra_info['index']}\n"
    )
    prompt = {
        "prompt": "the sum of 2 and 3?",
        "data_source": "sums",
        "reward_model": {"ground_truth": "5"},
        "extra_info": {"index": 7},
    }
    (folder / "prompts.jsonl").write_text(json.dumps(prompt))
    assert main(["check", "config.py", "--reward", "verl_reward.py:compute_score"]) == 0
    assert run("--tools", "tools.py", "--reward", "verl_reward.py:compute_score") == 0
    (sample,) = RolloutBatch.load(folder / "out").samples
    assert sample.reward == 1.0
    assert (sample.extra["data_source"], sample.extra["index"]) == ("sums", 7)


def test_cli_verbose_shows_the_log_and_leaves_it_as_it_was(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import logging

    logger = logging.getLogger("rollout")
    before = (logger.handlers, logger.propagate, logger.level)
    (folder / "tools.py").write_text(
        TOOLS.replace("return float(", "raise OSError('no judge')  # ")
    )
    assert run(*CODE, "-v", "--samples", "3") == 1
    errors = capsys.readouterr().err
    what = "rollout.scheduling: reward of prompt-0 failed: OSError('no judge')"
    assert f"INFO {what}; others of this cause are counted\n" in errors
    assert f"WARNING {what} (3 trajectories)\n" in errors
    assert errors.count("WARNING") == 1
    assert (logger.handlers, logger.propagate, logger.level) == before


def test_cli_check_explains_and_starts_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("rollout.runtime.opening.open_engines", refuse)
    assert main(["check", "config.py", "--set", "sampling.temperature=0.25"]) == 0
    output, errors = capsys.readouterr()
    assert "sampling    temperature 0.25\n" in output
    assert output.endswith("check       can run here; nothing was started\n")
    assert errors == ""


def test_cli_check_lists_everything_that_is_missing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {
        "agent.name": "nobody",
        "agent.tool_format": "smoke",
        "agent.interaction": "teacher",
        "model.chat_template": "no.jinja",
        "model.path": "/no/model",
        "engine.kind": "transformers",
        "placement.kind": "local_process",
        "placement.python": "/no/python",
    }
    options = [text for path, value in wrong.items() for text in ("--set", f"{path}={value}")]
    assert main(["check", "config.py", *options]) == 2
    output, errors = capsys.readouterr()
    assert "model       /no/model, chat template no.jinja\n" in output
    assert "can run here" not in output
    assert errors.splitlines() == [
        "error: model.path = '/no/model': no such directory",
        "error: model.chat_template = 'no.jinja': No such file or directory",
        "error: placement.python = '/no/python': no such interpreter",
        "error: agent.name = 'nobody': no agent is registered as 'nobody'; "
        "known: " + ", ".join(agent_names()),
        "error: agent.tool_format = 'smoke': unknown; known: " + ", ".join(tool_parser_names()),
        "error: agent.interaction = 'teacher': unknown interaction 'teacher'; known: none",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("engine.kind=custom", "engine.core=no.such:Core"),
            "engine.core = 'no.such:Core': there is no module 'no.such' here",
        ),
        (
            ("model.path=/some",),
            "model.path = '/some': engine.kind = 'simulated' expects 'simulated'",
        ),
        (
            ("engine.kind=transformers", "placement.kind=local_process"),
            "1 fault in the configuration config.py with overrides:\n"
            "  model.path = 'simulated': expected a directory, a hub name or "
            "'embedded:smollm2-135m-instruct' for engine.kind = 'transformers', which needs a "
            "model with files",
        ),
        (
            ("model.path=some/model",),
            "1 fault in the configuration config.py with overrides:\n"
            "  model.path = 'some/model': expected 'simulated' for engine.kind = 'simulated', "
            "whose ids are bytes (or leave it out)",
        ),
    ],
)
def test_cli_check_names_an_engine_that_cannot_run(
    folder: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], said: str
) -> None:
    overrides = [text for option in options for text in ("--set", option)]
    assert main(["check", "config.py", *overrides]) == 2
    assert capsys.readouterr().err == f"error: {said}\n"


def test_cli_check_takes_a_tokenizer_alone_where_the_engine_has_its_own_model(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "model").mkdir()
    options = ("engine.kind=custom", "engine.core=rollout.testing:Scenario", "model.path=./model")
    overrides = [text for option in options for text in ("--set", option)]
    assert main(["check", "config.py", *overrides]) == 2
    said = capsys.readouterr().err
    assert said == "error: model.path = './model': the directory holds no tokenizer\n"
    simulated_tokenizer().save_pretrained(folder / "model")
    assert main(["check", "config.py", *overrides]) == 0


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A model's directory with figures and no weights."""
    facts = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "max_position_embeddings": 2048,
    }
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(facts))
    return str(tmp_path / "tiny")


@pytest.mark.parametrize(
    ("gpus", "options", "said"),
    [
        (0, ["engine.device=cuda"], "engine.device = 'cuda': expected a GPU on this machine; "),
        (None, ["engine.device=cuda"], ""),
        (2, ["engine.device=cuda:2"], "engine.device = 'cuda:2': expected 3 GPUs on this machine"),
        (
            3,
            ["engine.kind=sglang", "engine.replicas=2", "engine.tensor_parallel=2"],
            "engine.device = 'cuda': expected 4 GPUs on this machine; there are 3",
        ),
        (
            0,
            ["engine.kind=sglang", "placement.kind=ray", "placement.address=local"],
            "engine.device = 'cuda': expected a GPU on this machine for a Ray cluster started "
            "here; there is none",
        ),
        (0, ["engine.kind=sglang", "placement.kind=ray", "placement.address=10.0.0.1:6379"], ""),
        (
            0,
            ["lengths.prompt=2048"],
            "lengths.prompt = 2048: expected less than the engine's context of 2048 tokens, which "
            "an answer must fit into as well",
        ),
        (
            0,
            ["lengths.prompt=600", "engine.context_length=512"],
            "lengths.prompt = 600: expected less than the engine's context of 512 tokens, ",
        ),
    ],
)
def test_cli_check_refuses_gpus_that_are_not_there_and_prompts_beyond_the_context(
    folder: Path,
    tiny: str,
    gpus: int | None,
    options: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout.cli.gpus.count_gpus", lambda _: gpus)
    monkeypatch.setattr("rollout.cli.check.is_importable", lambda _: True)
    (folder / "mine.toml").write_text("")
    overrides = [f"model.path={tiny}", *options]
    arguments = [text for option in overrides for text in ("--set", option)]
    code = main(["check", "mine.toml", *arguments])
    errors = capsys.readouterr().err
    assert errors.startswith(f"error: {said}" if said else "")
    assert (code, len(errors.splitlines())) == ((2, 1) if said else (0, 0))


def test_cli_check_asks_the_engines_interpreter_for_its_gpus(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollout.cli import gpus

    monkeypatch.setattr(gpus, "_DRIVERS", ("/",))
    python = folder / "python"
    python.write_text("#!/bin/sh\necho 7\n")
    python.chmod(0o755)
    assert gpus.count_gpus(str(python)) == 7
    python.write_text("#!/bin/sh\nexit 1\n")
    assert gpus.count_gpus(str(python)) is None
    monkeypatch.setattr(gpus, "_DRIVERS", ())  # no driver: nothing is asked
    assert gpus.count_gpus(str(python)) == 0


def test_cli_check_knows_what_the_tools_file_defines(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "more.py").write_text(
        TOOLS + "\n\nclass Teacher(rollout.Interaction):\n"
        "    name = 'teacher'\n"
        "    async def respond(self, messages):\n"
        "        return rollout.InteractionTurn('yes', is_done=True)\n"
        "\n\n@rollout.register_agent('cli_test_agent')\n"
        "class Agent(rollout.AgentLoop):\n"
        "    async def run(self, context):\n"
        "        await context.generate()\n"
    )
    options = ("--set", "agent.interaction=teacher", "--set", "agent.name=cli_test_agent")
    assert main(["check", "config.py", "--tools", "more.py", *options]) == 0


def test_cli_check_says_who_makes_sandboxes_and_refuses_what_needs_one_without(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "mine.py").write_text(
        "import rollout\nfrom rollout.tools import PythonTool\nrun = PythonTool('run')\n"
        "rollout.register_agent('cli_program')(rollout.ProgramAgent('true'))\n"
    )
    without_walls = ("--set", "sandbox.provider=none")
    assert main(["check", "config.py", "--tools", "python,shell,edit", *without_walls]) == 0
    assert "\nsandbox     none\n" in capsys.readouterr().out
    monkeypatch.setattr("rollout.sandbox.bubblewrap.find_bwrap", lambda: "/bin/false")
    monkeypatch.setitem(sys.modules, "rollout.sandbox.sandlock", None)
    lacks = "no sandbox for what models write (bubblewrap: "
    assert main(["check", "config.py"]) == 0  # nothing needs one
    assert f"\nsandbox     {lacks}" in capsys.readouterr().out
    needs = [
        ("--tools", "calculator,shell"),
        ("--tools", "mine.py"),
        ("--set", 'tools.builtin=["edit"]'),
        ("--agents", "mine.py", "--set", "agent.name=cli_program"),
        ("--set", "sandbox.provider=bubblewrap"),
    ]
    for arguments in needs:
        assert main(["check", "config.py", *arguments]) == 2, arguments
        said = capsys.readouterr()
        assert "\nsandbox     none can be made here\n" in said.out
        assert said.err.startswith("error: "), said.err
    run = ["run", "config.py", "--prompts", "prompts.jsonl", "--out", "out", "--tools", "shell"]
    assert main(run) == 2
    assert f"error: {lacks}" in capsys.readouterr().err


LONG = "x" * 300
NAMED = ("--prompts", "prompts.jsonl", "--out", "out")


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        (["run", "config.py", "--prompts", LONG, "--out", "out"], 2, "File name too long"),
        (["run", "config.py", *NAMED, "--tools", LONG], 2, f"{LONG} is no file"),
        (
            ["run", "config.py", "--prompts", "prompts.jsonl", "--out", "config.py"],
            2,
            "--out config.py: cannot be written: Not a directory",
        ),
        (["report", LONG], 1, "expected the directory of a run"),
        (["timeline", LONG], 1, "File name too long"),
        (["replay", "config.py", "--trajectory", "a/0"], 2, "is no journal"),
        (["check-template", "./no"], 2, "no such directory"),
        (
            ["run", "config.py", *NAMED, "--set", "observe.path=/dev/null/x"],
            2,
            "observe.path = '/dev/null/x': cannot be written: /dev/null is no directory",
        ),
    ],
)
def test_cli_odd_path_is_told_with_the_documented_code(
    folder: Path, capsys: pytest.CaptureFixture[str], command: list[str], code: int, said: str
) -> None:
    assert main(command) == code
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert said in errors
    assert not (folder / "out").exists()


def test_cli_batch_that_no_memory_holds_is_refused_before_any_work(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--set", f"lengths.response={10**6}", "--samples", str(10**8)) == 2
    assert "\n  lengths.prompt + lengths.response = 100" in capsys.readouterr().err
    assert main(["check", "config.py", "--set", f"lengths.response={10**13}"]) == 2
    assert "error: lengths.prompt + lengths.response = 100" in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_cli_path_that_the_system_refuses_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "private/x")

    monkeypatch.setitem(commands._COMMANDS, "check", refuse)
    assert main(["check", "config.py"]) == 2
    assert capsys.readouterr().err == "error: private/x: Permission denied\n"


def test_cli_sigterm_in_a_task_of_the_event_loop_itself_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def wait() -> None:
        trio.lowlevel.current_trio_token().run_sync_soon(signal.raise_signal, signal.SIGTERM)
        await trio.sleep_forever()

    monkeypatch.setattr(commands, "run_command", lambda _: trio.run(wait))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a script, after `&`
    try:
        assert main(["check", "config.py"]) == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "interrupted\n"


def test_cli_further_signals_do_not_outlast_the_run() -> None:
    late: list[int] = []

    async def watch() -> None:
        run = foreground._Run(None, None)  # type: ignore[arg-type]
        async with open_task_group() as tasks:
            await tasks.start(run.watch_signals)
            for _ in range(3):
                signal.raise_signal(signal.SIGTERM)
                await trio.testing.wait_all_tasks_blocked()

    before = signal.signal(signal.SIGTERM, lambda signum, _: late.append(signum))
    try:
        trio.run(watch)  # which raises what is left of them
    finally:
        signal.signal(signal.SIGTERM, before)
    assert late == []


@contextmanager
def rollout_process(
    folder: Path, *arguments: str, is_fork: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """``rollout …`` on its own; nothing that it started may be left."""
    mark = f"ROLLOUT_TEST={folder}"
    environment = {**os.environ, "ROLLOUT_TEST": str(folder)}
    options: Any = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if is_fork:
        process = rollout_command(*arguments, env=environment, **options)
    else:
        main = "from rollout.cli import main; raise SystemExit(main())"
        command = [sys.executable, "-c", main, *arguments]
        process = subprocess.Popen(command, env=environment, text=True, **options)
    try:
        yield process
        assert marked(mark) == []
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            return
    pytest.fail(f"{text!r} was never said, only {seen}")


#: Far more than it takes; a hang would be minutes.
END_S = 20.0


@pytest.mark.parametrize(
    ("signum", "backend"), slow_after(1, [(signal.SIGINT, "trio"), (signal.SIGTERM, "asyncio")])
)
def test_cli_signal_saves_what_there_is(folder: Path, signum: signal.Signals, backend: str) -> None:
    write_config(folder, base_s=0.02, placement="LocalProcessPlacement")
    prompts = [{"prompt": "sum?"}, {"prompt": "slow"}, {"prompt": "sum?"}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    arguments = ["run", "config.py", "--prompts", "prompts.jsonl", "--out", "out", *CODE]
    places = ["--set", "scheduling.max_in_flight=2"]
    with rollout_process(folder, *arguments, *places, "--backend", backend) as process:
        wait_for(process, "scored")
        wait_for(process, "scored")  # the first sum has given its place to the second
        process.send_signal(signum)
        output, errors = process.communicate(timeout=END_S)
        assert process.returncode == 128 + signum
    assert "Traceback" not in errors
    assert re.fullmatch(
        "interrupted: [12] of 3 saved trajectories had ended by themselves, "
        "the others are saved as far as they had come",
        errors.splitlines()[-1],
    )
    assert "cancelled (interrupted)" in output
    first, slow, _ = RolloutBatch.load(folder / "out").samples
    assert (first.outcome, first.reason) == (Outcome.COMPLETED, "")
    assert (slow.outcome, slow.reason) == (Outcome.CANCELLED, "interrupted")


#: What takes its time once everything is saved: engines that close, and a process that exits.
LATE = {
    "closing": """
import contextlib, anyio, rollout.runtime.opening
real = rollout.runtime.opening.open_engines

@contextlib.asynccontextmanager
async def slow_to_close(*arguments, **options):
    async with real(*arguments, **options) as engines:
        yield engines
        print("here", file=sys.stderr, flush=True)
        with anyio.CancelScope(shield=True):
            await anyio.sleep(1)

rollout.runtime.opening.open_engines = slow_to_close
""",
    "exiting": """
import atexit, threading

def linger():
    print("here", file=sys.stderr, flush=True)
    threading.Event().wait()

atexit.register(linger)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "moment"), [(signal.SIGINT, "closing"), (signal.SIGTERM, "exiting")]
)
def test_cli_signal_after_saving_ends_without_a_traceback(
    folder: Path, signum: signal.Signals, moment: str
) -> None:
    (folder / "tools.py").write_text(TOOLS + LATE[moment])
    arguments = ["run", "config.py", "--prompts", "prompts.jsonl", "--out", "out", *CODE]
    with rollout_process(folder, *arguments, is_fork=False) as process:
        wait_for(process, "here")
        process.send_signal(signum)
        output, errors = process.communicate(timeout=END_S)
        assert process.returncode == 128 + signum
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("interrupted")
    assert "files     out: tensors.safetensors" in output
    assert len(RolloutBatch.load(folder / "out")) == 1


@pytest.mark.slow
def test_cli_signal_while_a_reward_hangs_saves_what_had_ended(folder: Path) -> None:
    write_config(folder)
    hang = "\n    if trajectory.member:\n        import threading; threading.Event().wait()\n"
    (folder / "tools.py").write_text(TOOLS.replace("flush()\n", f"flush(){hang}"))
    arguments = ["run", "config.py", "--prompts", "prompts.jsonl", "--out", "out", *CODE]
    one_place = ["--set", "scheduling.max_in_flight=1"]
    with rollout_process(folder, *arguments, "--samples", "2", *one_place) as process:
        wait_for(process, "scored")
        wait_for(process, "scored")  # the first has given its place to the second
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=END_S)
        assert process.returncode == 130
    assert errors.splitlines()[-1].startswith("interrupted: 1 of ")
    samples = RolloutBatch.load(folder / "out").samples
    assert samples[0].outcome is Outcome.COMPLETED


def test_cli_signal_while_engines_start_ends_them(folder: Path) -> None:
    write_config(folder, placement="LocalProcessPlacement")
    delay = ("--set", "engine.scenario.faults.start_delay_s=600")
    arguments = ["run", "config.py", "--prompts", "prompts.jsonl", "--out", "out", *CODE, *delay]
    with rollout_process(folder, *arguments) as process:
        wait_for(process, "starting 1 engine")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=END_S)
        assert process.returncode == 130
    assert output == ""
    assert errors == "interrupted before a trajectory had started; nothing is saved\n"
    assert list((folder / "out").iterdir()) == []


def test_cli_reader_that_leaves_changes_nothing(folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with rollout_command(
        "check", "config.py", cwd=folder, stdout=writing, stderr=subprocess.PIPE
    ) as process:
        os.close(writing)
        _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")


def test_cli_demo_without_its_packages_says_what_to_install(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert main(["demo", "--set", "model.path=/no/model", "--out", "out"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: the demo cannot run here:",
        "  model.path = '/no/model': no such directory",
        "  its tasks come from the package reasoning-gym: pip install reasoning-gym",
    ]
    assert not (folder / "out").exists()


@pytest.mark.slow
@pytest.mark.model
def test_cli_demo_solves_most_and_shows_what_is_trained(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--prompts", "2", "--samples", "2", "--out", "demo"]) == 0
    output = capsys.readouterr().out
    table, _, rest = output.partition("\n\n")
    assert len(table.splitlines()) == 1 + 2
    transcript, _, summary = rest.partition("\nsolved ")
    assert transcript.startswith("transcript of chain_sum-")
    assert "[trained] " in transcript
    assert '{"name": "calculator", "arguments": {"expression": ' in transcript
    assert "[observation, not trained] " in transcript
    samples = RolloutBatch.load(folder / "demo").samples
    solved = sum(row.reward == 1.0 and row.extra["is_right_call"] for row in samples)
    assert summary.split()[:3] == [str(solved), "of", "4"]
    assert solved >= 2


MORE_TOOLS = """
from rollout import function_tool

@function_tool
def {name}(a: int) -> int:
    "Once more."
    return a
"""
OWN_AGENTS = """
from rollout import AgentLoop, register_agent

@register_agent("cli_{name}")
class Own(AgentLoop):
    async def run(self, context):
        context.extra["tools"] = sorted(context.tools.names)
        await context.generate()
"""


def test_cli_agents_names_the_files_that_register_agents(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "own_agents.py").write_text(OWN_AGENTS.format(name="own"))
    (folder / "agents_package.py").write_text(OWN_AGENTS.format(name="packaged"))
    asked = ("--set", "agent.name=cli_own")
    assert run(*CODE, *asked) == 2
    assert "no agent is registered as 'cli_own'" in capsys.readouterr().err
    both = ("--agents", "own_agents.py", "--agents", "agents_package")
    assert run(*CODE, *both, *asked) == 0
    assert {str(row.extra["tools"]) for row in RolloutBatch.load(folder / "out").samples} != set()
    assert run(*CODE, *both, "--set", "agent.name=cli_packaged", "--overwrite") == 0
    assert main(["check", "config.py", *both, *asked]) == 0


def test_cli_agents_file_without_an_agent_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "no_agents.py").write_text("x = 1\n")
    for name, said in (
        ("no_agents.py", "registers no agent; expected functions decorated with @rollout.agent"),
        ("missing.py", "missing.py is no file"),
        ("missing_module", "ModuleNotFoundError: No module named 'missing_module'"),
    ):
        assert run(*CODE, "--agents", name) == 2
        assert f"error: --agents {name}: {said}" in capsys.readouterr().err


def test_cli_tools_of_several_files_are_offered_together(folder: Path) -> None:
    (folder / "all_tools.py").write_text(OWN_AGENTS.format(name="all"))
    (folder / "more.py").write_text(MORE_TOOLS.format(name="once"))
    (folder / "again.py").write_text("from more import once\n" + MORE_TOOLS.format(name="twice"))
    options = ("--agents", "all_tools.py", "--set", "agent.name=cli_all", "--overwrite")
    several = ("--tools", "more.py", "--tools", "tools.py,finish", "--tools", "./more.py")
    assert run(*several, *options) == 0
    assert {"once", "finish"} < {*RolloutBatch.load(folder / "out").samples[0].extra["tools"]}
    # A module that one file imports and another option names is not run as one.
    assert run("--tools", "again.py", *options) == 0
    assert RolloutBatch.load(folder / "out").samples[0].extra["tools"] == ["once", "twice"]


def test_cli_tools_of_one_name_in_two_files_are_refused_naming_both(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "more.py").write_text(MORE_TOOLS.format(name="once"))
    (folder / "other.py").write_text(MORE_TOOLS.format(name="once"))
    (folder / "finishing.py").write_text(MORE_TOOLS.format(name="finish"))
    for options, said in (
        (
            ("--tools", "more.py", "--tools", "other.py"),
            "other.py: the tool 'once' is also in",
        ),
        (("--tools", "finish,finishing.py"), "finishing.py: the tool 'finish' is also in finish;"),
    ):
        assert run(*options) == 2
        assert f"error: --tools {said}" in capsys.readouterr().err
        assert not (folder / "out").exists()
