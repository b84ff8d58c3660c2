"""What becomes of a request whose replica was lost; no task and no clock in here.

A request resumes elsewhere from the tokens that it has, restarts, or fails, as the policy says.
Requests that kill replicas are told from those that were only there; ``docs/engines.md`` has the
rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import anyio
import attrs
import msgspec

from rollout.engine.channel.messages import Submit
from rollout.engine.core import EngineInfo, SamplingParams
from rollout.engine.driver.generation import Generation
from rollout.engine.driver.pending_request import PendingRequest
from rollout.errors import EngineError
from rollout.limits import Clock, Limit
from rollout.medium import PlacedMedia
from rollout.token_prefix import TokenPrefix

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


RecoveryPolicy = Literal["resume", "restart", "fail"]

#: Answers that contradict themselves before their request fails.
MAX_GARBLED = 3
#: Deaths after which a request starts with no other request beside it, and after which it is
#: quarantined.
SUSPECT_DEATHS = 2
QUARANTINE_DEATHS = 3
#: Deaths that suffice whatever the circumstances: what kills now and then must end too.
MOST_DEATHS = 6
#: Deaths that suffice where nothing else was in flight on the last replica that died.
LONE_DEATHS = 2
#: Reasons of trajectories whose requests are not made again, whatever `scheduling.max_retries` is.
QUARANTINED, NO_ENGINE = "quarantined", "no_engine"
#: Fields of the sampling whose state is not in the tokens: a request that resumes elsewhere would
#: be sampled by other rules than before.
STATEFUL_SAMPLING = ("presence_penalty", "frequency_penalty")


@attrs.define
class RecoveryCounts:
    """What was done about requests whose replica was lost.

    Attributes:
        resumed: Resumed elsewhere from the tokens that they had.
        restarted: Restarted; the tokens that they had were dropped.
        quarantined: Failed, because replicas died of them.
    """

    resumed: int = 0
    restarted: int = 0
    quarantined: int = 0


@attrs.frozen
class Failures:
    """Of the requests of a generation; most have none, and share one such object.

    Attributes:
        deaths: Why replicas died while a request was in flight there.
        tokens: How many the generation had at the last death.
        was_silent: The replica that died last had given it none.
        are_enough: It gets no further replica.
        garbled: Requests whose answer contradicted itself.
        refusals: How often engines that were full refused it.
        isolation: Where it has a replica to itself, until it is no suspect any more.
    """

    deaths: tuple[str, ...] = ()
    tokens: int = 0
    was_silent: bool = False
    are_enough: bool = False
    garbled: int = 0
    refusals: int = 0
    isolation: Isolation | None = None


_NONE = Failures()


@attrs.frozen
class RecoveryRules:
    """What becomes of the requests of a pool whose replica is lost."""

    policy: RecoveryPolicy
    info: EngineInfo
    counts: RecoveryCounts


class Attempt(msgspec.Struct, eq=False, kw_only=True, gc=False):
    """One generation and what has happened to its requests so far.

    Args:
        prompt: int32 little-endian, packed, or the trajectory's prefix.
        like: How it is sampled, apart from the three that follow.
        max_new_tokens: The budget of all of it, of which a request may have a part.
        seed, stop_token_ids: As in `SamplingParams`.
        rules: What becomes of it where its replica is lost.
        known_experts: Tokens of the prompt whose routed experts are known.
        limit: The generation's, within which its caller awaits it.
        trajectory: Its number in the run's events.
        media: The images and videos of the prompt; each of its requests names them.

    Attributes:
        generation: Filled by one request after the other.
        session_id: The trajectory, for errors.
        priority: Larger is served first.
        group_id: Trajectories that begin with the same prompt; "" for one on its own.
        failures: Of its requests so far.
        is_interrupted: Its request is cut off, to resume later from the tokens that it has.
        replica: Where it has a request in flight; empty where it has none.
        pending: That request, while its answer is waited for.
        queue_scope: Of its wait for a place.
        waits_since: When the request that is made now began to wait for a place.
        asked_at: When the place was asked for last: of one that runs, when it got that.
    """

    generation: Generation
    session_id: str
    prompt: bytes | TokenPrefix
    like: SamplingParams
    max_new_tokens: int
    seed: int | None
    stop_token_ids: tuple[int, ...]
    rules: RecoveryRules
    priority: int = 0
    group_id: str = ""
    known_experts: int = 0
    limit: Limit
    trajectory: int = 0
    media: tuple[PlacedMedia, ...] = ()
    failures: Failures = _NONE
    is_interrupted: bool = False
    replica: str = ""
    pending: PendingRequest | None = None
    waits_since: float = 0.0
    asked_at: float = 0.0
    queue_scope: anyio.CancelScope | None = None
    _is_paused: bool = False

    @property
    def deadline(self) -> float:
        """Clock time at which an engine ends it by itself, as things stand."""
        return self.limit.deadline.at

    @property
    def clock(self) -> Clock:
        """The trajectory's."""
        return self.limit.clock

    @property
    def experts_start(self) -> int:
        """Where the routed experts begin that the next request is to tell."""
        return self.known_experts + self.generation.known_experts

    @property
    def prompt_ids(self) -> bytes:
        """What the next request begins with: the prompt and the tokens there are."""
        prompt = self.prompt
        packed = prompt if isinstance(prompt, bytes) else prompt.packed()
        return packed + self.generation.ids.tobytes()

    @property
    def prompt_tokens(self) -> int:
        """The length of that."""
        prompt = self.prompt
        count = len(prompt) // 4 if isinstance(prompt, bytes) else prompt.length
        done = self.generation.count
        return count + done if done else count

    @property
    def sampling(self) -> SamplingParams:
        """How the next request is sampled: what is left of the budget, the same seed."""
        return msgspec.structs.replace(
            self.like,
            max_new_tokens=self.tokens_left,
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
        )

    @property
    def tokens_left(self) -> int:
        """What is left of the budget."""
        return self.max_new_tokens - self.generation.count

    @property
    def has_answer(self) -> bool:
        """Whether the replica that was asked last has given it a token."""
        part = self.generation.last_part
        return part is not None and part.count > 0

    @property
    def is_suspect(self) -> bool:
        """Whether it starts alone, until it is past the point of its last death.

        One that died before it had a token of that replica, or with a second replica.
        """
        before = self.failures
        if not before.deaths or self.generation.count > before.tokens:
            return False
        return before.was_silent or len(before.deaths) >= SUSPECT_DEATHS

    @property
    def is_running(self) -> bool:
        """Whether it has a request in flight."""
        return self.replica != ""

    @property
    def tokens(self) -> int:
        """How many it has so far."""
        return self.generation.count

    def begin_request(self, replica: str) -> None:
        """A request of it is in flight there from now on, and its time counts."""
        self.replica, self.is_interrupted = replica, False
        self.resume()

    def submit(self, request_id: str, remaining_s: float | None) -> Submit:
        """Make the message that asks a replica."""
        return Submit(
            request_id,
            self.prompt_ids,
            self.sampling,
            self.session_id,
            self.priority,
            remaining_s,
            media=tuple((each.medium.digest, each.start, each.count) for each in self.media),
            routed_experts=self.generation.expert_shape is not None,
            routed_experts_start=self.experts_start,
        )

    def end_request(self) -> None:
        """It is not any more."""
        self.replica = ""

    def leave_queue(self) -> None:
        """Let it wait for no place any more, because its trajectory is carried."""
        if self.queue_scope is not None:
            self.queue_scope.cancel()

    def die(self, reason: str, *, is_alone: bool) -> None:
        """The replica died with it in flight; `is_alone`: and with nothing else."""
        deaths = (*self.failures.deaths, reason)
        enough = LONE_DEATHS if is_alone else QUARANTINE_DEATHS
        is_confirmed = (is_alone or self.is_suspect) and len(deaths) >= enough
        self.note(
            deaths=deaths,
            tokens=self.generation.count,
            was_silent=not self.has_answer,
            are_enough=is_confirmed or len(deaths) >= MOST_DEATHS,
        )

    def note(self, **changes: Any) -> None:
        """These of its failures' fields are otherwise from now on."""
        self.failures = attrs.evolve(self.failures, **changes)

    def recover(self, why: str, *, is_garbled: bool = False) -> bool:
        """Prepare the next request; False where the tokens there are are the whole answer.

        Raises:
            EngineError: There is no next request.
        """
        if is_garbled:
            self.note(garbled=self.failures.garbled + 1)
        if self.failures.are_enough:
            self.rules.counts.quarantined += 1
            raise self.failed(self._quarantine_message(), reason=QUARANTINED)
        if self.rules.policy == "fail" or self.failures.garbled > MAX_GARBLED:
            raise self.failed(why)
        if self._is_whole():
            return False
        stateful = stateful_field(self.like)
        if stateful or self.rules.policy == "restart":
            rule = f"sampling.{stateful}" if stateful else "recovery.policy"
            self.generation.restart(f"{why} ({rule})")
            self.rules.counts.restarted += 1
        else:
            self.generation.resumes += 1
            self.rules.counts.resumed += 1
        return True

    def pause(self) -> None:
        """Let its trajectory's time stand still; harmless when called again."""
        if not self._is_paused:
            self._is_paused = True
            self.clock.pause()

    def resume(self) -> None:
        """End `pause`; harmless where there is none."""
        if self._is_paused:
            self._is_paused = False
            self.clock.resume()

    def resume_interrupted(self) -> bool:
        """Prepare the next request after an interruption; False where its answer is whole."""
        self.generation.finish_reason = None
        if self._is_whole():
            return False
        stateful = stateful_field(self.like)
        if stateful:
            self.generation.restart(f"it was interrupted (sampling.{stateful})")
        return True

    def failed(self, message: str, *, reason: str | None = None) -> EngineError:
        """The error that ends it; the generation keeps its tokens."""
        self.generation.finish_reason = "error"
        return EngineError(message, reason=reason)

    def _is_whole(self) -> bool:
        """Whether the lost replica had only not said that it was done."""
        ids, info = self.generation.ids, self.rules.info
        ends = self.stop_token_ids + (() if self.like.ignore_eos else info.eos_ids)
        if ids and ids[-1] in ends:
            self.generation.finish_reason = "stop"
        elif len(ids) >= self.max_new_tokens or self.prompt_tokens >= info.context_length:
            self.generation.finish_reason = "length"
        return self.generation.finish_reason is not None

    def _quarantine_message(self) -> str:
        deaths = self.failures.deaths
        return (
            f"the request of {self.session_id} is quarantined: engines died {len(deaths)} times "
            f"with it in flight ({'; '.join(deaths)})"
        )


class Isolation:
    """A suspect's: it ends at its first tokens, or with its request."""

    def __init__(self, attempt: Attempt, end_isolation: Callable[[], None]) -> None:
        self._attempt = attempt
        self._end_isolation = end_isolation
        attempt.generation.on_tokens += (self,)

    def __call__(self, _: Generation) -> None:
        if not self._attempt.is_suspect:
            self.end()

    def end(self) -> None:
        """End it, once."""
        if self in self._attempt.generation.on_tokens:
            self._attempt.generation.leave_out(self)
            self._end_isolation()


def stateful_field(sampling: SamplingParams) -> str:
    """The first field of `sampling` whose state the tokens do not carry; "" where none is set."""
    return next((name for name in STATEFUL_SAMPLING if getattr(sampling, name)), "")


def record_death(running: Collection[Attempt], reason: str, *, in_flight: int) -> None:
    """A replica died.

    Args:
        running: Requests there that a caller waits for.
        in_flight: All requests there, also those that no caller waits for.
    """
    for attempt in running:
        attempt.die(reason, is_alone=in_flight == 1)
