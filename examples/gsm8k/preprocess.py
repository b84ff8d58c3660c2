"""GSM8K's rows as training prompts: each names its agent, and gives the reward tool its answer.

python examples/gsm8k/preprocess.py IN.jsonl OUT.jsonl
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

SYSTEM = "Solve the problem, check your answer with the tool, then say it."


def final_answer(solution: str) -> str:
    """What stands after the last ``####`` of a solution, without commas."""
    found = re.findall(r"#### (-?[\d.,]+)", solution)
    if not found:
        raise ValueError(f"no '#### ANSWER' in {solution!r}")
    return str(found[-1]).replace(",", "")


def preprocessed(row: dict[str, str], index: int) -> dict[str, Any]:
    """One row of the data set as a row of prompts."""
    truth = final_answer(row["answer"])
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": row["question"]},
        ],
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "index": index,
            "answer": row["answer"],
            "tools_kwargs": {"check_answer": {"create_kwargs": {"ground_truth": truth}}},
        },
    }


def preprocess(source: Path, target: Path) -> None:
    """Write a file of prompts, which `rollout run --prompts` and `read_prompts` take."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    lines = [json.dumps(preprocessed(row, index)) for index, row in enumerate(rows)]
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    preprocess(Path(sys.argv[1]), Path(sys.argv[2]))
