"""What it takes until the embedded engine serves, from the first import, in a fresh process.

python -m driver_cases.opening '{"what": "open"}'

"imports" takes no more than the packages that it cannot do without.
"""

from __future__ import annotations

import json
import sys
import time  # noqa: TID251  (what is measured here)

BEGUN = time.perf_counter()


async def open_embedded() -> dict[str, float]:
    """CPU seconds of this process since it was started, and wall seconds."""
    import rollout

    async with rollout.open_rollout(rollout.RolloutConfig()):
        return _taken()


async def import_packages() -> dict[str, float]:
    """The same, of importing torch, tensordict and transformers' Llama."""
    import tensordict
    import torch
    from transformers.models.llama import modeling_llama

    del tensordict, torch, modeling_llama
    return _taken()


def _taken() -> dict[str, float]:
    return {"cpu_s": time.process_time(), "wall_s": time.perf_counter() - BEGUN}


def main() -> None:
    """Answer once."""
    import anyio

    from driver_cases.side_process import answers_on_stdout

    with answers_on_stdout() as answer:
        acts = {"open": open_embedded, "imports": import_packages}
        answer(anyio.run(acts[json.loads(sys.argv[1])["what"]], backend="trio"))


if __name__ == "__main__":
    main()
