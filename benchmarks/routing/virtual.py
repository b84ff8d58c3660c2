"""The same trajectories against `SimulatedCore` itself, as tasks in trio's virtual time.

It is ten times slower than `simulation`, whose short cut it justifies: both must agree.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import anyio
import msgspec

from rollout.engine.core import GenerationRequest, SamplingParams
from rollout.engine.cores.simulated.simulated_core import SimulatedCore
from rollout.testing import run_virtual

from .simulation import (
    BLOCK_TOKENS,
    CAPACITY,
    KV,
    REPORT_S,
    Outcome,
    Policy,
    slowed,
)

if TYPE_CHECKING:
    from .machines import Machine
    from .workloads import Session, Trial


def run_in_virtual_time(trial: Trial, policy: Policy) -> Outcome:
    """What `Simulation` computes, from the engine's public interface."""
    return run_virtual(_Run(trial, policy).run, ceiling_s=1e9)


class _Run:
    def __init__(self, trial: Trial, policy: Policy) -> None:
        self._trial = trial
        self._policy = policy
        self._cores = [_core(machine) for machine in trial.machines]
        self._prompt_tokens = self._cached_tokens = self._moves = 0
        self._serial = 0

    async def run(self) -> Outcome:
        async with anyio.create_task_group() as helpers:
            for core in self._cores:
                await core.start()
            helpers.start_soon(self._report)
            places = anyio.Semaphore(self._trial.in_flight)
            async with anyio.create_task_group() as tasks:
                for session in self._trial.sessions:
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


def _core(machine: Machine) -> SimulatedCore:
    return SimulatedCore(
        timing=msgspec.to_builtins(slowed(machine.slowness)),
        capacity={"max_running": machine.max_running, "max_queued": CAPACITY.max_queued},
        kv={"tokens": KV.tokens, "block_tokens": BLOCK_TOKENS},
        stream_interval=1 << 30,
    )
