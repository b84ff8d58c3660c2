"""What it takes until the embedded engine serves, from the first import, in a fresh process.

python -m driver_cases.opening
"""

from __future__ import annotations

import time  # noqa: TID251  (what is measured here)

BEGUN = time.perf_counter()


async def open_embedded() -> dict[str, float]:
    """CPU seconds of this process since it was started, and wall seconds."""
    import rollout

    async with rollout.open_rollout(rollout.RolloutConfig()):
        return {"cpu_s": time.process_time(), "wall_s": time.perf_counter() - BEGUN}


def main() -> None:
    """Answer once."""
    import anyio

    from driver_cases.side_process import answers_on_stdout

    with answers_on_stdout() as answer:
        answer(anyio.run(open_embedded, backend="trio"))


if __name__ == "__main__":
    main()
