"""The same trajectories against `SimulatedCore` itself, as tasks in trio's virtual time.

It is ten times slower than `simulation`, whose short cut it justifies: both must agree.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

import anyio

from rollout.engine.core import GenerationRequest, SamplingParams
from rollout.engine.cores.simulated.simulated_core import SimulatedCore
from rollout.testing import run_virtual

from .simulation import (
    BLOCK_TOKENS,
    CAPACITY,
    IN_FLIGHT,
    KV,
    REPORT_S,
    SLOW_REPLICA,
    SLOWNESS,
    TIMING,
    Outcome,
    Policy,
)

if TYPE_CHECKING:
    from .workloads import Session


def run_in_virtual_time(sessions: list[Session], replicas: int, policy: Policy) -> Outcome:
    """What `Simulation` computes, from the engine's public interface."""
    return run_virtual(_Run(sessions, replicas, policy).run, ceiling_s=1e9)


class _Run:
    def __init__(self, sessions: list[Session], replicas: int, policy: Policy) -> None:
        self._sessions = sessions
        self._policy = policy
        slownesses = [SLOWNESS if i == SLOW_REPLICA else 1.0 for i in range(replicas)]
        self._cores = [_core(slowness) for slowness in slownesses]
        self._prompt_tokens = self._cached_tokens = self._moves = 0
        self._serial = 0

    async def run(self) -> Outcome:
        async with anyio.create_task_group() as helpers:
            for core in self._cores:
                await core.start()
            helpers.start_soon(self._report)
            places = anyio.Semaphore(IN_FLIGHT * len(self._cores))
            async with anyio.create_task_group() as tasks:
                for session in self._sessions:
                    await places.acquire()
                    tasks.start_soon(self._converse, session, places)
            helpers.cancel_scope.cancel()
        hit = self._cached_tokens / self._prompt_tokens
        return Outcome(anyio.current_time(), hit, self._moves)

    async def _report(self) -> None:
        while True:
            await anyio.sleep(REPORT_S)
            loads = [core.load() for core in self._cores]
            self._policy.report(anyio.current_time(), loads)

    async def _converse(self, session: Session, places: anyio.Semaphore) -> None:
        given = _as_text(session.ids)
        prompt, last = given[: session.prompt_tokens], -1
        for number, turn in enumerate(session.turns):
            replica = self._policy.assign(anyio.current_time(), session, len(prompt), number)
            self._moves += last not in (-1, replica)
            answer, cached = await self._ask(replica, prompt, turn.generated)
            self._prompt_tokens += len(prompt)
            self._cached_tokens += cached
            self._policy.release(anyio.current_time(), replica, session, number, cached)
            at = len(prompt) + len(answer)
            prompt, last = prompt + answer + given[at : at + turn.observed], replica
            await anyio.sleep(turn.tool_s)
        self._policy.forget(session)
        places.release()

    async def _ask(self, replica: int, prompt: array[int], count: int) -> tuple[array[int], int]:
        self._serial += 1
        request = GenerationRequest(
            request_id=f"{self._serial:016x}",
            prompt_ids=prompt.tobytes(),
            sampling=SamplingParams(max_new_tokens=count, ignore_eos=True, seed=self._serial),
        )
        answer, cached = array("i"), 0
        async for chunk in self._cores[replica].generate(request):
            answer.frombytes(chunk.ids)
            cached = chunk.cached_tokens
        return answer, cached


def _as_text(ids: bytes) -> array[int]:
    """The same number of ids of the simulated vocabulary, none of them special."""
    return array("i", [97 + value % 26 for value in array("i", ids)])


def _core(slowness: float) -> SimulatedCore:
    prefill = TIMING.prefill_tokens_per_s or math.inf
    return SimulatedCore(
        timing={
            "base_s": TIMING.base_s * slowness,
            "slope_s": TIMING.slope_s * slowness,
            "prefill_tokens_per_s": prefill / slowness,
        },
        capacity={"max_running": CAPACITY.max_running, "max_queued": CAPACITY.max_queued},
        kv={"tokens": KV.tokens, "block_tokens": BLOCK_TOKENS},
        stream_interval=1 << 30,
    )
