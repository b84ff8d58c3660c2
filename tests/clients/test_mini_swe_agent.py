"""mini-swe-agent, with its own prompt, in a directory of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from through_gateway import run

from rollout.agents import AgentTask
from rollout.testing import Scenario, tool_call

pytestmark = pytest.mark.anyio

ISSUE = "The greeting lacks its full stop."
WRITE = (
    "<think>Simple.</think>I write it.\n"
    '<tool_call>\n{"arguments": {"command":"printf \'caf\\u00e9.\' > greeting && ls"}, '
    '"name": "bash"}\n</tool_call>'
)
SUBMIT = tool_call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat greeting")


def fix(task: AgentTask, directory: Path) -> Any:
    """Let it solve the issue; returns what it submits."""
    settings = yaml.safe_load((Path(builtin_config_dir) / "mini.yaml").read_text())
    model = LitellmModel(
        **settings["model"]
        | {
            "model_name": f"openai/{task.model}",
            "model_kwargs": {"api_base": task.base_url, "api_key": task.api_key},
        }
    )
    agent: dict[str, Any] = {
        name: settings["agent"][name] for name in ("system_template", "instance_template")
    }
    return DefaultAgent(model, LocalEnvironment(cwd=str(directory)), **agent).run(ISSUE)


async def test_mini_swe_agent_conversation_is_one_exact_row(tmp_path: Path) -> None:
    scenario = Scenario().reply(ISSUE, WRITE).then(SUBMIT)
    done = await run(lambda task: fix(task, tmp_path), scenario)
    done.assert_exact("main")
    assert done.result == {"exit_status": "Submitted", "submission": "café."}
    assert len(done.rows[0].turns) == 2


async def test_mini_swe_agent_deletes_a_turn_without_a_call_which_is_a_row(tmp_path: Path) -> None:
    """It tells the model of its error, but not what the model had said: that is where rows part."""
    scenario = Scenario().reply("Tool call error", SUBMIT)
    scenario = scenario.reply(ISSUE, WRITE).then("It is done, I think.")
    done = await run(lambda task: fix(task, tmp_path), scenario)
    done.assert_exact("main", "branch")
    assert done.result["submission"] == "café."
    assert [len(row.turns) for row in done.rows] == [2, 1]
    assert json.dumps("It is done") not in done.story()
