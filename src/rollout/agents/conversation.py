"""One conversation of a trajectory: its tokens, its messages, its seeds and its engine session."""

from __future__ import annotations

from array import array
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from rollout.agents.conversation_opening import OpeningConversation
from rollout.agents.on_demand import NOT_MADE, ListOnDemand
from rollout.agents.openings import begun, first_log, reopened
from rollout.agents.places import check_ids
from rollout.agents.prompt_sampling import sampling_with, warn_of_truncation
from rollout.agents.turn import AssistantTurn, SampledTokens
from rollout.agents.turn_end import TurnEnd
from rollout.agents.turn_events import tell_turn_ended, tell_turn_started
from rollout.agents.turn_options import AS_EVER, TurnOptions
from rollout.chat.reward_values import BadRewardError, finite_number
from rollout.chat.trajectory import MAIN
from rollout.chat.transcript import common_length
from rollout.containment import UnresponsiveError
from rollout.engine.pool.generation import Generation
from rollout.engine.pool.request_checks import describe_sampling_fault
from rollout.errors import AgentError, EngineError, LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence
    from typing import Any

    from rollout.agents.conversation_log import ConversationLog
    from rollout.agents.identity import Identity
    from rollout.agents.trajectory_state import TrajectoryState
    from rollout.agents.turn_options import TurnStop
    from rollout.agents.wording import Given, Worded, Wording
    from rollout.engine.core import SamplingParams
    from rollout.limits import Limit


class _NoStop:
    """In the place of a stop; unlike a `nullcontext`, it costs a frame that is in it nothing."""

    @staticmethod
    def __enter__() -> None:
        pass

    @staticmethod
    def __exit__(*_error: object) -> None:
        pass


_NO_STOP = _NoStop()


class Conversation(OpeningConversation):
    """A conversation with the model; it becomes a segment of the trajectory.

    `AgentContext.main` is the first; `branch` and `subagent` open others. Several may be used at
    once, each by one task. Open those of one conversation in a fixed order: seeds derive from it.

    Attributes:
        on_tokens: Called on the loop with the `Generation` under way at each of its chunks. They
            must return at once; one that raises is logged and left out until the next generation.
    """

    on_tokens = ListOnDemand()

    __slots__ = ("_on_tokens", "_reward", "_trainable")

    def __init__(
        self,
        state: TrajectoryState,
        log: ConversationLog,
        sampling: SamplingParams,
        identity: Identity,
        wording: Wording,
        *,
        group_id: str = "",
    ) -> None:
        super().__init__(state, log, sampling, identity, wording, group_id=group_id)
        self._trainable: bool | None = None
        self._reward: float | None = None
        self._on_tokens = NOT_MADE

    @property
    def trainable(self) -> bool | None:
        """Whether a trainer may learn from it; None: as the trajectory.

        Raises:
            AgentError: What is assigned is neither a bool nor None.
        """
        return self._trainable

    @trainable.setter
    def trainable(self, trainable: bool | None) -> None:
        if not isinstance(trainable, bool | None):
            what = f"{self.session_id}: trainable = {trainable!r:.80}"
            raise AgentError(f"{what}: expected bool or None")
        self._trainable = trainable

    @property
    def reward(self) -> float | None:
        """Its own; None: the trajectory's.

        Raises:
            AgentError: What is assigned is neither a finite number of float32 nor None.
        """
        return self._reward

    @reward.setter
    def reward(self, reward: float | None) -> None:
        try:
            self._reward = None if reward is None else finite_number(reward, "the agent")
        except BadRewardError:
            what = f"{self.session_id}: reward = {reward!r:.80}"
            raise AgentError(f"{what}: expected a finite number") from None

    def begin(self, worded: Worded) -> None:
        """The prompt."""
        self._log.begin(worded)

    async def begin_with(
        self, messages: Given, *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Begin with these messages in place of the prompt's, or of those that it was opened with.

        A length that the conversation runs into from now on is its agent's to judge, and ends
        nothing by itself.

        Args:
            messages: At least one.
            tools: Schemas offered in place of the trajectory's tools; None: those, or what it was
                opened with.

        Raises:
            LimitExceeded: They are more than fits; nothing has begun.
            AgentError: They cannot be rendered, or it has begun.
        """
        is_opened = self.purpose != MAIN and tools is None
        wording = self._wording if is_opened else self._state.wording_of(tools)
        worded = await begun("begin_with", wording, messages)
        if self.transcript and (self.purpose == MAIN or self.rows[0].seeds):
            raise AgentError(f"begin_with: {self.session_id} has begun already")
        self._wording, self._log = (
            wording,
            first_log(reopened(self.rows[0], worded), wording, worded),
        )
        self._settles_lengths = False

    async def generate(self, options: TurnOptions = AS_EVER, **sampling: Any) -> AssistantTurn:
        """Have the model generate; its tokens are in the transcript then, also when cut short.

        Args:
            options: What is particular to this turn.
            sampling: Fields of `sampling` that differ in this turn, such as ``temperature=0.2``;
                None says nothing.

        Raises:
            LimitExceeded: A length leaves no room for a token, `agent.max_assistant_turns` is
                reached, or a deadline fired; let it pass.
            EngineError: The engine failed or was lost, or a field has a value that cannot be.
            AgentError: It is generating already, or has not begun; a field is unknown.
        """
        self._check_idle("generate")
        if sampling:
            options = self._options_with(options, sampling)
        self.check_turns()
        generation, seed = self._generation, _ = self._begun(options)
        self._state.generations += 1  # now, since several conversations may generate at once
        before = self.assistant_turns
        try:
            if self._unsettled:
                await self._settle()
            # Every trajectory waits in this frame: what it has room for costs each.
            started = self._told_start()
            self._turn, limit = self._state.open_turn()
            recalled_s, is_over, is_new = None, False, False
            try:
                with limit, options.stop or _NO_STOP:
                    if self.history != "append_only" and self._log.may_be_rendered_again:
                        await self._render_again()
                    if self._has_answers:
                        recalled_s = await self._recalled(generation, options.sampling, seed)
                    if recalled_s is None:
                        await self._asked(generation, options.sampling, seed, limit)
                    self._check_abort(generation, options.stop, limit)
                is_over, is_new = True, recalled_s is None
            except (LimitExceeded, UnresponsiveError) as error:
                self._settling_limits.settle(error)
                raise
            finally:
                generation.kept = self._kept(generation, options.stop)
                end = self._ended(generation, limit, started, recalled_s)
                waits = is_new and self._noted(seed, generation, started)
                self._arrived(generation, seed, end, is_over=is_over)
            if waits:
                await self._until_room()
            return self._counted(self._say())
        finally:
            self._generation = None
            self._state.generations -= self.assistant_turns == before  # no token came

    def check_turns(self) -> None:
        """Let another turn be prepared for, in this conversation or another of the trajectory.

        Raises:
            LimitExceeded: `agent.max_assistant_turns` is reached; let it pass.
        """
        try:
            self._state.check_turns()
        except LimitExceeded as error:
            self._settling_limits.settle(error)
            raise

    def _counted(self, turn: AssistantTurn) -> AssistantTurn:
        """Count a turn in which tools could be called."""
        if self._wording.reader.schemas:
            tally = self._state.services.tally
            tally.turns_with_tools += 1
            tally.turns_with_calls += bool(turn.calls)
        return turn

    def _options_with(self, options: TurnOptions, fields: Mapping[str, Any]) -> TurnOptions:
        services = self._state.services
        drawn = sampling_with(options.sampling or self.sampling, fields, services)
        seed = drawn.seed if fields.get("seed") is not None else options.seed
        return msgspec.structs.replace(options, sampling=drawn, seed=seed)

    def _told_start(self) -> float:
        """When the turn begins, which those learn who want to know."""
        state, started = self._state, self._state.clock()
        if state.services.events.tells_all:
            tell_turn_started(state.services.events, self._identity, self.assistant_turns, started)
        return started

    def _check_abort(self, generation: Generation, stop: TurnStop | None, limit: Limit) -> None:
        """Raise what a generation ends with that was aborted, unless its turn's stop did that."""
        if generation.finish_reason == "abort" and (stop is None or stop.kept is None):
            raise self._state.abort_error(self._session_id, limit.deadline)

    def _drawn(self, generation: Generation, sampling: SamplingParams, seed: int) -> SamplingParams:
        """How the next turn is sampled; its generation knows the length that bounds it then."""
        state, kept_tokens = self._state, self._wording.kept_tokens
        try:
            budget, bounded_by = state.budget(self.transcript, sampling, kept_tokens)
            generation.bounded_by = bounded_by
            drawn = state.sampling_of_turn(sampling, budget, seed)
            generation.is_truncated = self.trainable is not False and warn_of_truncation(
                drawn, state.services, state.given, self._identity
            )
            return drawn
        except (TypeError, AttributeError):
            fault = describe_sampling_fault(sampling)  # which agents assign
            if not fault:
                raise
            raise EngineError(fault, reason="sampling") from None

    def _asked(
        self,
        generation: Generation,
        sampling: SamplingParams | None,
        seed: int,
        limit: Limit,
    ) -> Coroutine[Any, Any, None]:
        """The engines' part of a turn, to be awaited."""
        state, transcript, sampling = self._state, self.transcript, sampling or self.sampling
        return state.services.engines.generate(
            generation,
            session_id=self._session_id,
            prompt_ids=transcript.prefix,
            sampling=self._drawn(generation, sampling, seed),
            priority=state.given.priority,
            known_experts=transcript.routed_length,
            group_id=self._group_id,
            limit=limit,
            trajectory=self._identity.number,
            media=transcript.media,
        )

    @property
    def _has_answers(self) -> bool:
        """Whether a log may remember the next turn."""
        return self._state.log is not None and self._state.log.has_answers

    def _recalled(
        self, generation: Generation, sampling: SamplingParams | None, seed: int
    ) -> Coroutine[Any, Any, float | None]:
        """What took the turn that the log remembers, to be awaited; None where it has none."""
        assert self._state.log is not None
        self._drawn(generation, sampling or self.sampling, seed)
        return self._state.log.recall_turn(self.transcript.prefix, seed, generation)

    def _noted(self, seed: int, generation: Generation, started: float) -> bool:
        """Have the log remember a turn that is over; whether to wait for room in it then."""
        state, prefix = self._state, self._log.row.transcript.prefix
        if state.log is None:
            return False
        session, turn, took_s = self._session_id, self.assistant_turns, state.idle_since - started
        return state.log.note_turn(prefix, seed, session, turn, generation, took_s)

    def _until_room(self) -> Coroutine[Any, Any, None]:
        """Until the log has room for further turns, to be awaited."""
        assert self._state.log is not None
        return self._state.log.room()

    def _ended(
        self,
        generation: Generation,
        limit: Limit,
        started: float,
        recalled_s: float | None,
    ) -> TurnEnd:
        """The wait for a generation is over now, whatever became of it."""
        state = self._state
        now = state.idle_since = state.clock()
        state.note_generation(generation, now - started - generation.held_s + (recalled_s or 0.0))
        end = TurnEnd("stop", None)
        if generation.kept is None:
            said = generation.finish_reason
            end = TurnEnd.of(
                said, bounded_by=generation.bounded_by, deadline=limit.deadline, now=now
            )
        events = state.services.events
        if events.is_on:
            had, times, turn = len(self.transcript), (started, now), self.assistant_turns
            tell_turn_ended(events, self._identity, turn, times, had, generation, end)
        return end

    async def generate_ids(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any] | SamplingParams | None = None,
    ) -> SampledTokens:
        """Have the model continue these tokens, for code that keeps ids rather than messages.

        What they have beyond the transcript is appended as an observation, as by `observe_ids`, and
        counts as an answer where it follows a turn of the model's.

        Args:
            prompt_ids: The whole transcript so far, and what the model is told next.
            sampling: Fields of `sampling` that differ in this generation, or all of it.

        Raises:
            LimitExceeded: As `generate`.
            EngineError: The engine failed or was lost.
            AgentError: The ids do not begin with the transcript, or are none; an argument is wrong;
                it is generating already, or has not begun. Nothing has been appended.
        """
        self._check_idle("generate_ids")
        drawn = None
        if sampling is not None:
            drawn = self._state.sampling_given("generate_ids", sampling)
        self.check_turns()
        await self._settle()
        beyond = self._beyond(prompt_ids)
        if beyond:
            is_answer = self._log.last_turn is not None
            self._observe_ids(beyond)
            self._user_turns += is_answer
        await self.generate(TurnOptions(sampling=drawn))
        transcript = self.transcript
        *_, said = transcript.generated_spans()
        return SampledTokens(
            ids=transcript.span_ids(said),
            log_probs=array("f", transcript.log_probs()[said.start : said.stop].tobytes()),
            versions=said.versions,
            finish_reason=str(said.finish_reason),
            cut_by=self.cut_by,
        )

    def _beyond(self, prompt_ids: Sequence[int]) -> array[int]:
        """What ids have beyond the transcript, with which they must begin."""
        given = check_ids(prompt_ids, self._state.services.engines.info.vocab_size, "generate_ids")
        known, length = self.transcript.prefix, len(self.transcript)
        if given[:length].tobytes() != known.packed():
            shared = common_length(given, known.slice(0))
            raise AgentError(
                f"generate_ids: {len(given)} ids that differ from the transcript's {length} at "
                f"{shared}; expected the transcript, and what follows it"
            )
        return given[length:]

    def _begun(self, options: TurnOptions) -> tuple[Generation, int]:
        """A generation of no tokens, and its seed."""
        stops = () if options.stop is None else (options.stop,)
        readers = stops if self._on_tokens is NOT_MADE else (*self.on_tokens, *stops)
        if options.seed is not None:
            return Generation(readers, is_seeded=True), options.seed
        return Generation(readers), self._identity.seed_of_turn(self.assistant_turns)

    def _kept(self, generation: Generation, stop: TurnStop | None) -> int | None:
        """How many of its tokens stay: up to what ends the turn early; None: all."""
        kept = None if stop is None else stop.kept
        before = self._state.services.media.kept_of(generation)
        if before is None or (kept is not None and kept <= before):
            return kept
        self._state.sampled_placeholders += 1
        return before

    async def until_kept(self) -> None:
        """Until a journal, where there is one, has the last turn."""
        if self._state.log is not None:
            await self._state.log.kept()

    def _arrived(self, generation: Generation, seed: int, end: TurnEnd, *, is_over: bool) -> None:
        """Append what came of a generation, whatever became of the wait for it."""
        if not (generation.count or generation.finish_reason):
            return
        self._log.take(generation.kept_part(), end.finish_reason, seed)
        if generation.is_truncated:
            kept = generation.kept
            self._state.truncated_tokens += generation.count if kept is None else kept
        self._state.count_tokens(generation, self._known_tokens)
        self._known_tokens = self.transcript.prefix.length
        self._assistant_turns += 1
        self._cut_by = end.cut_by
        if not is_over:
            with suppress(Exception):  # a parser must not hide what ended the wait
                self._say()

    async def _render_again(self) -> None:
        """Open another row where the template writes the history otherwise than the row has it.

        Raises:
            LimitExceeded: The new row would leave no room for a token; the old one stays.
        """
        if self._log.render_again(await self._wording.row(self._log.message_log)):
            self._known_tokens = 0
