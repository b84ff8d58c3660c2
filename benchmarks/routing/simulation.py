"""Trajectories against the simulated engine's own batching code, in the order of events.

The engines are `Batcher` over `KvCache`, the state machines inside `SimulatedCore`
(`rollout.engine.cores.simulated`). They own no clock, so time is a heap of events here.
"""

from __future__ import annotations

import heapq
from array import array
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from rollout.engine.cores.simulated.batching import Batcher, Job
from rollout.engine.cores.simulated.kv_cache import KvCache
from rollout.engine.cores.simulated.options import Capacity, Kv, Timing

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.engine.core import EngineLoad

    from .machines import Machine
    from .workloads import Session, Trial

TIMING, CAPACITY, KV = Timing(), Capacity(), Kv()
#: The engines' prefix blocks. Larger than the default only to save the benchmark's own time.
BLOCK_TOKENS = 256
#: Reports of the engines, as often as the channel's heartbeat brings them.
REPORT_S = 1.0


class Policy(Protocol):
    """What is measured: where each request goes."""

    def assign(self, now: float, session: Session, prompt_tokens: int, turn: int) -> int:
        """The replica of the next request."""

    def release(self, now: float, replica: int, session: Session, turn: int, cached: int) -> None:
        """A request has ended; `cached` of its prompt tokens needed no prefill."""

    def report(self, now: float, loads: list[EngineLoad]) -> None:
        """What every engine says of itself."""

    def forget(self, session: Session) -> None:
        """The trajectory has ended."""


@attrs.frozen
class Outcome:
    """What a policy made of a workload.

    Attributes:
        makespan_s: When the last trajectory ended.
        prefix_hit: Share of all prompt tokens that needed no prefill.
        moves: Turns that began on another replica than the turn before.
    """

    makespan_s: float
    prefix_hit: float
    moves: int


def lower_bound_s(trial: Trial) -> float:
    """No schedule is faster: all work at full speed everywhere, or the longest trajectory alone.

    Batches count as if every machine took the simulated engine's own full one.
    """
    decode_s = TIMING.base_s / CAPACITY.max_running + TIMING.slope_s
    best = min(machine.slowness for machine in trial.machines)
    alone_s = best * (TIMING.base_s + TIMING.slope_s)
    prefill_s = 1 / (TIMING.prefill_tokens_per_s or float("inf"))
    prompts = {session.group: session.prompt_tokens for session in trial.sessions}
    work = sum(prompts.values()) * prefill_s
    longest = 0.0
    for session in trial.sessions:
        # The answers' own tokens are in the cache, and so are the observations of earlier turns.
        observed = sum(turn.observed for turn in session.turns[:-1])
        work += observed * prefill_s + session.generated * decode_s
        prompts_s = best * (session.prompt_tokens + observed) * prefill_s
        path = prompts_s + session.generated * alone_s
        longest = max(longest, path + sum(turn.tool_s for turn in session.turns))
    capacity = sum(1 / machine.slowness for machine in trial.machines)
    return max(work / capacity, longest)


class Simulation:
    """One run of all trajectories, as many at once as are admitted."""

    def __init__(self, trial: Trial, policy: Policy) -> None:
        self._policy = policy
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0
        self._engines = [_engine(machine) for machine in trial.machines]
        self._planned = [float("inf")] * len(self._engines)
        self._open = len(trial.sessions)
        self._prompt_tokens = self._cached_tokens = self._moves = 0
        self.now = 0.0
        self._waiting = iter(trial.sessions)
        for _ in range(trial.in_flight):
            self._admit()
        self._at(REPORT_S, self._report)

    def run(self) -> Outcome:
        """Let everything happen."""
        while self._open:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        hit = self._cached_tokens / self._prompt_tokens
        return Outcome(self.now, hit, self._moves)

    def _admit(self) -> None:
        session = next(self._waiting, None)
        if session is not None:
            self._at(self.now, self._begin_turn, session, 0, session.prompt_tokens, -1)

    def _at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        self._serial += 1
        heapq.heappush(self._events, (when, self._serial, action, arguments))

    def _begin_turn(self, session: Session, turn: int, prompt_tokens: int, last: int) -> None:
        replica = self._policy.assign(self.now, session, prompt_tokens, turn)
        self._moves += last not in (-1, replica)
        said = session.turns[turn].generated
        prompt = session.ids[: 4 * prompt_tokens]
        answer = array("i")
        answer.frombytes(session.ids[4 * prompt_tokens : 4 * (prompt_tokens + said)])
        job = Job(prompt, answer, "stop", _Sink(self, session, turn, replica).emit)
        engine = self._engines[replica]
        engine.advance(self.now)
        if not engine.submit(job, self.now):
            raise RuntimeError(f"engine {replica} is full")
        self._plan(replica)

    def end_turn(self, session: Session, turn: int, replica: int, job: Job) -> None:
        """The engine has finished a request."""
        prompt_tokens = len(job.prompt) // 4
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += job.cached_tokens
        self._policy.release(self.now, replica, session, turn, job.cached_tokens)
        done = session.turns[turn]
        if turn + 1 == len(session.turns):
            self._open -= 1
            self._policy.forget(session)
            self._admit()
            return
        longer = prompt_tokens + done.generated + done.observed
        self._at(self.now + done.tool_s, self._begin_turn, session, turn + 1, longer, replica)

    def _run_engine(self, replica: int, planned: float) -> None:
        if self._planned[replica] == planned:
            self._planned[replica] = float("inf")
            self._engines[replica].advance(self.now)
            self._plan(replica)

    def _plan(self, replica: int) -> None:
        due = self._engines[replica].next_event
        if due != self._planned[replica]:
            self._planned[replica] = due
            if due < float("inf"):
                self._at(due, self._run_engine, replica, due)

    def _report(self) -> None:
        loads = []
        for replica, engine in enumerate(self._engines):
            engine.advance(self.now)
            self._plan(replica)
            loads.append(engine.load(self.now))
        self._policy.report(self.now, loads)
        self._at(self.now + REPORT_S, self._report)


class _Sink:
    __slots__ = ("_replica", "_session", "_simulation", "_turn")

    def __init__(self, simulation: Simulation, session: Session, turn: int, replica: int) -> None:
        self._simulation = simulation
        self._session = session
        self._turn = turn
        self._replica = replica

    def emit(self, job: Job, first: int, stop: int, reason: str | None) -> None:
        """See `Job.emit`."""
        if reason is not None:
            self._simulation.end_turn(self._session, self._turn, self._replica, job)


def _engine(machine: Machine) -> Batcher:
    return Batcher(
        timing=slowed(machine.slowness),
        kv=KvCache(Kv(block_tokens=BLOCK_TOKENS)),
        capacity=Capacity(max_running=machine.max_running),
        # Nobody reads partial answers here: one chunk, the last, for each request.
        stream_interval=1 << 30,
    )


def slowed(slowness: float) -> Timing:
    """The engine's times on a machine that takes so many times as long for everything."""
    assert TIMING.prefill_tokens_per_s is not None
    return Timing(
        base_s=TIMING.base_s * slowness,
        slope_s=TIMING.slope_s * slowness,
        prefill_tokens_per_s=TIMING.prefill_tokens_per_s / slowness,
    )
