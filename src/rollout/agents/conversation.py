"""One conversation of a trajectory: its tokens, its messages, its seeds and its engine session."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.agents.calling import answer_calls
from rollout.agents.generating import generate_turn
from rollout.agents.prompt_sampling import replace_sampling
from rollout.agents.rendering import make_room_error
from rollout.agents.segments import check_ids
from rollout.agents.turn import AssistantTurn, SampledTokens, answer, read_calls
from rollout.agents.turn_options import DEFAULT_OPTIONS, TurnOptions
from rollout.chat.reasoning import opens_reasoning
from rollout.chat.result_order import message_ids, result_order
from rollout.chat.reward_values import BadRewardError, finite_number
from rollout.chat.trajectory import MAIN
from rollout.chat.transcript import common_length
from rollout.containment import UnresponsiveError
from rollout.errors import AgentError, LimitExceeded
from rollout.types import without_padding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rollout.agents.history import History, Messages
    from rollout.agents.identity import Identity
    from rollout.agents.rendering import Given, Renderer, Room
    from rollout.agents.segments import Row
    from rollout.agents.trajectory_state import TrajectoryState
    from rollout.chat.transcript import Transcript
    from rollout.engine.core import SamplingParams
    from rollout.engine.pool.generation import Generation
    from rollout.limits import Limit
    from rollout.tools import ToolResult
    from rollout.types import InvalidToolCall, ToolCall

    Calls = Sequence[ToolCall | InvalidToolCall | Mapping[str, Any]]


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
        log: History,
        identity: Identity,
        renderer: Renderer,
        sampling: SamplingParams,
        *,
        group_id: str = "",
    ) -> None:
        self.history: str = state.config.history
        self.on_tokens: list[Callable[[Generation], object]] = []
        self._state, self._log, self._renderer = state, log, renderer
        self._identity, self._group_id, self._sampling = identity, group_id, sampling
        self._session_id = identity.session_id
        self._turn: Limit = state.limit
        self._generation: Generation | None = None  # under way
        self._unsettled: tuple[Given | array[int], ...] = ()  # observations still to be encoded
        self._is_closed = False
        self._ends_at_lengths = self.purpose == MAIN
        self._reserved_tokens = self._known_tokens = 0
        self._assistant_turns = self._user_turns = self._errors_in_a_row = 0
        self._cut_by: str | None = None
        self._trainable: bool | None = None
        self._reward: float | None = None

    # What there is of it.

    @property
    def transcript(self) -> Transcript:
        """The exact tokens so far; those of the last row, where the history is rendered again."""
        return self._log.transcript

    @property
    def rows(self) -> Sequence[Row]:
        """Its rows in order; one, unless its history was rendered again."""
        return self._log.rows

    @property
    def messages(self) -> Messages:
        """The conversation so far."""
        return self._log.messages

    @property
    def purpose(self) -> str:
        """Of its segment: "main", "branch", "subagent", or what its agent calls it."""
        return self._log.rows[0].purpose

    @property
    def session_id(self) -> str:
        """Names it to the router and the engines."""
        return self._session_id

    @property
    def renderer(self) -> Renderer:
        """Renders and parses what is said in it."""
        return self._renderer

    @property
    def in_reasoning(self) -> bool:
        """Whether its last turn began, or the next one begins, inside reasoning."""
        return self._log.in_reasoning

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
        return under_way + sum(row.transcript.generated_length for row in self.rows)

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
        """
        return self._sampling

    @sampling.setter
    def sampling(self, sampling: SamplingParams | Mapping[str, Any]) -> None:
        self._sampling = self._state.read_sampling("sampling", sampling)

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
        """Its segment's own; None: the trajectory's.

        Raises:
            AgentError: What is assigned is neither a finite number of float32 nor None.
        """
        return self._reward

    @reward.setter
    def reward(self, reward: Any) -> None:
        self._set_reward(reward)

    def _set_reward(self, reward: Any) -> None:
        try:
            self._reward = None if reward is None else finite_number(reward, "the agent")
        except BadRewardError:
            what = f"{self.session_id}: reward = {reward!r:.80}"
            raise AgentError(f"{what}: expected a finite number") from None

    def _refuse_more(self) -> None:
        """Take no more of it; what was said stays."""
        if self._generation is None:
            self._end_turn()
        self._is_closed = True

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
            LimitExceeded: They would leave no room for one more token; nothing is appended. Of a
                long text `settle` may find that out.
            TemplateError: They are malformed, or the template refuses them; or results name a call
                that the turn has not, one that has its result, or not all of the others. Nothing
                is appended.
        """
        self._check_idle("observe")
        messages = self._order(without_padding(messages))
        rendered = None
        if not self._unsettled:
            after, room = self._log.unanswered_ids, self._find_room()
            with self._noting_limits():
                rendered = self._renderer.render_observation_now(messages, after, room)
        if rendered is None:
            self._unsettled += (messages,)
        else:
            self._end_turn()
            self._log.observe(rendered)

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

    async def compact(self, messages: Given) -> None:
        """Continue with these messages in place of all that was said: the next row begins so.

        It is a segment of purpose "compaction", which departs from the last row where their tokens
        do. What was said before stays in that row.

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
        self._end_turn()
        self._log.compact(rendered, self._renderer.prompt_room)
        self._known_tokens = 0

    def keep_room(self, tokens: int) -> None:
        """Keep so many tokens free, from now on: turns and observations have that much less room.

        While any are kept, a length that the conversation runs into raises `LimitExceeded` and is
        its agent's to judge.

        Args:
            tokens: 0 keeps none.
        """
        self._reserved_tokens = tokens
        self._ends_at_lengths = self.purpose == MAIN and not tokens

    def reward_turn(self, value: float) -> None:
        """Give the last turn a reward, at its last token; several add up.

        Raises:
            AgentError: It has no turn.
            BadRewardError: It is no finite number.
        """
        number = finite_number(value, "reward_turn")
        if not self._log.reward_turn(number):
            raise AgentError(f"reward_turn: {self.session_id} has no turn in its last row")

    def _end_turn(self) -> None:
        """End a turn that a branch was to continue: it is what there is of it."""
        if self._log.turn_start is not None:
            self._read_turn()

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
        calls = self._log.calls
        for waiting in self._unsettled:
            if not isinstance(waiting, array):
                calls = calls.after(map(message_ids, waiting))
        order = result_order(ids, calls, is_checked=is_checked)
        return listed if order is None else [listed[at] for at in order]

    @contextmanager
    def _noting_limits(self) -> Iterator[None]:
        """A limit that fires in the block settles the outcome, even where an agent swallows it."""
        try:
            yield
        except (LimitExceeded, UnresponsiveError) as error:
            self._state.end_by(error, ends_at_lengths=self._ends_at_lengths)
            raise

    def _check_idle(self, what: str, *, is_begun: bool = True) -> None:
        if self._is_closed and is_begun:
            raise AgentError(f"{what}: {self.session_id} is closed: its block was left")
        if self._generation is not None:
            raise AgentError(f"{what}: {self.session_id} is generating; wait for its turn")
        if is_begun and not self.transcript:
            raise AgentError(f"{what}: {self.session_id} has not begun")

    def _find_room(self) -> Room:
        return self._renderer.find_room(self.transcript, self._reserved_tokens)

    async def _settle(self) -> None:
        while self._unsettled:
            first, *rest = self._unsettled
            self._unsettled = tuple(rest)
            if isinstance(first, array):
                self._observe_ids(first)
            else:
                await self._observe(first)

    async def _observe(self, messages: Given) -> None:
        self._end_turn()
        after, room = self._log.unanswered_ids, self._find_room()
        with self._noting_limits():
            rendered = await self._renderer.render_observation(
                messages, after, room, self.transcript
            )
        self._log.observe(rendered)

    def _observe_ids(self, ids: array[int]) -> None:
        room, source = self._find_room()
        with self._noting_limits():
            if len(ids) >= room:
                raise make_room_error(source, str(len(ids)))
        if ids:
            self._end_turn()
            text = self._state.services.template.decode(ids)
            self._log.observe_ids(ids, in_reasoning=opens_reasoning(text))

    # What the model generates.

    def check_turns(self) -> None:
        """Let another turn be prepared for, in this conversation or another of the trajectory.

        Raises:
            LimitExceeded: `agent.max_assistant_turns` is reached; let it pass.
        """
        with self._noting_limits():
            self._state.check_turns()

    async def generate(
        self, options: TurnOptions = DEFAULT_OPTIONS, **sampling: Any
    ) -> AssistantTurn:
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
            base = options.sampling or self._sampling
            drawn = replace_sampling(base, sampling, self._state.services)
            seed = options.seed if sampling.get("seed") is None else drawn.seed
            options = msgspec.structs.replace(options, sampling=drawn, seed=seed)
        self.check_turns()
        return await generate_turn(self, options)

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
            drawn = self._state.read_sampling("generate_ids", sampling)
        self.check_turns()
        await self._settle()
        vocab_size, known = self._state.services.engines.info.vocab_size, self.transcript.prefix
        ids, length = check_ids(prompt_ids, vocab_size, "generate_ids"), known.length
        if ids[:length].tobytes() != known.packed():
            raise AgentError(
                f"generate_ids: {len(ids)} ids that differ from the transcript's {length} at "
                f"{common_length(ids, known.ids)}; expected the transcript, and what follows it"
            )
        if len(ids) > length:
            is_answer = self._log.unanswered_ids is not None
            self._observe_ids(ids[length:])
            self._user_turns += is_answer
        await self.generate(TurnOptions(sampling=drawn))
        *_, span = self.transcript.generated_spans()
        return SampledTokens(
            ids=self.transcript.span_ids(span),
            log_probs=array("f", span.log_probs),
            versions=span.versions,
            finish_reason=str(span.finish_reason),
            cut_by=self.cut_by,
        )

    async def wait_written(self) -> None:
        """Wait until a journal, where there is one, has the last turn."""
        if self._state.log is not None:
            await self._state.log.kept()

    def _read_turn(self) -> AssistantTurn:
        return self._log.end_turn(self._renderer.reader, self._cut_by)

    async def _render_again(self) -> None:
        """Open another row where the template writes the history otherwise than the row has it.

        Raises:
            LimitExceeded: The new row would leave no room for a token; the old one stays.
        """
        if self._log.add_row(await self._renderer.render_again(self._log, self._reserved_tokens)):
            self._known_tokens = 0

    # What tools answer.

    async def call_tools(self, calls: Calls) -> list[ToolResult]:
        """Run the calls side by side and append what they answer; results in the order of calls.

        Args:
            calls: Of a turn; or dicts, ``{"name": …, "arguments": …}`` or as OpenAI writes them,
                with arguments that are a mapping or JSON of one.

        Raises:
            LimitExceeded: A deadline fired, or the answers leave no room for another token.
            SandboxError: The trajectory's sandbox could not be opened, or was lost.
            AgentError: A call is none; nothing has run.
        """
        calls = read_calls("call_tools", calls)
        results = await self.run_tools(calls)
        messages: Given = [answer(*each) for each in zip(calls, results, strict=True)]
        await self.answer(self._order(messages, is_checked=False), is_ordered=True)
        return results

    async def run_tools(self, calls: Calls) -> list[ToolResult]:
        """Run the calls as `call_tools` does; nothing is appended."""
        calls = read_calls("run_tools", calls)
        self._check_idle("run_tools")
        await self._settle()
        with self._noting_limits():
            return await answer_calls(self, calls)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """The block answers the last turn, within the turn's deadline.

        While the trajectory is carried to another call the block runs on, and its time does not
        count.

        Raises:
            LimitExceeded: The deadline passed.
        """
        with self._turn.open(None, ""):
            yield
