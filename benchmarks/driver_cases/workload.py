"""What both sides of the driver's benchmark work on: prompts, the model's answers, the tools' text.

A trajectory asks a question of 120 words; the model calls a tool in four answers of about 190
tokens, is told 100 words each time, and ends with a fifth answer. What it says is chosen by the
question and the turn alone, so that both sides say the same whatever the order. Everything is
written to a directory once, for processes in different environments; this module imports nothing
that only one of them has.
"""

from __future__ import annotations

import hashlib
import json
import random  # noqa: TID251  (texts; no seed of the library's)
import shutil
from pathlib import Path
from typing import Any

#: Words of a question, of a tool's text, of what is said before a call, of a final answer.
QUESTION, RESULT, BEFORE_CALL, FINAL = 120, 100, 150, 195
#: Different answers of each kind.
POOL = 64
TURNS = 4
#: Widths of the tensors.
PROMPT_TOKENS, RESPONSE_TOKENS = 1024, 2048
END_OF_TURN = "<|im_end|>"
TEXT = (
    "a list of values is read from the file and each line that does not match the pattern will be "
    "returned to the caller with the name of the module in which it was found so we can see why "
    "this test has no result yet"
)
WORDS = TEXT.split()
#: In the order in which both sides render their keys.
SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }
    for name, description, properties, required in (
        (
            "search",
            "Look for texts.",
            {
                "query": {"type": "string", "description": "what to look for"},
                "top_k": {"type": "integer", "description": "how many texts to return"},
            },
            ["query"],
        ),
        (
            "calculator",
            "Calculate a value.",
            {"expression": {"type": "string", "description": "what to calculate"}},
            ["expression"],
        ),
    )
]


def prose(draw: random.Random, words: int) -> str:
    """Some words."""
    return " ".join(draw.choice(WORDS) for _ in range(words))


def questions(count: int) -> list[str]:
    """A question for each trajectory, the same in every process."""
    draw = random.Random(1)
    return [prose(draw, QUESTION) for _ in range(count)]


def tool_text() -> str:
    """What every call is answered with."""
    return prose(random.Random(5), RESULT)


def said_texts() -> tuple[list[str], list[str]]:
    """Turns that call a tool, and final answers."""
    draw = random.Random(0)
    calls, finals = [], []
    for number in range(POOL):
        arguments = {"query": prose(draw, 12), "top_k": number % 9}
        call = json.dumps({"name": "search", "arguments": arguments})
        calls.append(f"{prose(draw, BEFORE_CALL)}\n<tool_call>\n{call}\n</tool_call>")
        finals.append(prose(draw, FINAL))
    return calls, finals


class Answers:
    """What the model says, as ids; see `save_workload`.

    Args:
        turns: Turns that call a tool, before the final answer.
    """

    def __init__(self, directory: str | Path, turns: int = TURNS) -> None:
        saved = json.loads((Path(directory) / "answers.json").read_text())
        self.vocab_size: int = saved["vocab_size"]
        self.end_of_turn: int = saved["end_of_turn"]
        self.calls: list[list[int]] = saved["calls"]
        self.finals: list[list[int]] = saved["finals"]
        self.turns = turns

    def index(self, question: int, turn: int) -> tuple[bool, int]:
        """Whether the model ends in this turn, and which of its answers it gives.

        Args:
            question: See `question_of`.
        """
        return turn >= self.turns, (question + turn) % POOL


def question_of(prompt_ids: Any) -> int:
    """Tells trajectories apart by their first prompt, in a microsecond."""
    return int(sum(prompt_ids[-64:]))


def save_workload(directory: Path) -> None:
    """Write the tokenizer and `answers.json`, unless they are there and of these sources."""
    version = _version()
    answers = directory / "answers.json"
    if answers.exists() and json.loads(answers.read_text()).get("version") == version:
        return
    from tokenizers import Tokenizer

    from driver_cases.vocabulary import save_tokenizer

    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    save_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def encoded(texts: list[str]) -> list[list[int]]:
        turns = [text + END_OF_TURN for text in texts]
        return [each.ids for each in tokenizer.encode_batch(turns, add_special_tokens=False)]

    calls, finals = map(encoded, said_texts())
    saved = {
        "version": version,
        "vocab_size": tokenizer.get_vocab_size(),
        "end_of_turn": tokenizer.token_to_id(END_OF_TURN),
        "calls": calls,
        "finals": finals,
    }
    (directory / "config.json").write_text("{}")  # there is no model; `model.path` wants one
    answers.write_text(json.dumps(saved))


def _version() -> str:
    """Of everything that decides what is written."""
    here = Path(__file__).parent
    sources = (here / name for name in ("workload.py", "vocabulary.py", "chat.jinja"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
