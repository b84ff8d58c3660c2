"""Pools of engines that a test makes, and requests to a pool."""

from __future__ import annotations

from typing import Any

from rollout.engine.core import SamplingParams, pack_ids
from rollout.engine.placement.in_process import InProcess
from rollout.engine.placement.placement import CoreSpec
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.pool import EnginePool
from rollout.engine.routing import Router
from rollout.limits import Clock


def make_pool(
    core: str,
    *options: dict[str, Any],
    placement: Any = None,
    start_timeout_s: float = 5,
    **pool: Any,
) -> EnginePool:
    """A replica for each of `options`, with which its core is made; in this process by default."""
    return EnginePool(
        placement=InProcess() if placement is None else placement,
        specs=[CoreSpec(core, each) for each in options],
        router=Router(),
        start_timeout_s=start_timeout_s,
        **pool,
    )


async def generate(
    pool: EnginePool,
    prompt: list[int],
    count: int,
    into: Generation | None = None,
    *,
    session: str | None = None,
    group_id: str = "",
    priority: int = 0,
    limit: Clock | None = None,
    **sampling: Any,
) -> Generation:
    """At most `count` tokens after a prompt; its last id names the session, or `session` does."""
    generation = Generation() if into is None else into
    await pool.generate(
        generation.ask(
            session_id=f"s{prompt[-1]}" if session is None else session,
            prompt_ids=pack_ids(prompt),
            sampling=SamplingParams(max_new_tokens=count, **sampling),
            group_id=group_id,
            priority=priority,
            limit=limit,
        )
    )
    return generation
