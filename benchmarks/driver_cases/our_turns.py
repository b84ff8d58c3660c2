"""Rounds of the driver's benchmark through our runtime, in a process of its own.

    python -m driver_cases.our_turns '{"backend": "trio", "directory": …, "n": 256}'

A line on standard input, ``{"scope": "stream"}`` or ``"generate"``, is a round; its figures come
back as a line of JSON.
"""

from __future__ import annotations

import json
import sys

import anyio
import anyio.to_thread

from driver_cases.ours import Plan, open_ours
from driver_cases.side_process import answers_on_stdout


async def serve(plan: Plan) -> None:
    """A round for each line."""
    with answers_on_stdout() as answer:
        async with open_ours(plan) as side:
            answer({})
            while line := await anyio.to_thread.run_sync(sys.stdin.readline):
                answer(await side.round(**json.loads(line)))


def main() -> None:
    """Serve as the options say."""
    options = json.loads(sys.argv[1])
    backend = options.pop("backend")
    anyio.run(serve, Plan(**options), backend=backend)


if __name__ == "__main__":
    main()
