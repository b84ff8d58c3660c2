"""One conversation of a trajectory: its tokens, its messages, its seeds and its engine session."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rollout.agents.history import History, Row
from rollout.agents.prompt_sampling import read_sampling
from rollout.agents.rendering import Renderer
from rollout.agents.trajectory_state import UNRESPONSIVE
from rollout.chat.result_order import message_ids, result_order
from rollout.chat.reward_values import BadRewardError, as_reward, finite_number
from rollout.chat.trajectory import BRANCH, MAIN, SUBAGENT
from rollout.chat.transcript import Transcript
from rollout.containment import UnresponsiveError
from rollout.errors import AgentError, LimitExceeded
from rollout.types import Outcome, without_padding
from rollout.utf8 import is_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from rollout.agents.history import Rendered
    from rollout.agents.rendering import Given, Observation, Room, Schemas
    from rollout.agents.trajectory_state import TrajectoryState
    from rollout.chat.messages import Messages
    from rollout.engine.core import SamplingParams
    from rollout.engine.pool.generation import Generation
    from rollout.limits import Limit
    from rollout.seeds import Identity


class Conversation:
    """A conversation with the model; it becomes a segment of the trajectory.

    The `AgentContext` is the first; `branch` and `subagent` open others. Several may be used at
    once, each by one task. Open those of one conversation in a fixed order: seeds derive from it.

    Attributes:
        history: As `agent.history`; assign before the first generation to change it.
        on_tokens: Called on the loop with the `Generation` under way at each of its chunks. They
            must return at once; one that raises is logged and left out until the next generation.
    """

    def __init__(
        self,
        state: TrajectoryState,
        sampling: SamplingParams,
        group_id: str = "",
        *,
        history: History | None = None,
        identity: Identity | None = None,
        renderer: Renderer | None = None,
    ) -> None:
        self.history: str = state.services.config.agent.history
        self.on_tokens: list[Callable[[Generation], object]] = []
        self._state, self._sampling, self._group_id = state, sampling, group_id
        self._renderer = renderer or state.renderer
        self._history = history or History(Row(Transcript(), MAIN), self._renderer.reader)
        self._identity = identity or state.identity
        self._session_id = self._identity.session_id
        self._opened: tuple[Self, ...] = ()
        self._opened_count = 0  # with those whose opening failed
        self._turn_began: float | None = None  # by the time of the trajectory's limit
        self._generation: Generation | None = None  # under way
        self._unsettled: tuple[Observation, ...] = ()  # observations still to be encoded
        self._is_closed = False
        self._ends_at_lengths = self.is_main  # else a length is for its agent to judge
        self._reserved_tokens = self._known_tokens = 0
        self._assistant_turns = self._user_turns = self._errors_in_a_row = 0
        self._cut_by: str | None = None
        self._trainable: bool | None = None
        self._reward: float | None = None

    # What there is of it.

    @property
    def is_main(self) -> bool:
        """Whether it is the trajectory's main conversation."""
        return not self._identity.path

    @property
    def state(self) -> TrajectoryState:
        """What all conversations of its trajectory share, with its figures so far."""
        return self._state

    @property
    def transcript(self) -> Transcript:
        """The exact tokens so far; those of the last row, where the history is rendered again."""
        return self._history.transcript

    @property
    def messages(self) -> Messages:
        """The conversation so far."""
        return self._history.messages

    @property
    def session_id(self) -> str:
        """Names it to the router and the engines."""
        return self._session_id

    @property
    def assistant_turns(self) -> int:
        """Generations so far."""
        return self._assistant_turns

    @property
    def user_turns(self) -> int:
        """Answers of tools or users so far."""
        return self._user_turns

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the model has sampled in it, with those of a generation under way."""
        under_way = 0 if self._generation is None else self._generation.count
        return under_way + sum(row.transcript.generated_length for row in self._history.rows)

    @property
    def cut_by(self) -> str | None:
        """As `AssistantTurn.cut_by`, of the last generation."""
        return self._cut_by

    @property
    def room(self) -> int:
        """Tokens that may still be appended, those of `keep_room` apart."""
        return max(0, self._find_room()[0])

    @property
    def sampling(self) -> SamplingParams:
        """How the next generation is sampled; assign `SamplingParams` or a mapping to change it.

        A mapping gives fields as a prompt's `sampling` does: what it leaves out is what the prompt
        and the configuration say. `max_new_tokens` is lowered to what the lengths leave, `seed` set
        for each turn. `generate` takes fields for one turn.

        Raises:
            AgentError: What is assigned has a name that is no field, or a value that cannot be.
            EngineError: A field of `SamplingParams` has a value that is not of its type.
        """
        return self._sampling

    @sampling.setter
    def sampling(self, sampling: SamplingParams | Mapping[str, Any]) -> None:
        self._sampling = read_sampling("sampling", sampling, self._state)

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
    def reward(self) -> Any:
        """What the agent itself gives; assign to set it. Of an opened conversation, its segment's.

        A number, a `Reward` (not of a segment) or None; a reward function of `open_rollout` decides
        in its place.

        Raises:
            AgentError: What is assigned is none of these.
        """
        return self._state.reward if self.is_main else self._reward

    @reward.setter
    def reward(self, reward: Any) -> None:
        try:
            if not self.is_main:
                self._reward = None if reward is None else finite_number(reward, "the agent")
                return
            as_reward(0.0 if reward is None else reward, "the agent")
        except BadRewardError as error:
            what = f"{self.session_id}: reward = {reward!r:.80}"
            expected = error if self.is_main else "expected a finite number"
            raise AgentError(f"{what}: {expected}") from None
        self._state.reward = reward

    # How it begins, and how others are opened from it.

    async def begin(
        self, messages: Given | None = None, *, ids: Sequence[int] | None = None
    ) -> None:
        """Render the prompt and start the simulated user; `generate` does so where nobody has.

        Args:
            messages: In place of the prompt's own, or of those that a segment was opened with.
            ids: The prompt in tokens. Neither it nor the history is rendered then, or compared.
        """
        self._check_open("begin")
        if self.transcript and ids is None and not self.is_main:
            if messages is not None:  # a segment begins as it is opened
                await self.begin_with(without_padding(messages))
            return
        state, is_shared = self._state, messages is None
        given = state.prompt.messages if messages is None else without_padding(messages)
        if ids is None:
            rendered = await self._renderer.render_prompt(given, is_shared=is_shared)
        else:
            rendered = self._renderer.read_opening("begin", ids, given)
        self._check_open("begin")
        if self.transcript:  # another task may have begun it meanwhile
            raise AgentError("begin: the trajectory has begun already")
        if rendered.cut_tokens:
            state.count_cut(rendered.cut_tokens)
        self._history.begin(rendered, self._renderer.prompt_room)
        await state.start_user()

    async def begin_with(self, messages: Given, *, tools: Schemas | None = None) -> None:
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
        row, renderer = self._history.rows[0], self._find_renderer(tools)
        rendered = await renderer.render_opening("begin_with", messages)
        self._check_open("begin_with")
        if self.transcript and (self.is_main or row.seeds):
            raise AgentError(f"begin_with: {self.session_id} has begun already")
        row.transcript = Transcript()
        self._renderer, self._history = renderer, History(row, renderer.reader)
        self._history.begin(rendered, renderer.prompt_room)
        self._ends_at_lengths = False

    def all(self) -> Iterator[Self]:
        """It and those opened from it, each before its own, in the order of their opening."""
        yield self
        for each in self._opened:
            yield from each.all()

    async def branch(
        self,
        position: int | None = None,
        *,
        purpose: str = BRANCH,
        messages: Given | None = None,
        is_ordered: bool = False,
    ) -> Self:
        """A conversation that continues this one differently, from its end or an earlier position.

        Its transcript begins with this one's first tokens, which are context there: mask 0. The
        trajectory begins where nobody has begun it.

        Args:
            position: How many tokens; None: all there are. The end of a prompt, of a turn or of
                what answered it, or within a turn, which the branch then continues.
            purpose: Of its segment.
            messages: What the model reads there first, as by `answer`.
            is_ordered: As for `answer`.

        Raises:
            AgentError: It cannot be continued there.
            LimitExceeded: The messages leave no room for one more token; nothing is opened.
            TemplateError: As `answer`; nothing is opened.
        """
        if not self.transcript:
            await self.begin()
        identity = self._name_next("branch", purpose)
        if self._generation is None:
            self._check_idle("branch")
            await self._settle()
        position = len(self.transcript) if position is None else position
        history = self._history.fork(position, purpose)
        opened = self._make(history, identity, self._renderer, self._group_id or self._session_id)
        if messages is not None:
            await opened.answer(messages, is_ordered=is_ordered)
        self._opened += (opened,)
        return opened

    async def subagent(
        self,
        messages: Given = (),
        *,
        ids: Sequence[int] | None = None,
        purpose: str = SUBAGENT,
        tools: Schemas | None = None,
    ) -> Self:
        """A conversation of its own, which begins with these messages.

        Where the model has spoken in them, they may be longer than a prompt. A "branch" or a
        "compaction" departs from this one where their tokens do, all others from its end.

        Args:
            messages: At least one; null keys are dropped as from a prompt's.
            ids: In place of messages: the tokens that it begins with; `generate_ids` continues it.
            purpose: Of its segment.
            tools: Schemas offered in place of the trajectory's tools; None: this one's.

        Raises:
            LimitExceeded: They are more than fits.
            AgentError: They cannot be rendered; or the ids are none.
        """
        identity, renderer = self._name_next("subagent", purpose), self._find_renderer(tools)
        if ids is None:
            rendered = await renderer.render_opening("subagent", without_padding(messages))
        else:
            rendered = renderer.read_opening("subagent", ids)
        row = Row(Transcript(), purpose, self._history.rows[-1], len(self.transcript))
        history = History(row, renderer.reader)
        history.begin(rendered, renderer.prompt_room)
        opened = self._make(history, identity, renderer)
        self._opened += (opened,)
        return opened

    def _find_renderer(self, tools: Schemas | None) -> Renderer:
        return self._renderer if tools is None else Renderer(self._state.services, tuple(tools))

    def _name_next(self, what: str, purpose: Any) -> Identity:
        """The identity of the conversation that is opened next, once its purpose is checked."""
        self._check_open(what)
        if not is_name(purpose):
            raise AgentError(f"purpose = {purpose!r:.80}: expected a non-empty string in UTF-8")
        self._opened_count += 1
        return self._identity.opened(self._opened_count - 1)

    def _make(
        self, history: History, identity: Identity, renderer: Renderer, group_id: str = ""
    ) -> Self:
        """Make a conversation with this one's settings."""
        parts: Any = {"history": history, "identity": identity, "renderer": renderer}
        made = type(self)(self._state, self._sampling, group_id, **parts)
        made.history, made._turn_began = self.history, self._turn_began
        return made

    # What the model reads and did not write.

    async def answer(self, messages: Given, *, is_ordered: bool = False) -> None:
        """Append what tools or a user answer to the model's turn; it counts as a turn of theirs.

        Args:
            messages: As for `observe`.
            is_ordered: Results of tools stand in the order of their calls, and none is refused.

        Raises:
            LimitExceeded: It would leave no room for one more token; nothing is appended.
            TemplateError: As `observe`.
        """
        self._check_idle("answer")
        await self._settle()
        await self._observe(messages if is_ordered else self._order(without_padding(messages)))
        self._user_turns += 1

    def observe(self, messages: Given) -> None:
        """Append messages that the model reads and did not write.

        Give all that come before the next turn at once: where nothing was generated since the last
        ones, a turn without words stands between. A text of more than 16,000 characters is encoded
        beside the event loop: `settle` and whatever else of the conversation is awaited append it.

        Results of tools that name their calls are put into the order of the calls. Null keys are
        dropped as from a prompt's messages.

        Raises:
            LimitExceeded: No room would be left for one more token; `settle` may find that out.
            TemplateError: They are malformed, or the template refuses them; or results name a call
                that the turn has not, one that has its result, or not all of the others. Nothing
                is appended.
        """
        self._check_idle("observe")
        self._observe_soon(self._order(without_padding(messages)))

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
        packed = self._renderer.pack_ids("observe_ids", ids)
        if packed:
            self._observe_soon(packed)

    async def settle(self) -> None:
        """Append what `observe` has left to be encoded.

        Raises:
            LimitExceeded: It would leave no room for one more token, and is dropped.
        """
        self._check_idle("settle", is_begun=False)
        await self._settle()

    async def compact(self, messages: Given) -> None:
        """Continue with these messages in place of all before: the next row begins with them.

        It is a segment of purpose "compaction", which departs from the last row where their tokens
        do. What was before stays in that row.

        Args:
            messages: At least one; as long as a prompt, or longer where the model has spoken in
                them. Null keys are dropped as from a prompt's.

        Raises:
            LimitExceeded: They are more than fits; nothing has changed.
            AgentError: They cannot be rendered, or it is generating or has not begun.
        """
        self._check_idle("compact")
        await self._settle()
        with self._noting_limits():
            rendered = await self._renderer.render_opening("compact", without_padding(messages))
        self._check_idle("compact")
        self._end_turn()
        self._history.compact(rendered, self._renderer.prompt_room)
        self._known_tokens = 0

    def keep_room(self, tokens: int) -> None:
        """Keep so many tokens free, from now on: turns and observations have that much less room.

        While any are reserved, a length that it runs into raises `LimitExceeded`, for its agent to
        judge.

        Args:
            tokens: 0 reserves none.

        Raises:
            AgentError: It is no such number; nothing has changed.
        """
        if type(tokens) is not int or tokens < 0:
            raise AgentError(f"keep_room: tokens = {tokens!r:.80}; expected an integer >= 0")
        self._reserved_tokens = tokens
        self._ends_at_lengths = self.is_main and not tokens

    def reward_turn(self, value: float) -> None:
        """Give the last turn a reward, at its last token; several add up.

        Raises:
            AgentError: It has no turn.
            BadRewardError: It, or the sum, is no finite number that float32 can hold.
        """
        number = finite_number(value, "reward_turn")
        if not self._history.reward_turn(number):
            raise AgentError(f"reward_turn: {self.session_id} has no turn in its last row")

    def _end_turn(self) -> None:
        """End a turn that a branch was to continue: it is what there is of it."""
        if self._history.turn_start is not None:
            self._history.end_turn(self._cut_by)

    def _order(self, messages: Given, *, is_checked: bool = True) -> Given:
        """The messages with results of tools in the order of the calls of the turn before them.

        Raises:
            TemplateError: As `result_order`.
        """
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
            return messages  # they are refused where they are converted
        listed = messages if isinstance(messages, Sequence) else list(messages)
        ids = [message_ids(message) for message in listed]
        if not any(each.answers for each in ids):
            return listed
        before = self._history.last_turn
        for waiting in self._unsettled:
            if not isinstance(waiting, array):
                before += map(message_ids, waiting)
        return [listed[at] for at in result_order(ids, before, is_checked=is_checked)]

    @contextmanager
    def _noting_limits(self) -> Iterator[None]:
        """A limit that fires in the block settles the outcome, even where an agent swallows it."""
        try:
            yield
        except (LimitExceeded, UnresponsiveError) as error:
            self._note_limit(error)
            raise

    def _note_limit(self, error: LimitExceeded | UnresponsiveError) -> None:
        if isinstance(error, UnresponsiveError):
            self._state.end(Outcome.FAILED, UNRESPONSIVE)
        elif self._ends_at_lengths or error.outcome is not Outcome.LENGTH:
            self._state.end(error.outcome, error.reason, limit_source=error.source)

    def _check_open(self, what: str) -> None:
        self._state.check_open(what)
        if self._is_closed:
            raise AgentError(f"{what}: {self.session_id} is closed: its block was left")

    def _check_idle(self, what: str, *, is_begun: bool = True) -> None:
        (self._check_open if is_begun else self._state.check_open)(what)
        if self._generation is not None:
            raise AgentError(f"{what}: {self.session_id} is generating; wait for its turn")
        if is_begun and not self.transcript:
            raise AgentError(f"{what}: {self.session_id} has not begun")

    def _find_room(self, transcript: Transcript | None = None) -> Room:
        """Tokens that may still be appended, and the path of the length that bounds them."""
        services, transcript = self._state.services, transcript or self._history.transcript
        length = transcript.prefix.length + self._reserved_tokens
        context = services.engines.info.context_length - length
        response = services.config.lengths.response - length + transcript.prompt_length
        if context <= response:
            return context, "engine.context_length"
        return response, "lengths.response"

    async def _settle(self) -> None:
        while self._unsettled:
            try:
                await self._observe(self._unsettled[0])
            except Exception:  # it is refused; what a cancellation interrupts is settled later
                self._unsettled = self._unsettled[1:]
                raise
            self._unsettled = self._unsettled[1:]

    def _observe_soon(self, observation: Observation) -> None:
        """Append an observation; one that is slow to render is left for `_settle`."""
        if self._unsettled or self._renderer.is_slow(observation):
            self._unsettled += (observation,)
            return
        with self._noting_limits():
            rendered = self._renderer.render_now(
                observation, self._history.unanswered_ids, self._find_room()
            )
        self._append(rendered)

    async def _observe(self, observation: Observation) -> None:
        after, room = self._history.unanswered_ids, self._find_room()
        with self._noting_limits():
            rendered = await self._renderer.render_observation(
                observation, after, room, self.transcript
            )
        self._append(rendered)

    def _append(self, rendered: Rendered) -> None:
        self._state.check_open("observe")
        self._end_turn()
        self._history.observe(rendered)

    # What the model generates.

    def check_turns(self) -> None:
        """Let another turn be prepared for, in this conversation or another of the trajectory.

        Raises:
            LimitExceeded: `agent.max_assistant_turns` is reached; let it pass.
        """
        with self._noting_limits():
            self._state.check_turns()

    def answering(self) -> Limit:
        """The block that it is entered for answers the last turn, within the turn's deadline.

        Raises:
            LimitExceeded: The deadline passed; leaving the block raises it.
        """
        turn_s = None if self._turn_began is None else self._state.services.config.limits.turn_s
        return self._state.limit.open(turn_s, "limits.turn_s", since=self._turn_began)
