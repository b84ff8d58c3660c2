"""What trajectories hold of the driver's memory, in a process of its own.

    python -m driver_cases.memory '{"what": "tokens", "directory": …, "n": 10000}'

"tokens": bytes of resident memory that batches of which the caller keeps all trajectories add, for
each token: the first one, in which Python keeps what its agents took while they ran ("idle" counts
that), and two further ones, which use that again.
"idle": kilobytes that a call adds for each running agent, when all of them await the first answer.
"""

from __future__ import annotations

import gc
import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio

import rollout
from driver_cases.measuring import rss_bytes
from driver_cases.ours import OurSide, Plan, contents, open_ours
from driver_cases.side_process import answers_on_stdout

if TYPE_CHECKING:
    from rollout.chat.trajectory import Trajectory

#: Between two looks at how many wait.
LOOK_S = 0.2
#: All wait, and what that took has been done.
SETTLE_S = 2.0


async def tokens(side: OurSide) -> dict[str, Any]:
    """With all of a batch's trajectories in hand; then with those of two further ones too."""
    before = rss_bytes()
    kept = await _run(side)
    held = rss_bytes() - before
    gc.collect()
    count, after_first = contents(kept)["tokens"], rss_bytes()
    kept += await _run(side)
    kept += await _run(side)
    gc.collect()
    added = rss_bytes() - after_first
    return {
        "bytes_per_token": added / (contents(kept)["tokens"] - count),
        "first_bytes_per_token": held / count,
        "tokens": count,
        "rss_mb": after_first / 1e6,
    }


async def _run(side: OurSide) -> list[Trajectory]:
    async with side.runtime.stream(side.prompts) as trajectories:
        return [each async for each in trajectories]


async def idle(side: OurSide) -> dict[str, Any]:
    """With every agent waiting for its engine; then all of them are cancelled."""
    runtime, n = side.runtime, len(side.prompts)
    before = rss_bytes()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_run_until_cancelled, side)
        while runtime.statistics().replicas[0].in_flight < n:
            await anyio.sleep(LOOK_S)
            if outcomes := runtime.statistics().outcomes:
                raise SystemExit(f"agents ended before all of them waited: {outcomes}")
        await anyio.sleep(SETTLE_S)
        held, rss_mb = rss_bytes() - before, rss_bytes() / 1e6
        cancelled_at = anyio.current_time()
        runtime.cancel()
    cancel_s = anyio.current_time() - cancelled_at
    outcomes = runtime.statistics().outcomes
    return {"kb_idle": held / n / 1e3, "rss_mb": rss_mb, "cancel_s": cancel_s, "ended": outcomes}


async def _run_until_cancelled(side: OurSide) -> None:
    """What else than the cancellation ends them is told by their outcomes."""
    with suppress(rollout.LimitExceeded):
        async with side.runtime.stream(side.prompts) as trajectories:
            async for _ in trajectories:
                pass


async def measure(what: str, plan: Plan) -> None:
    """Answer once."""
    with answers_on_stdout() as answer:
        async with open_ours(plan) as side:
            gc.collect()
            answer(await {"tokens": tokens, "idle": idle}[what](side))


def main() -> None:
    """Measure as the options say."""
    options = json.loads(sys.argv[1])
    what = options.pop("what")
    barrier = "never" if what == "idle" else "rounds"
    anyio.run(measure, what, Plan(barrier=barrier, **options), backend="trio")


if __name__ == "__main__":
    main()
