"""`collate` of full rows, in a process of its own; each line on standard input is a round.

python -m driver_cases.our_padding '{"rows": 1024, "prompt": 1024, "response": 4096}'
"""

from __future__ import annotations

import gc
import json
import sys
from array import array
from typing import Any

from driver_cases.full_rows import ids_of_row, spans, tensors_digest
from driver_cases.measuring import Clocks
from driver_cases.side_process import answers_on_stdout
from rollout.batch import collate
from rollout.chat import Transcript
from rollout.chat.trajectory import Trajectory
from rollout.config import LengthsConfig
from rollout.types import Outcome


def trajectory(row: int, prompt: int, response: int) -> Trajectory:
    """One that fills its row, with tools' texts between what was sampled."""
    transcript = Transcript()
    transcript.append_prompt(array("i", ids_of_row(row, prompt)))
    ids = array("i", ids_of_row(row + 1, response))
    for is_sampled, start, stop in spans(response):
        span = ids[start:stop]
        if is_sampled:
            transcript.append_generated(
                span,
                array("f", [-0.5]) * len(span),
                versions=[(1, len(span))],
                finish_reason="stop",
            )
        else:
            transcript.append_observation(span)
    return Trajectory(
        uid=f"prompt-{row}", group=row, member=0, outcome=Outcome.COMPLETED, transcript=transcript
    )


def main() -> None:
    """A round for each line."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    lengths = LengthsConfig(prompt=options["prompt"], response=options["response"])
    rows = [trajectory(row, lengths.prompt, lengths.response) for row in range(options["rows"])]
    with answers_on_stdout() as answer:
        answer({})
        while sys.stdin.readline():
            gc.collect()
            clocks = Clocks()
            batch = collate(rows, lengths, 0)
            answer({**clocks.per(), "digest": tensors_digest(batch.tensors)})
            del batch


if __name__ == "__main__":
    main()
