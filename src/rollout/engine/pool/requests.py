"""The one record of a generation's requests."""

from __future__ import annotations

import math
from collections.abc import Callable

import anyio
import attrs
import msgspec

from rollout.engine.channel.messages import Submit
from rollout.engine.core import Chunk, EngineInfo, FinishReason, SamplingParams
from rollout.engine.pool.generation import ChunkFault, Generation, TokenCounts
from rollout.engine.pool.request_checks import describe_outside_id
from rollout.engine.routing import Dispatch
from rollout.errors import EngineError
from rollout.limits import Clock, Limit
from rollout.medium import PlacedMedia
from rollout.observe.explanation import Wait
from rollout.token_prefix import TokenPrefix, find_outside_id

#: Fields of the sampling whose state is not in the tokens: a request that resumes elsewhere would
#: be sampled by other rules than before.
STATEFUL_SAMPLING = ("presence_penalty", "frequency_penalty")
#: The engine does not say which of the two it is.
NO_TOKEN = "no token so far: in its queue, or being prefilled"


@attrs.define(eq=False)
class Loss:
    """A session that was lost, as the requests remember it that were in flight there.

    Attributes:
        reason: Why it was lost.
        is_excused: The driver ended it, or an operation of the driver broke the engine: no request
            is to blame.
        is_process_lost: Whether the engine had to be restarted; known once `settled` has fired.
    """

    reason: str
    is_excused: bool = False
    is_process_lost: bool = False
    settled: anyio.Event = attrs.field(factory=anyio.Event)

    def settle(self, *, is_process_lost: bool) -> None:
        """It is known now what became of the engine."""
        self.is_process_lost = is_process_lost and not self.is_excused
        self.settled.set()


@attrs.define(eq=False, kw_only=True)
class Request:
    """One generation, and the request that is in flight for it: one at a time.

    Attributes:
        generation: Filled by one request after the other.
        session_id: The conversation; its requests stay on one replica while that serves well.
        prompt: int32 little-endian, packed, or the trajectory's prefix.
        sampling: Of the whole generation; a request has what is left of its budget.
        info: The facts that all engines share.
        priority: Larger is served first.
        group_id: Trajectories that begin with the same prompt; "" for one on its own.
        known_experts: Tokens of the prompt whose routed experts the caller has.
        limit: The generation's, within which its caller awaits it.
        trajectory: Its number in the run's events.
        media: The images and videos of the prompt.
        on_end: Called when the engine no longer works on a request.
        losses: Sessions that were lost with one of its requests in flight.
        malformed: How many requests were answered with nonsense.
        refused_backoff_s: The pause after the next request that a full engine refuses.
        waits_since: When the request that is made now began to wait for a place.
        placed_at: When it got that.
        queue_scope: Of its wait in the queue, which is cancelled where its trajectory is carried.

    Attributes of the request in flight:
        dispatch: Where it is, or was last.
        counts: Of that replica's tokens.
        is_running: Whether one is in flight.
        deadline: That it was sent with.
        done: Fires when the engine no longer works on it.
        finish_reason: How it ended; None before, and where it was lost.
        error: Why it failed or was lost.
        first_at: When its first tokens came.
        loss: That of its session, where it was lost.
        is_lost, is_malformed: Its session was lost; its answer contradicted itself.
        is_interrupted: It was cut off, to resume later from the tokens that it has.
        is_cancelled: Its caller was cancelled, and waits a moment for the last tokens.
        is_abandoned: That is over, and further tokens are dropped.
    """

    generation: Generation
    session_id: str
    prompt: bytes | TokenPrefix
    sampling: SamplingParams
    info: EngineInfo
    priority: int = 0
    group_id: str = ""
    known_experts: int = 0
    limit: Limit
    trajectory: int = 0
    media: tuple[PlacedMedia, ...] = ()
    on_end: Callable[[Request], None]
    losses: list[Loss] = attrs.field(factory=list)
    malformed: int = 0
    refused_backoff_s: float = 0.05
    waits_since: float = 0.0
    placed_at: float = 0.0
    queue_scope: anyio.CancelScope | None = None
    _is_paused: bool = False

    dispatch: Dispatch | None = None
    counts: TokenCounts = attrs.field(factory=TokenCounts)
    is_running: bool = False
    deadline: float = math.inf
    done: anyio.Event = attrs.field(init=False)
    finish_reason: FinishReason | None = None
    error: str = ""
    first_at: float | None = None
    loss: Loss | None = None
    is_lost: bool = False
    is_malformed: bool = False
    is_interrupted: bool = False
    is_cancelled: bool = False
    is_abandoned: bool = False

    # What is asked for.

    @property
    def clock(self) -> Clock:
        """The trajectory's."""
        return self.limit.clock

    @property
    def request_id(self) -> str:
        """Of the request that was made last."""
        return self.generation.request_id

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the next request begins with: the prompt, and the answer so far."""
        count = len(self.prompt) // 4 if isinstance(self.prompt, bytes) else self.prompt.length
        return count + self.generation.count

    @property
    def tokens_left(self) -> int:
        """What is left of the budget."""
        return self.sampling.max_new_tokens - self.generation.count

    def begin(self, dispatch: Dispatch, counts: TokenCounts) -> None:
        """A request is about to be sent there; the trajectory's time counts from now on."""
        self.resume()
        self.dispatch, self.counts, self.done = dispatch, counts, anyio.Event()
        self.is_running = True
        self.deadline = self.limit.ends_at
        self.finish_reason, self.error, self.first_at, self.loss = None, "", None, None
        self.is_lost = self.is_malformed = self.is_interrupted = False

    def build_submit(self, request_id: str, now: float) -> Submit:
        """The message that asks for the rest of the answer."""
        prompt = self.prompt if isinstance(self.prompt, bytes) else self.prompt.packed()
        sampling, generation = self.sampling, self.generation
        if generation.count:
            prompt += generation.ids.tobytes()
            sampling = msgspec.structs.replace(sampling, max_new_tokens=self.tokens_left)
        return Submit(
            request_id,
            prompt,
            sampling,
            self.session_id,
            self.priority,
            remaining_s=None if self.deadline == math.inf else max(0.0, self.deadline - now),
            routed_experts=generation.expert_shape is not None,
            routed_experts_start=self.known_experts + generation.known_experts,
            media=tuple((each.medium.digest, each.start, each.count) for each in self.media),
        )

    # What the channel tells.

    def take(self, chunk: Chunk) -> bool:
        """Append the tokens of a chunk; False where it contradicts what came before it."""
        counts, tokens = self.counts, len(chunk.ids) // 4
        if self.is_abandoned or self.is_malformed:
            counts.late += tokens
            return True
        try:
            if find_outside_id(chunk.ids, self.info.vocab_size) is not None:
                raise ChunkFault(describe_outside_id(chunk.ids, self.info.vocab_size))
            count = self.generation.take(chunk)
        except ChunkFault as error:
            if self.is_cancelled:
                counts.late += tokens
            else:
                counts.refused += tokens
            self.is_malformed = True
            self.error = f"{self.generation.replica} sent a faulty chunk: {error}"
            return False
        counts.taken += count
        counts.repeated += tokens - count
        if count and self.first_at is None:
            self.first_at = self.clock.now()
        self.finish_reason, self.error = chunk.finish_reason, chunk.error
        return True

    def end(self, lost_reason: str) -> None:
        """The engine no longer works on it."""
        self.is_lost = lost_reason != ""
        self.error = self.error or lost_reason
        self.on_end(self)
        self.done.set()

    # What becomes of it.

    def interrupt(self) -> None:
        """It is cut off by the driver, and resumes later from the tokens that it has."""
        self.is_interrupted = True

    def fail(self, message: str, *, reason: str | None = None) -> EngineError:
        """The error that ends it; the generation keeps its tokens."""
        self.generation.finish_reason = "error"
        return EngineError(message, reason=reason)

    def is_complete(self) -> bool:
        """Whether the tokens are a whole answer, whose end the engine had not told yet."""
        generation, ends = self.generation, self.sampling.stop_token_ids
        if not self.sampling.ignore_eos:
            ends += self.info.eos_ids
        if generation.count and generation.ids[-1] in ends:
            generation.finish_reason = "stop"
        elif self.tokens_left <= 0 or self.prompt_tokens >= self.info.context_length:
            generation.finish_reason = "length"
        return generation.finish_reason is not None

    def count_losses(self) -> tuple[int, int]:
        """Engines that had to be restarted with it in flight, and connections that broke."""
        lost = sum(loss.is_process_lost for loss in self.losses)
        excused = sum(loss.is_excused for loss in self.losses)
        return lost, len(self.losses) - lost - excused

    def find_stateful_field(self) -> str:
        """The first field of the sampling whose state the tokens do not carry; "" for none."""
        return next((name for name in STATEFUL_SAMPLING if getattr(self.sampling, name)), "")

    def pause(self) -> None:
        """Stop its trajectory's time; harmless when called again."""
        if not self._is_paused:
            self._is_paused = True
            self.clock.pause()

    def resume(self) -> None:
        """End `pause`; harmless where there is none."""
        if self._is_paused:
            self._is_paused = False
            self.clock.resume()

    def describe_wait(self, path: str, now: float) -> Wait:
        """What it waits for; `path`: of its conversation."""
        carried_since = self.clock.carried_since
        if self.is_running:
            part, tokens = self.generation.last_part, self.generation.count
            note = f"{tokens:,} tokens so far" if part and part.count else NO_TOKEN
            since = now - self.placed_at
            return Wait("generation", since, self.generation.replica, note=note, path=path)
        if carried_since is not None:
            return Wait("held", now - carried_since, path=path)
        return Wait("queue", now - self.waits_since, path=path)
