"""One generation as the driver sees it: the tokens that arrived, whatever became of the wait."""

from __future__ import annotations

import copy
import logging
import math
from array import array
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING

import anyio
import attrs
import msgspec
import numpy as np
import numpy.typing as npt

from rollout.engine.channel.messages import Submit
from rollout.engine.core import EngineInfo, FinishReason, SamplingParams
from rollout.engine.cores.checks import check_sampling, describe_outside_id
from rollout.engine.routing import Dispatch
from rollout.errors import EngineError
from rollout.limits import Clock, Limit
from rollout.medium import PlacedMedia
from rollout.observe.event_stream import NO_TRAJECTORY
from rollout.observe.explanation import Wait
from rollout.token_prefix import TokenPrefix, find_outside_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.engine.core import Chunk

logger = logging.getLogger("rollout.engine")

#: The engine does not say which of the two it is.
NO_TOKEN = "no token so far: in its queue, or being prefilled"


@attrs.define
class TokenCounts:
    """What became of the tokens that arrived from a replica, each counted once.

    Attributes:
        taken: Appended to a `Generation`.
        late: Of a request that no caller waited for any more, or that had sent a faulty chunk.
        repeated: Of a chunk that had been taken before, or of a request that had ended.
        refused: Of a faulty chunk.
    """

    taken: int = 0
    late: int = 0
    repeated: int = 0
    refused: int = 0

    @property
    def arrived(self) -> int:
        """All of them."""
        return self.taken + self.late + self.repeated + self.refused


#: Of all that wait for their first tokens; never changed.
_NO_IDS, _NO_LOG_PROBS = array("i"), array("f")


class ChunkFault(Exception):
    """A chunk contradicts what came before it: the engine is at fault and nothing was taken."""


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


@attrs.define(eq=False, weakref_slot=False, getstate_setstate=False)
class Generation:
    """One generation: what it continues and how, its requests, one at a time, and their tokens.

    The tokens are in the order in which they were sampled, packed. They are filled in place while
    requests run, so that a cancelled wait loses nothing.

    Attributes:
        ids: Sampled ids, int32.
        log_probs: One float32 for each id.
        finish_reason: None until the last chunk has come; of the request in flight until then.
        cached_tokens: Prompt tokens that the engine did not need to prefill.
        parts: The requests made for it, in order; more than one where replicas were lost.
        resumes: How often it resumed elsewhere from the tokens it had.
        restarts: Why it restarted from its prompt, each time it did.
        versions: Runs ``[weight version, number of ids]``.
        bounded_by: Path of the length that bounds it, for the agent that asked for it.
        top_count: How many of the most likely ids are asked for with each token: k.
        top_ids: int32: the `top_count` most likely ids at each position, likeliest first.
        top_log_probs: float32, one for each of `top_ids`.
        expert_shape: (layers, top_k) of the experts that are asked for; None asks for none.
        expert_room: Tokens of the prompt whose experts are asked for: those that the caller does
            not know yet. Those of the generated tokens follow them.
        routed_experts: int16: the experts of the tokens asked for, as far as they are known.
        kept: How many of its tokens the caller keeps, once it has decided; None keeps all.
        held_s: Seconds that it waited because its trajectory was carried.
        is_seeded: Whether its seed was set and does not derive from the place of its turn.
        is_truncated: Whether it counts as one of a training row that top_k, top_p or min_p bend.
        on_tokens: Readers, each called with it at each chunk that brings tokens or the end; one
            that raises is logged and not called again. After a restart the tokens are fewer.

    Attributes of what is asked for, beside the arguments of `ask`:
        expert_start: Tokens of the prompt whose routed experts the caller has.
        info: The facts that all engines share.
        on_end: Called when the engine no longer works on a request.
        losses: Sessions that were lost with one of its requests in flight.
        malformed: How many requests were answered with nonsense.
        refused_backoff_s: The pause after the next request that a full engine refuses.
        waits_since: When the request that is made now began to wait for a place.
        placed_at: When it got that.
        called: While it waits in the queue: fires when it is to look for a replica.

    Attributes of the request in flight:
        counts: Of its replica's tokens.
        is_running: Whether one is in flight.
        deadline: That it was sent with.
        done: Fires when the engine no longer works on it.
        error: Why it failed or was lost.
        first_at: When its first tokens came.
        loss: That of its session, where it was lost.
        is_lost, is_malformed: Its session was lost; its answer contradicted itself.
        is_interrupted: It was cut off, to resume later from the tokens that it has.
        is_abandoned: Its caller waits no more, and further tokens are dropped.
    """

    on_tokens: tuple[Callable[[Generation], object], ...] = ()
    is_seeded: bool = False
    ids: array[int] = _NO_IDS
    log_probs: array[float] = _NO_LOG_PROBS
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    parts: tuple[Dispatch, ...] = ()
    resumes: int = 0
    restarts: tuple[str, ...] = ()
    versions: list[list[int]] = attrs.Factory(list)
    bounded_by: str = ""
    top_count: int = 0
    top_ids: bytes | bytearray = b""
    top_log_probs: bytes | bytearray = b""
    expert_shape: tuple[int, int] | None = None
    expert_room: int = 0
    routed_experts: bytes | bytearray = b""
    kept: int | None = None
    held_s: float = 0.0
    is_truncated: bool = False
    _packed: tuple[bytes, bytes] | None = None

    session_id: str = attrs.field(init=False)
    prompt: bytes | TokenPrefix = attrs.field(init=False)
    sampling: SamplingParams = attrs.field(init=False)
    priority: int = attrs.field(init=False)
    group_id: str = attrs.field(init=False)
    limit: Limit = attrs.field(init=False)
    trajectory: int = attrs.field(init=False)
    media: tuple[PlacedMedia, ...] = attrs.field(init=False)
    expert_start: int = attrs.field(init=False)
    info: EngineInfo = attrs.field(init=False)
    on_end: Callable[[Generation], None] = attrs.field(init=False)
    losses: tuple[Loss, ...] = ()
    malformed: int = 0
    refused_backoff_s: float = 0.05
    waits_since: float = 0.0
    placed_at: float = 0.0
    called: anyio.Event | None = None
    _is_paused: bool = False

    counts: TokenCounts = attrs.field(init=False)
    is_running: bool = False
    deadline: float = attrs.field(init=False)
    done: anyio.Event = attrs.field(init=False)
    error: str = ""
    first_at: float | None = None
    loss: Loss | None = None
    is_lost: bool = False
    is_malformed: bool = False
    is_interrupted: bool = False
    is_abandoned: bool = False

    @property
    def count(self) -> int:
        """How many ids there are."""
        return len(self.ids)

    def packed(self) -> tuple[bytes, bytes]:
        """Ids, int32, and log-probs, float32; the same objects to all callers once it is over."""
        if self._packed is None or len(self._packed[0]) != 4 * len(self.ids):
            self._packed = (self.ids.tobytes(), self.log_probs.tobytes())
        return self._packed

    @property
    def last_part(self) -> Dispatch | None:
        """The request that was made last; None before the first."""
        return self.parts[-1] if self.parts else None

    @property
    def replica(self) -> str:
        """Name of the replica that got the last request; empty before the first one."""
        return self.parts[-1].replica.name if self.parts else ""

    @property
    def request_id(self) -> str:
        """Of the request that was made last; empty before the first one."""
        return self.parts[-1].request_id if self.parts else ""

    @property
    def discarded_tokens(self) -> int:
        """Tokens that were taken and dropped: when it restarted, or past those that are kept."""
        dropped = 0 if self.kept is None else self.count - self.kept
        return dropped + sum(part.count for part in self.parts if part.is_discarded)

    def kept_part(self) -> Generation:
        """What the caller keeps of it: itself, or a copy of its beginning."""
        if self.kept is None:
            return self
        count, width = self.kept, 4 * self.kept * self.top_count
        ends = list(accumulate(length for _, length in self.versions))
        part = copy.copy(self)
        part.ids, part.log_probs, part._packed = self.ids[:count], self.log_probs[:count], None
        part.versions = [
            [version, min(length, count - end + length)]
            for (version, length), end in zip(self.versions, ends, strict=True)
            if end - length < count
        ]
        part.top_ids, part.top_log_probs = self.top_ids[:width], self.top_log_probs[:width]
        if self.expert_shape is not None:
            size = self._expert_bytes * (self.expert_room + count)
            part.routed_experts = self.routed_experts[:size]
        return part

    def top(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None:
        """The (T, k) most likely ids of its T tokens and their log-probs; None where k = 0."""
        if not self.top_count:
            return None
        shape = (self.count, self.top_count)
        ids = np.frombuffer(bytes(self.top_ids), np.int32).reshape(shape)
        return ids, np.frombuffer(bytes(self.top_log_probs), np.float32).reshape(shape)

    @property
    def known_experts(self) -> int:
        """Tokens whose experts have arrived."""
        if self.expert_shape is None:
            return 0
        return len(self.routed_experts) // self._expert_bytes

    def experts(self) -> npt.NDArray[np.int16] | None:
        """(N, layers, top_k) of the first N tokens asked for; None where nothing is asked."""
        if self.expert_shape is None:
            return None
        return np.frombuffer(bytes(self.routed_experts), np.int16).reshape(-1, *self.expert_shape)

    @property
    def _expert_bytes(self) -> int:
        """Of one token."""
        assert self.expert_shape is not None
        layers, top_k = self.expert_shape
        return 2 * layers * top_k

    # What is asked for.

    def ask(
        self,
        *,
        session_id: str,
        prompt_ids: bytes | TokenPrefix,
        sampling: SamplingParams,
        priority: int = 0,
        known_experts: int = 0,
        group_id: str = "",
        limit: Limit | None = None,
        trajectory: int = NO_TRAJECTORY,
        media: Sequence[PlacedMedia] = (),
    ) -> Generation:
        """Say what is to be generated, once, before it is; returns itself.

        Args:
            session_id: The conversation; its requests stay on one replica while that serves well.
            prompt_ids: int32 little-endian, packed; or the trajectory's prefix.
            sampling: Checked where there is no `limit`: a trajectory has checked its own.
            priority: Larger is served first, here and in the engine.
            known_experts: Tokens of the prompt whose routed experts the caller has already.
            group_id: Trajectories that begin with the same prompt; "" for one on its own.
            limit: The generation's, which engines keep too; the caller awaits it within. It stands
                still while the runtime lets the request wait.
            trajectory: Its number in the run's events.
            media: Those in the prompt, in order; a replica is sent each once, while it has it.

        Raises:
            EngineError: The sampling cannot be sent.
        """
        if limit is None:
            check_sampling(sampling)
        self.session_id, self.prompt, self.sampling = session_id, prompt_ids, sampling
        self.priority, self.group_id, self.trajectory = priority, group_id, trajectory
        self.limit, self.media = limit or Clock(), tuple(media)
        self.top_count, self.expert_start = sampling.top_log_probs, known_experts
        return self

    def set_facts(self, info: EngineInfo) -> None:
        """Say what the engines are that will run it."""
        self.info, self.expert_shape = info, info.capabilities.expert_shape
        if self.expert_shape is not None:
            self.expert_room = self.prompt_tokens - self.expert_start

    @property
    def clock(self) -> Clock:
        """The trajectory's."""
        return self.limit.clock

    @property
    def prompt_tokens(self) -> int:
        """Tokens that the next request begins with: the prompt, and the answer so far."""
        count = len(self.prompt) // 4 if isinstance(self.prompt, bytes) else self.prompt.length
        return count + self.count

    @property
    def tokens_left(self) -> int:
        """What is left of the budget."""
        return self.sampling.max_new_tokens - self.count

    def begin(self, dispatch: Dispatch, counts: TokenCounts) -> None:
        """A request is about to be sent; the trajectory's time counts from now on.

        What is taken then comes from this request, after the tokens there are.
        """
        self.resume()
        dispatch.start = self.count
        self.parts += (dispatch,)
        self.counts, self.done, self.is_running = counts, anyio.Event(), True
        self.deadline = self.limit.ends_at
        self.finish_reason, self.error, self.first_at, self.loss = None, "", None, None
        self.is_lost = self.is_malformed = self.is_interrupted = False

    def build_submit(self, now: float) -> Submit:
        """The message that asks for the rest of the answer."""
        prompt = self.prompt if isinstance(self.prompt, bytes) else self.prompt.packed()
        sampling = self.sampling
        if self.count:
            prompt += self.ids.tobytes()
            sampling = msgspec.structs.replace(sampling, max_new_tokens=self.tokens_left)
        return Submit(
            self.request_id,
            prompt,
            sampling,
            self.session_id,
            self.priority,
            remaining_s=None if self.deadline == math.inf else max(0.0, self.deadline - now),
            routed_experts=self.expert_shape is not None,
            routed_experts_start=self.expert_start + self.known_experts,
            media=tuple((each.medium.digest, each.start, each.count) for each in self.media),
        )

    # How it is filled.

    def restart(self, reason: str) -> None:
        """Drop the tokens, before the request is made again from its prompt."""
        for part in self.parts:
            part.is_discarded = True
        self.restarts += (reason,)
        self.ids, self.log_probs, self._packed, self.versions = array("i"), array("f"), None, []
        self.finish_reason, self.cached_tokens = None, 0
        self.top_ids = self.top_log_probs = self.routed_experts = b""

    def append(self, chunk: Chunk) -> int:
        """Append a chunk's tokens; how many, 0 where all were taken before.

        Raises:
            ChunkFault: Tokens are missing before it, are there twice or are too many, or what comes
                with them does not match them; nothing was taken.
        """
        size = len(chunk.ids)
        if size % 4 or len(chunk.log_probs) != size:
            raise ChunkFault(f"{size} bytes of ids with {len(chunk.log_probs)} bytes of log-probs")
        self._check_top(chunk)
        self._check_experts(chunk)
        part = self.last_part
        known = self.count if part is None else part.count
        if chunk.offset > known:
            raise ChunkFault(f"tokens {known} to {chunk.offset} are missing")
        if chunk.offset < known < chunk.offset + size // 4:
            raise ChunkFault(f"tokens {chunk.offset} to {known} are there twice, beside new ones")
        count = size // 4 if chunk.offset == known else 0
        if part is not None and count > self.tokens_left:
            most = self.sampling.max_new_tokens
            raise ChunkFault(f"{self.count + count} tokens; at most {most} were wanted")
        if chunk.offset == known and (chunk.top_ids or chunk.routed_experts):
            self._append_rare(chunk)
        if count:
            if not self.ids:
                self.ids, self.log_probs = array("i"), array("f")
            self.ids.frombytes(chunk.ids)
            self.log_probs.frombytes(chunk.log_probs)
            if part is not None:
                part.count += count
            if self.versions and self.versions[-1][0] == chunk.weight_version:
                self.versions[-1][1] += count
            else:
                self.versions.append([chunk.weight_version, count])
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            self.cached_tokens = chunk.cached_tokens
        if count or chunk.finish_reason is not None:
            self._call_readers()
        return count

    def _append_rare(self, chunk: Chunk) -> None:
        """Append what few requests ask for; the others have no buffers for it."""
        if not (self.top_ids or self.routed_experts):
            self.top_ids, self.top_log_probs = bytearray(), bytearray()
            self.routed_experts = bytearray()
        self.top_ids += chunk.top_ids
        self.top_log_probs += chunk.top_log_probs
        self.routed_experts += chunk.routed_experts

    def take(self, chunk: Chunk) -> bool:
        """Take what the engine sent; False where it contradicts what came before it."""
        counts, tokens = self.counts, len(chunk.ids) // 4
        if self.is_abandoned or self.is_malformed:
            counts.late += tokens
            return True
        try:
            if find_outside_id(chunk.ids[: 4 * tokens], self.info.vocab_size) is not None:
                raise ChunkFault(describe_outside_id(chunk.ids, self.info.vocab_size))
            count = self.append(chunk)
        except ChunkFault as error:
            counts.refused += tokens
            self.is_malformed = True
            self.error = f"{self.replica} sent a faulty chunk: {error}"
            return False
        counts.taken += count
        counts.repeated += tokens - count
        if count and self.first_at is None:
            self.first_at = self.clock.now()
        self.error = chunk.error
        return True

    def end(self, lost_reason: str) -> None:
        """The engine no longer works on the request."""
        self.is_lost = lost_reason != ""
        self.error = self.error or lost_reason
        self.on_end(self)

    def recall(
        self, ids: bytes, log_probs: bytes, versions: list[list[int]], finish: FinishReason | None
    ) -> None:
        """Take the tokens of an answer that a journal remembers; it is over."""
        self.ids, self.log_probs = array("i", ids), array("f", log_probs)
        self._packed = (ids, log_probs)
        self.versions, self.finish_reason = versions, finish
        self._call_readers()

    def remove_reader(self, reader: Callable[[Generation], object]) -> None:
        """Call a reader no more; harmless where it is none."""
        self.on_tokens = tuple(each for each in self.on_tokens if each is not reader)

    def _call_readers(self) -> None:
        for reader in self.on_tokens:
            try:
                reader(self)
            except KeyboardInterrupt:
                raise
            except BaseException:  # other requests' tokens come by the same call
                logger.exception("a reader of tokens raised; it is not called again")
                self.remove_reader(reader)

    def _check_top(self, chunk: Chunk) -> None:
        size, count = len(chunk.top_ids), len(chunk.ids) // 4
        if size % 4 or len(chunk.top_log_probs) != size:
            raise ChunkFault(
                f"{size} bytes of top ids with {len(chunk.top_log_probs)} bytes of log-probs"
            )
        if self.top_count and size != 4 * count * self.top_count:
            raise ChunkFault(
                f"{size // 4} top ids with {count} tokens; expected sampling.top_log_probs = "
                f"{self.top_count} with each"
            )

    def _check_experts(self, chunk: Chunk) -> None:
        if not chunk.routed_experts or self.expert_shape is None:
            return
        size, each = len(chunk.routed_experts), self._expert_bytes
        if size % each:
            raise ChunkFault(f"{size} bytes of routed experts; expected {each} for each token")
        known, count = self.known_experts + size // each, self.count + len(chunk.ids) // 4
        if known > self.expert_room + count:
            raise ChunkFault(
                f"routed experts of {known} tokens; expected at most {self.expert_room + count}"
            )

    # What becomes of it.

    def fail(self, message: str, *, reason: str | None = None) -> EngineError:
        """The error that ends it; the generation keeps its tokens."""
        self.finish_reason = "error"
        return EngineError(message, reason=reason)

    def is_complete(self) -> bool:
        """Whether the tokens are a whole answer, whose end the engine had not told yet."""
        count = self.count
        self.finish_reason = self.info.find_ending(
            self.sampling, self.prompt_tokens - count, count, self.ids[-1] if count else 0
        )
        return self.finish_reason is not None

    def count_losses(self) -> tuple[int, int]:
        """Engines that had to be restarted with it in flight, and connections that broke."""
        lost = sum(loss.is_process_lost for loss in self.losses)
        excused = sum(loss.is_excused for loss in self.losses)
        return lost, len(self.losses) - lost - excused

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
            part, tokens = self.last_part, self.count
            note = f"{tokens:,} tokens so far" if part and part.count else NO_TOKEN
            since = now - self.placed_at
            return Wait("generation", since, self.replica, note=note, path=path)
        if carried_since is not None:
            return Wait("held", now - carried_since, path=path)
        return Wait("queue", now - self.waits_since, path=path)
