"""The simulated engine: an `EngineCore` without a model, exact in virtual time.

It runs wherever an engine runs: on the driver's own loop, where time may be virtual, or in a
process of its own in real time.

Loaded in engine processes: imports msgspec, anyio and the standard library only.
"""

from __future__ import annotations

import math
import os
from array import array
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.engine.core import (
    ALL_TAGS,
    TAGS_OF_LEVEL,
    Capabilities,
    Chunk,
    EngineInfo,
    EngineLoad,
    FinishReason,
    GenerationRequest,
)
from rollout.engine.cores.base import BaseCore, OpenRequest
from rollout.engine.cores.simulated.batching import Batcher, Job
from rollout.engine.cores.simulated.kv_cache import KvCache
from rollout.engine.cores.simulated.options import Experts, Faults, ScenarioOptions, parse_scenario
from rollout.engine.cores.simulated.simulated_model import SimulatedModel, end_ids
from rollout.engine.cores.simulated.vocabulary import (
    EOS_ID,
    FINGERPRINT,
    VOCAB_SIZE,
    choose_expert,
    compute_log_probs,
    compute_top,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rollout.engine.weights import DiskWeights

#: Exit code of an engine process that a scenario lets die.
DEATH_EXIT_CODE = 13
#: The program of engine processes; one that simulates dies with its engine.
_ENGINE_PROGRAM = "rollout.engine.channel.child"


class SimulatedDeath(Exception):
    """The scenario let the engine die; callers that wait for an answer get this."""


class _Request(OpenRequest):
    """A request under way, with the chunks that its iterator has not taken yet.

    Attributes:
        job: The request in the batch; None where it never got there, or has left.
        weight_version: Stamped on what is emitted from now on.
        woken: Fires when the task that waits for a chunk is to look again.
    """

    def __init__(
        self,
        request: GenerationRequest,
        weight_version: int,
        faults: set[str],
        experts: Experts | None,
    ) -> None:
        super().__init__(request.request_id)
        self.chunks: deque[Chunk] = deque()
        self.job: Job | None = None
        self.weight_version = weight_version
        self.woken = anyio.Event()
        self._top_count = request.sampling.top_log_probs
        self._experts = experts if request.routed_experts else None
        self._known_experts = request.routed_experts_start
        self._faults = faults
        self._delayed: list[Chunk] = []  # by the fault "reorder"

    def emit(self, job: Job, first: int, stop: int, reason: FinishReason | None) -> None:
        """See `Job.emit`."""
        ids, position = job.answer[first:stop], len(job.prompt) // 4 + first
        top_ids, top_log_probs = compute_top(ids, position, self._top_count)
        self.send(
            Chunk(
                request_id=self.request_id,
                offset=first,
                ids=ids.tobytes(),
                log_probs=compute_log_probs(ids, position).tobytes(),
                top_ids=top_ids.tobytes(),
                top_log_probs=top_log_probs.tobytes(),
                routed_experts=self._experts_up_to(job, stop),
                weight_version=self.weight_version,
                finish_reason=reason,
                cached_tokens=0 if reason is None else job.cached_tokens,
            )
        )

    def send(self, chunk: Chunk) -> None:
        """Hand a chunk to the iterator, with what goes wrong with it."""
        self.is_over = chunk.finish_reason is not None
        if "wrong_length" in self._faults and chunk.ids:
            self._faults.remove("wrong_length")
            chunk = msgspec.structs.replace(chunk, log_probs=chunk.log_probs[:-4])
        sent = [chunk, chunk] if "duplicate" in self._faults and self.is_over else [chunk]
        if "reorder" in self._faults and self.is_over:
            sent += self._delayed
        elif "reorder" in self._faults:
            sent, self._delayed = self._delayed, sent
        self.chunks += sent
        self.woken.set()

    def _experts_up_to(self, job: Job, sampled: int) -> bytes:
        """Of the tokens computed to sample so many, those that no chunk had before."""
        experts = self._experts
        if experts is None or not sampled:
            return b""
        ids = array("i")
        ids.frombytes(job.sequence(sampled - 1))
        first, self._known_experts = self._known_experts, len(ids)
        return array(
            "h",
            [
                choose_expert(ids[at], at, layer, rank, experts.count)
                for at in range(first, len(ids))
                for layer in range(experts.layers)
                for rank in range(experts.top_k)
            ],
        ).tobytes()


class _Freeze:
    """A stretch in which the engine is frozen, and the engine's own time around it."""

    def __init__(self, faults: Faults, started_at: float) -> None:
        at_s, length_s = faults.freeze_at_s, faults.freeze_s
        self.start = math.inf if at_s is None else started_at + at_s
        self.end = self.start + (math.inf if length_s is None else length_s)

    def covers(self, now: float) -> bool:
        """Whether the engine is frozen."""
        return self.start < now < self.end

    def to_engine_time(self, now: float) -> float:
        """The engine's clock, which stops during the freeze."""
        return now if now <= self.start else max(self.start, now - (self.end - self.start))

    def to_clock_time(self, engine_time: float) -> float:
        """When the engine's clock shows that time."""
        if engine_time <= self.start:
            return engine_time
        return engine_time + (self.end - self.start)


class SimulatedCore(BaseCore[_Request]):
    """Continuous batching over a scripted model; see `EngineCore` for the contract.

    It has no task of its own. Of the tasks that wait for chunks, the one that has waited longest
    drives the engine for all: it sleeps until the engine's next event and lets that happen, which
    may bring chunks to any of them.

    Args:
        routed_experts: Tells of each token which experts it was routed to.
        replica: Index among the replicas of its pool; `faults.replicas` refers to it.
        stream_interval_s: How long a sampled token waits for others at most; None: until there are
            as many as the scenario says.
        scenario: What `rollout.testing.Scenario.to_dict` writes; see `ScenarioOptions`.

    Attributes:
        on_death: Called once when the scenario lets the engine die; what must take it for dead
            sets it. Where it is None, a process that runs nothing but this engine ends with exit
            code 13.
        is_gathering: See `EngineCore`.

    Raises:
        ConfigError: The scenario has an unknown key or a wrong value.
    """

    def __init__(
        self,
        *,
        replica: int = 0,
        stream_interval_s: float | None = None,
        routed_experts: bool = False,
        **scenario: Any,
    ) -> None:
        super().__init__()
        options = parse_scenario(scenario)
        faults = options.faults
        if faults.replicas is not None and replica not in faults.replicas:
            faults = Faults()
        self.on_death: Callable[[], None] | None = None
        self.is_gathering = stream_interval_s is not None
        self._options, self._faults = options, faults
        self._experts = options.experts if routed_experts else None
        self._info = _describe(options, self._experts)
        self._requests = 0  # that came so far
        self._lost_aborts = faults.lost_aborts
        self._freeze = _Freeze(faults, 0.0)
        self._model = SimulatedModel(options)
        self._kv = KvCache(options.kv)
        self._batcher = Batcher(
            timing=options.timing,
            kv=self._kv,
            capacity=options.capacity,
            stream_interval=options.stream_interval,
            stream_interval_s=math.inf if stream_interval_s is None else stream_interval_s,
            die_after_tokens=faults.die_after_tokens,
        )
        self._waiting: OrderedDict[_Request, None] = OrderedDict()  # for chunks
        self._failure = ""  # it serves without a start
        self._is_dead = False

    async def start(self) -> None:
        """Wait for `faults.start_delay_s`; a freeze counts from here."""
        await anyio.sleep(self._faults.start_delay_s)
        self._freeze = _Freeze(self._faults, anyio.current_time())

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Chunks of one request, the last one with a finish reason.

        Closing the iterator early, or cancelling the task that waits in it, aborts the request.

        Raises:
            SimulatedDeath: The scenario let the engine die.
        """
        entry = self._admit(request)
        try:
            while entry.chunks or not entry.is_over:
                await self._wait_for_chunk(entry)
                yield entry.chunks.popleft()
        finally:
            if self._open.get(request.request_id) is entry:
                del self._open[request.request_id]
                self._abort(entry)
                entry.job = None

    def abort_nowait(self, request_id: str) -> None:
        """End a request at the end of the step under way; what it has by then is its answer."""
        entry = self._open.get(request_id)
        if self._lost_aborts:
            self._lost_aborts -= 1
        elif entry is not None:
            self._abort(entry)

    async def update_weights(self, version: int, source: DiskWeights) -> None:
        """Stamp `version` on the tokens that are sampled from then on; nothing else changes.

        Raises:
            FileNotFoundError: The directory does not exist.
        """
        if not os.path.isdir(source.path):  # noqa: ASYNC240
            raise FileNotFoundError(f"there is no directory {source.path!r}")
        await anyio.sleep(self._options.timing.load_weights_s)
        self._advance()
        if not self._is_dead:
            self._batcher.flush(self._engine_time())
        self._info = msgspec.structs.replace(self.info, weight_version=version)
        for entry in self._open.values():
            entry.weight_version = version
        self._replan()
        await self.flush_cache()

    async def sleep(self, level: int) -> None:
        """Refuse requests until awake; there is no memory to release, but its prefixes are gone."""
        self._asleep |= frozenset(TAGS_OF_LEVEL[level])
        await self.flush_cache()

    async def wake_up(self, tags: tuple[str, ...]) -> None:
        """See `BaseCore.wake_up`."""
        self._asleep -= frozenset(tags)

    async def flush_cache(self) -> None:
        """No request that comes later finds a prefix."""
        self._advance()
        self._kv.forget()

    def load(self) -> EngineLoad:
        """What the engine is doing now."""
        self._advance()
        return self._batcher.load(self._engine_time())

    async def aclose(self) -> None:
        """End every request with "abort", even those of a frozen engine; waits for nothing."""
        self._close()
        if not self._is_dead:
            self._batcher.end_all()
        self._wake_all()

    def _admit(self, request: GenerationRequest) -> _Request:
        """Hand a request to the batch, or answer it at once."""
        self._requests += 1
        faults = self._faults.draw(self._options.seed, self._requests)
        entry = _Request(request, self.info.weight_version, faults, self._experts)
        refusal = self._refuse(request)
        if refusal is not None:
            entry.send(refusal)
            return entry
        self._open[request.request_id] = entry
        self._advance()
        if "reject" in faults or not self._submit(request, entry):
            error = "the simulated engine takes no more requests"
            rid = request.request_id
            entry.send(Chunk(request_id=rid, finish_reason="rejected", error=error))
        return entry

    def _find_obstacle(self) -> str:
        return ""  # the batch knows whether it is full

    def _submit(self, request: GenerationRequest, entry: _Request) -> bool:
        prompt, sampling = request.prompt_ids, request.sampling
        room = self.info.context_length - len(prompt) // 4
        answer = self._model.plan(prompt, sampling, room)
        reason: FinishReason = "stop" if answer[-1] in end_ids(sampling) else "length"
        job = Job(prompt, answer, reason, entry.emit, request.priority)
        if self._batcher.submit(job, self._engine_time()):
            entry.job = job
            self._replan()
        return entry.job is not None

    def _abort(self, entry: _Request) -> None:
        if entry.job is not None and not self._is_closed and not self._is_dead:
            self._advance()
            self._batcher.abort(entry.job, self._engine_time())
            self._replan()

    async def _wait_for_chunk(self, entry: _Request) -> None:
        """Return when there is a chunk; drive the engine while nobody has waited longer."""
        self._waiting[entry] = None
        try:
            while not self._is_ready(entry):
                entry.woken = anyio.Event()
                if next(iter(self._waiting)) is not entry and not entry.chunks:
                    await entry.woken.wait()
                    continue
                self._advance()
                if not self._is_ready(entry):
                    with anyio.CancelScope(deadline=self._next_event()):
                        await entry.woken.wait()
                    self._advance()
        finally:
            was_driving = next(iter(self._waiting)) is entry
            del self._waiting[entry]
            if was_driving:
                self._replan()

    def _is_ready(self, entry: _Request) -> bool:
        """Whether there is a chunk; out of a frozen engine comes nothing until it is closed."""
        if self._is_dead:
            raise SimulatedDeath("the scenario let the engine die (faults.die_after_tokens)")
        is_frozen = self._freeze.covers(anyio.current_time()) and not self._is_closed
        return bool(entry.chunks) and not is_frozen

    def _replan(self) -> None:
        """Have the task that drives the engine look again when the next event is."""
        if self._waiting:
            next(iter(self._waiting)).woken.set()

    def _wake_all(self) -> None:
        for entry in self._waiting:
            entry.woken.set()

    def _next_event(self) -> float:
        if self._freeze.covers(anyio.current_time()):
            return self._freeze.end
        return self._freeze.to_clock_time(self._batcher.next_event)

    def _engine_time(self) -> float:
        return self._freeze.to_engine_time(anyio.current_time())

    def _advance(self) -> None:
        """Let everything happen that happens up to now."""
        if self._is_closed or self._is_dead:
            return
        self._batcher.advance(self._engine_time())
        if self._batcher.is_dead:
            self._die()

    def _die(self) -> None:
        self._is_dead = True
        import __main__  # the program of this process

        program = getattr(__main__, "__spec__", None)
        if self.on_death is not None:
            self.on_death()
        elif program is not None and program.name == _ENGINE_PROGRAM:
            os._exit(DEATH_EXIT_CODE)
        self._wake_all()


def _describe(options: ScenarioOptions, experts: Experts | None) -> EngineInfo:
    """The facts about the engine; they do not depend on `start`."""
    capacity = options.capacity
    return EngineInfo(
        vocab_size=VOCAB_SIZE,
        eos_ids=(EOS_ID,),
        context_length=min(capacity.context_length, options.kv.tokens),
        fingerprint=FINGERPRINT,
        max_requests=capacity.max_running + capacity.max_queued,
        max_running=capacity.max_running,
        weight_version=options.weight_version,
        core="simulated",
        capabilities=Capabilities(
            weights=("disk", "tensors", "groups"),
            in_place=True,
            sleep_levels=tuple(TAGS_OF_LEVEL),
            sleep_tags=ALL_TAGS,
            modalities=options.modalities,
            expert_shape=None if experts is None else (experts.layers, experts.top_k),
            max_top_log_probs=VOCAB_SIZE,
        ),
    )
