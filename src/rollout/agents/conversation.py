"""One conversation of a trajectory: its tokens, its messages, its seeds and its engine session."""

from __future__ import annotations

from array import array
from contextlib import suppress
from typing import TYPE_CHECKING

from rollout.agents.budget import length_error
from rollout.agents.conversation_log import ConversationLog
from rollout.agents.identity import Identity, RejectedPrompt
from rollout.agents.message_log import MessageLog
from rollout.agents.places import Row, check_ids, check_purpose
from rollout.agents.trajectory_state import SettlingLimits
from rollout.agents.turn import AssistantTurn, answer
from rollout.agents.turn_end import TurnEnd
from rollout.agents.wording import Worded, no_room
from rollout.chat.reasoning import opens_reasoning
from rollout.chat.trajectory import BRANCH, MAIN, SUBAGENT
from rollout.chat.transcript import Transcript
from rollout.drives import UnresponsiveError
from rollout.engine.driver.generation import Generation
from rollout.errors import AgentError, LimitExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rollout.agents.kept_messages import KeptMessages
    from rollout.agents.trajectory_state import TrajectoryState
    from rollout.agents.wording import Given
    from rollout.chat.drift import Drift
    from rollout.engine.core import SamplingParams
    from rollout.limits import Deadline
    from rollout.tools import ToolResult
    from rollout.types import InvalidToolCall, ToolCall


class Conversation:
    """A conversation with the model; it becomes a segment of the trajectory.

    `AgentContext.main` is the first; `branch` and `subagent` open others. Several may be used at
    once, each by one task. Open those of one conversation in a fixed order: seeds derive from it.

    Attributes:
        sampling: How the next generation is sampled; assign to change it. Its `max_new_tokens`
            is lowered to what the lengths leave, its `seed` set for each turn.
        trainable: Whether a trainer may learn from it; None: as the trajectory.
        reward: Its own; None: the trajectory's.
        on_tokens: Called on the loop with the `Generation` under way at each of its chunks. They
            must return at once; one that raises is logged and left out until the next generation.
        assistant_turns, user_turns: Generations so far; answers of tools or users so far.
        cut_by: As `AssistantTurn.cut_by`, of the last generation.
    """

    def __init__(
        self,
        state: TrajectoryState,
        log: ConversationLog,
        sampling: SamplingParams,
        identity: Identity,
        *,
        group_id: str = "",
    ) -> None:
        self.sampling = sampling
        self.trainable: bool | None = None
        self.reward: float | None = None
        self.on_tokens: list[Callable[[Generation], object]] = []
        self.assistant_turns = 0
        self.user_turns = 0
        self.cut_by: str | None = None
        self._opened: tuple[Conversation, ...] = ()
        self._state = state
        self._log = log
        self._identity = identity
        self._session_id = identity.session_id
        self._group_id = group_id
        self._turn_deadline = state.deadline.now
        self._asked_for = 0
        self._errors_in_a_row = 0
        self._known_tokens = 0
        self._is_generating = False
        self._unsettled: tuple[Given | array[int], ...] = ()

    @property
    def transcript(self) -> Transcript:
        """The exact tokens so far; those of the last row, where the history is rendered again."""
        return self._log.transcript

    @property
    def rows(self) -> Sequence[Row]:
        """Its rows in order; one, unless its history was rendered again."""
        return self._log.rows

    @property
    def messages(self) -> KeptMessages:
        """The conversation so far, decoded as it is read."""
        return self._log.message_log.messages

    @property
    def purpose(self) -> str:
        """Of its segment: "main", "branch", "subagent", or what its agent calls it."""
        return self._log.rows[0].purpose

    @property
    def session_id(self) -> str:
        """Names it to the router and the engines."""
        return self._session_id

    @property
    def opened(self) -> tuple[Conversation, ...]:
        """The conversations opened from it, in their order."""
        return self._opened

    @property
    def turn_deadline(self) -> Deadline:
        """By when the last turn must have been answered."""
        return self._turn_deadline

    def all(self) -> Iterator[Conversation]:
        """It and those opened from it, each before its own, in the order of their opening."""
        yield self
        for each in self._opened:
            yield from each.all()

    def begin(self, worded: Worded) -> None:
        """The prompt."""
        self._log.begin(worded)

    async def generate(self) -> AssistantTurn:
        """Have the model generate; its tokens are in the transcript then, also when cut short.

        Raises:
            LimitExceeded: A length leaves no room for a token, or a deadline fired; let it pass.
            EngineError: The engine failed or was lost.
            AgentError: It is generating already, or has not begun.
        """
        self._check_idle("generate")
        self._is_generating = True
        try:
            if self._unsettled:
                await self._settle()
            state, is_over, bounded_by = self._state, False, ""
            started = state.clock()
            deadline = state.deadline_of_generation(started)
            generation = Generation(tuple(self.on_tokens))
            seed = self._identity.seed_of_turn(self.assistant_turns)
            try:
                if state.renders_again and self._log.may_be_rendered_again:
                    with deadline:
                        await self._render_again()
                budget, bounded_by = state.budget(self.transcript, self.sampling)
                sampling = state.sampling_of_turn(self.sampling, budget, seed)
                # Not in a coroutine of its own: every trajectory waits here.
                await state.services.engines.generate(
                    generation,
                    session_id=self.session_id,
                    prompt_ids=self.transcript.prefix,
                    sampling=sampling,
                    priority=state.prompt.priority,
                    known_experts=self.transcript.routed_length,
                    group_id=self._group_id,
                    deadline=deadline,
                )
                if generation.finish_reason == "abort":
                    raise state.abort_error(self.session_id, deadline.now)
                is_over = True
            except (LimitExceeded, UnresponsiveError) as error:
                self._settling_limits.settle(error)
                raise
            finally:
                self._turn_deadline = deadline.outer or deadline.now
                said, now = generation.finish_reason, state.clock()
                end = TurnEnd.of(said, bounded_by=bounded_by, deadline=deadline.now, now=now)
                self._arrived(generation, seed, end, started, is_over=is_over)
            return self._say()
        finally:
            self._is_generating = False

    def _arrived(
        self, generation: Generation, seed: int, end: TurnEnd, started: float, *, is_over: bool
    ) -> None:
        """Append what came of a generation, whatever became of the wait for it."""
        state = self._state
        state.note_generation(generation, state.clock() - started)
        if not (generation.ids or generation.finish_reason):
            return
        self._log.take(generation, end.finish_reason, seed)
        state.count_tokens(generation, self._known_tokens)
        self._known_tokens = len(self.transcript)
        self.assistant_turns += 1
        self.cut_by = end.cut_by
        if not is_over:
            with suppress(Exception):  # a parser must not hide what ended the wait
                self._say()

    async def call_tools(self, calls: Sequence[ToolCall | InvalidToolCall]) -> list[ToolResult]:
        """Run the calls side by side and append what they answer; results in the order of calls.

        Raises:
            LimitExceeded: A deadline fired, or the answers leave no room for another token.
        """
        self._check_idle("call_tools")
        await self._settle()
        state = self._state
        with self._settling_limits:
            state.count_calls(len(calls))
            results = await state.tools.run(calls, turn_deadline=self._turn_deadline)
            state.tool_rewards += [r.reward for r in results if r.reward is not None]
            state.services.tally.tool_calls += len(calls)
            self._errors_in_a_row = state.count_errors(results, self._errors_in_a_row)
        await self.answer([answer(call, r) for call, r in zip(calls, results, strict=True)])
        return results

    async def answer(self, messages: Given) -> None:
        """Append what tools or a user answer to the model's turn; it counts as a turn of theirs.

        Raises:
            LimitExceeded: It would leave no room for one more token; nothing is appended.
        """
        self._check_idle("answer")
        await self._settle()
        self.user_turns += 1
        await self._observe(messages)

    def observe(self, messages: Given) -> None:
        """Append messages that the model reads and did not write.

        Give all that come before the next turn at once: where nothing was generated since the last
        ones, a turn without words stands between. A text of more than 16,000 characters is encoded
        beside the event loop: `settle` and whatever else of the conversation is awaited append it.

        Raises:
            LimitExceeded: They would leave no room for one more token; nothing is appended. Of a
                long text `settle` may find that out.
        """
        self._check_idle("observe")
        given: Worded | Given = messages
        if not self._unsettled:
            with self._settling_limits:
                given = self._state.wording.observation_now(
                    messages, self.transcript, self._log.last_turn
                )
        if isinstance(given, Worded):
            self._end_open_turn()
            self._log.observe(given)
        else:
            self._unsettled += (given,)

    def observe_ids(self, ids: Sequence[int]) -> None:
        """Append tokens that the model reads and did not sample, as they are.

        Nothing is added to them: the end of the model's turn and the opening of the next are yours.
        They are in no message, so that from then on the history is not rendered again, nor
        compared with a full rendering.

        Args:
            ids: In the engines' vocabulary; none at all changes nothing.

        Raises:
            LimitExceeded: They would leave no room for one more token; nothing is appended.
            AgentError: They are no such ids.
        """
        self._check_idle("observe_ids")
        packed = check_ids(ids, self._state.services.engines.info.vocab_size)
        if self._unsettled:
            self._unsettled += (packed,)
        else:
            self._observe_ids(packed)

    async def settle(self) -> None:
        """Append what `observe` has left to be encoded.

        Raises:
            LimitExceeded: It would leave no room for one more token, and is dropped.
        """
        self._check_idle("settle", is_begun=False)
        await self._settle()

    async def branch(self, position: int | None = None, *, purpose: str = BRANCH) -> Conversation:
        """A conversation that continues this one otherwise, from its end or from an earlier place.

        Its transcript begins with this one's first tokens, which are context there: mask 0.

        Args:
            position: How many tokens; None: all there are. The end of a prompt, of a turn or of
                what answered it, or a place within a turn, which the branch then continues.
            purpose: Of its segment.

        Raises:
            AgentError: There is no such place.
        """
        check_purpose(purpose)
        identity = self._next_identity()
        if not self._is_generating:
            self._check_idle("branch")
            await self._settle()
        at = len(self.transcript) if position is None else position
        return self._open(self._log.fork(at, purpose), identity, self._group_id)

    async def subagent(self, messages: Given, *, purpose: str = SUBAGENT) -> Conversation:
        """A conversation of its own, which begins with these messages and the same tools.

        Raises:
            LimitExceeded: They are more than fits.
            AgentError: They cannot be rendered.
        """
        check_purpose(purpose)
        identity = self._next_identity()
        row = Row(Transcript(), purpose, self.rows[-1], len(self.transcript))
        log = ConversationLog(row, MessageLog(self._state.reader))
        try:
            log.begin(await self._state.wording.prompt(messages))
        except RejectedPrompt as error:
            if error.reason == "bad_message":
                raise AgentError(f"subagent: {error}") from error
            source = {"prompt_length": "lengths.prompt"}.get(error.reason, "engine.context_length")
            raise length_error(source, str(error)) from error
        return self._open(log, identity, "")

    async def check_tokens(self) -> Drift | None:
        """How the transcript differs from its conversation rendered again.

        None if nothing was said, and where that tells nothing: the history is rendered again in any
        case, or ids were observed.

        Raises:
            TemplateError: The template refuses the conversation.
        """
        said = self._log.message_log.said
        if not said or self._state.config.history != "append_only" or self._log.has_raw_ids:
            return None
        return await self._state.wording.drift(self.transcript, self.messages, said)

    def _next_identity(self) -> Identity:
        """Of the next conversation that is opened from here."""
        self._asked_for += 1
        return self._identity.opened(self._asked_for - 1)

    def _open(self, log: ConversationLog, identity: Identity, group_id: str) -> Conversation:
        opened = Conversation(self._state, log, self.sampling, identity, group_id=group_id)
        opened._turn_deadline = self._turn_deadline
        self._opened += (opened,)
        return opened

    def _check_idle(self, what: str, *, is_begun: bool = True) -> None:
        if self._is_generating:
            raise AgentError(f"{what}: {self.session_id} is generating; wait for its turn")
        if is_begun and not self.transcript:
            raise AgentError(f"{what}: {self.session_id} has not begun")

    @property
    def _settling_limits(self) -> SettlingLimits:
        return SettlingLimits(self._state, is_main=self.purpose == MAIN)

    async def _settle(self) -> None:
        while self._unsettled:
            first, *rest = self._unsettled
            self._unsettled = tuple(rest)
            if isinstance(first, array):
                self._observe_ids(first)
            else:
                await self._observe(first)

    async def _observe(self, messages: Given) -> None:
        self._end_open_turn()
        state, log = self._state, self._log
        with self._settling_limits:
            log.observe(await state.wording.observation(messages, log.transcript, log.last_turn))

    def _observe_ids(self, ids: array[int]) -> None:
        room, source = self._state.wording.room(self.transcript)
        with self._settling_limits:
            if len(ids) >= room:
                raise no_room(source, str(len(ids)))
        if ids:
            self._end_open_turn()
            text = self._state.services.template.decode(ids)
            self._log.observe_ids(ids, in_reasoning=opens_reasoning(text))

    async def _render_again(self) -> None:
        """Open another row where the template writes the history otherwise than the row has it.

        Raises:
            LimitExceeded: The new row would leave no room for a token; the old one stays.
        """
        if self._log.render_again(await self._state.wording.row(self._log.message_log)):
            self._known_tokens = 0

    def _say(self) -> AssistantTurn:
        return self._log.end_turn(self._state.reader, self.cut_by)

    def _end_open_turn(self) -> None:
        """A turn that a branch was to continue, and does not, is what there is of it."""
        if self._log.open_turn is not None:
            self._say()
