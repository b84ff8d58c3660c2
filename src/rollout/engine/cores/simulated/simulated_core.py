"""The simulated engine: an `EngineCore` without a model, exact in virtual time.

It runs wherever an engine runs: on the driver's own loop, where time may be virtual, or in a
process of its own in real time.

Loaded in engine processes: imports msgspec, anyio and the standard library only.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import anyio

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
from rollout.engine.cores.base import BaseCore
from rollout.engine.cores.simulated.batching import Batcher, Job
from rollout.engine.cores.simulated.kv_cache import KvCache
from rollout.engine.cores.simulated.options import parse_scenario
from rollout.engine.cores.simulated.scenario_faults import FaultPlan, Freeze
from rollout.engine.cores.simulated.simulated_model import SimulatedModel, end_ids
from rollout.engine.cores.simulated.streams import Sleepers, Stream
from rollout.engine.cores.simulated.vocabulary import (
    EOS_ID,
    FINGERPRINT,
    VOCAB_SIZE,
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


class SimulatedCore(BaseCore[Stream]):
    """Continuous batching over a scripted model; see `EngineCore` for the contract.

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
        plan, kv = FaultPlan(options.faults, options.seed, replica), options.kv
        self.on_death: Callable[[], None] | None = None
        self.is_gathering = stream_interval_s is not None
        self._options = options
        self._experts = options.experts if routed_experts else None
        self._fault_plan = plan
        self._lost_aborts = plan.faults.lost_aborts
        self._freeze = Freeze(plan.faults, 0.0)
        self._model = SimulatedModel(options)
        self._batcher = Batcher(
            timing=options.timing,
            kv=KvCache(
                tokens=kv.tokens, block_tokens=kv.block_tokens, prefix_cache=kv.prefix_cache
            ),
            max_running=options.capacity.max_running,
            max_queued=options.capacity.max_queued,
            stream_interval=options.stream_interval,
            stream_interval_s=math.inf if stream_interval_s is None else stream_interval_s,
            die_after_tokens=plan.faults.die_after_tokens,
        )
        self._sleepers = Sleepers(
            advance=self._advance, next_event=self._next_event, is_ready=self._is_ready
        )
        self._failure = ""  # it serves without a start
        self._weight_version = options.weight_version
        self._is_dead = False

    @property
    def info(self) -> EngineInfo:
        """The facts about the engine; they do not depend on `start`."""
        options, experts = self._options, self._experts
        return EngineInfo(
            vocab_size=VOCAB_SIZE,
            eos_ids=(EOS_ID,),
            context_length=min(options.capacity.context_length, options.kv.tokens),
            fingerprint=FINGERPRINT,
            max_requests=options.capacity.max_running + options.capacity.max_queued,
            max_running=options.capacity.max_running,
            weight_version=self._weight_version,
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

    async def start(self) -> None:
        """Wait for `faults.start_delay_s`; a freeze counts from here."""
        await anyio.sleep(self._fault_plan.faults.start_delay_s)
        self._freeze = Freeze(self._fault_plan.faults, anyio.current_time())

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        """Chunks of one request, the last one with a finish reason.

        Closing the iterator early, or cancelling the task that waits in it, aborts the request.

        Raises:
            SimulatedDeath: The scenario let the engine die.
        """
        stream = self._admit(request)
        try:
            while stream.chunks or not stream.is_ended:
                await self._sleepers.wait(stream)
                yield stream.chunks.popleft()
        finally:
            self._forget(request.request_id, stream)

    def abort_nowait(self, request_id: str) -> None:
        """End a request at the end of the step under way; what it has by then is its answer."""
        stream = self._open.get(request_id)
        if self._lost_aborts:
            self._lost_aborts -= 1
        elif stream is not None:
            self._abort(stream)

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
        self._weight_version = version
        for stream in self._open.values():
            stream.weight_version = version
        self._sleepers.replan()
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
        self._batcher.forget_prefixes()

    def load(self) -> EngineLoad:
        """What the engine is doing now."""
        self._advance()
        return self._batcher.load(self._engine_time())

    async def aclose(self) -> None:
        """End every request with "abort", even those of a frozen engine; waits for nothing."""
        self._close()
        if not self._is_dead:
            self._batcher.end_all()
        self._sleepers.wake_all()

    def _admit(self, request: GenerationRequest) -> Stream:
        """Hand a request to the batch, or answer it at once."""
        faults = self._fault_plan.draw()
        stream = Stream(request, self._weight_version, faults, self._experts)
        refusal = self._refuse(request)
        if refusal is not None:
            assert refusal.finish_reason is not None
            stream.refuse(refusal.finish_reason, refusal.error)
            return stream
        self._open[request.request_id] = stream
        self._advance()
        if faults.reject or not self._submit(request, stream):
            stream.refuse("rejected", "the simulated engine takes no more requests")
        return stream

    def _find_obstacle(self) -> str:
        return ""  # the batch knows whether it is full

    def _submit(self, request: GenerationRequest, stream: Stream) -> bool:
        prompt, sampling = request.prompt_ids, request.sampling
        room = self.info.context_length - len(prompt) // 4
        answer = self._model.plan(prompt, sampling, room)
        reason: FinishReason = "stop" if answer[-1] in end_ids(sampling) else "length"
        job = Job(prompt, answer, reason, stream.emit, request.priority)
        if self._batcher.submit(job, self._engine_time()):
            stream.job = job
            self._sleepers.replan()
        return stream.job is not None

    def _abort(self, stream: Stream) -> None:
        if stream.job is not None and not self._is_closed and not self._is_dead:
            self._advance()
            self._batcher.abort(stream.job, self._engine_time())
            self._sleepers.replan()

    def _forget(self, request_id: str, stream: Stream) -> None:
        """Forget a request; one that has not ended is aborted."""
        if self._open.get(request_id) is stream:
            del self._open[request_id]
            self._abort(stream)
            stream.job = None

    def _is_ready(self, stream: Stream) -> bool:
        """Whether there is a chunk; out of a frozen engine comes nothing until it is closed."""
        if self._is_dead:
            raise SimulatedDeath("the scenario let the engine die (faults.die_after_tokens)")
        is_frozen = self._freeze.covers(anyio.current_time()) and not self._is_closed
        return bool(stream.chunks) and not is_frozen

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
        self._sleepers.wake_all()
