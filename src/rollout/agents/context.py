"""What an agent loop may do: have the model generate, call tools, ask the user."""

from __future__ import annotations

from array import array
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any

from rollout.agents.conversation import Conversation
from rollout.agents.generating import answer_calls, generate_turn
from rollout.agents.prompt_sampling import read_sampling
from rollout.agents.trajectory_state import USER
from rollout.agents.turn import SampledTokens, answer, read_calls
from rollout.chat.drift import worst
from rollout.chat.messages import template_messages
from rollout.chat.trajectory import SUBAGENT, Parent, Segment
from rollout.chat.transcript import common_length
from rollout.containment import contain
from rollout.errors import AgentError
from rollout.observe.events import UserEnded
from rollout.tools.schemas import as_openai_schema, quote_all

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable
    from typing import Self

    from rollout.agents.rendering import Given
    from rollout.agents.services import Services, TrajectoryGateway
    from rollout.agents.turn import AssistantTurn, StopStrings
    from rollout.chat.drift import Drift
    from rollout.config import AgentConfig
    from rollout.engine.core import SamplingParams
    from rollout.interactions import InteractionTurn
    from rollout.limits import Deadline
    from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
    from rollout.seeds import Identity
    from rollout.tools import ToolResult, TrajectoryTools
    from rollout.types import InvalidToolCall, Message, Outcome, Prompt, ToolCall

    Calls = Sequence[ToolCall | InvalidToolCall | Mapping[str, Any]]


class AgentContext(Conversation):
    """One trajectory from the inside: its main conversation, or one opened from that.

    The main conversation begins with the prompt. `open_segment`, `branch` and `subagent` open
    others, each a context of the same trajectory. What an agent keeps on a context is its own.

    Attributes:
        on_tokens: Called with the `Generation` under way at each of its chunks.
    """

    # The trajectory.

    @property
    def services(self) -> Services:
        """What all trajectories of the runtime share."""
        return self._state.services

    @property
    def config(self) -> AgentConfig:
        """The `agent` section of the configuration."""
        return self._state.services.config.agent

    @property
    def prompt(self) -> Prompt:
        """What it started from."""
        return self._state.prompt

    @property
    def identity(self) -> Identity:
        """Which trajectory it is."""
        return self._state.identity

    @property
    def deadline(self) -> Deadline:
        """When the trajectory's time is over, as things stand, and which limit ends it then."""
        return self._state.limit.deadline

    @property
    def tools(self) -> TrajectoryTools:
        """The trajectory's tools; of a segment's own schemas it says nothing."""
        return self._state.tools

    @property
    def sandbox(self) -> TrajectorySandbox:
        """The trajectory's sandbox, which its tools and its reward see too.

        It is opened when it is first used, and closed after the reward. That it is lost, or cannot
        be opened, ends the trajectory as failed.
        """
        return self._state.sandbox

    @property
    def gateway(self) -> TrajectoryGateway:
        """The gateway, for agents that speak HTTP.

        Raises:
            AgentError: There is none.
        """
        if self.services.gateway is None:
            raise AgentError(
                "no gateway serves this runtime: open one with `async with "
                "rollout.open_gateway(runtime)`, or open the runtime with `open_rollout`"
            )
        return self.services.gateway

    @property
    def has_interaction(self) -> bool:
        """Whether a simulated user takes part."""
        return self.is_main and self._state.user_name is not None

    @property
    def extra(self) -> dict[str, Any]:
        """Becomes the trajectory's `extra`; tools, users and rewards see it too."""
        return self._state.extra

    @property
    def turn_scores(self) -> list[float]:
        """What the simulated user gave."""
        return self._state.turn_scores

    @property
    def tool_rewards(self) -> list[float]:
        """What the tools gave."""
        return self._state.tool_rewards

    def end(
        self, outcome: Outcome | str, reason: str = "", *, limit_source: str | None = None
    ) -> None:
        """Settle the outcome; return from `run` afterwards. The first call counts.

        Raises:
            AgentError: An argument is of another kind; nothing is settled.
        """
        self._state.end(outcome, reason, limit_source=limit_source)

    # What the model and its tools do.

    def generate(
        self, *, stop_strings: StopStrings | None = None, **sampling: Any
    ) -> Coroutine[Any, Any, AssistantTurn]:
        """Have the model generate; its tokens are in the transcript then, also when cut short.

        It begins the trajectory where nobody has.

        Args:
            stop_strings: End the turn before the model does; what is returned ends before them.
            sampling: Fields of `sampling` that differ in this turn, such as ``temperature=0.2``;
                None says nothing. A `seed` takes the place of the turn's own.

        Raises:
            LimitExceeded: A length leaves no room for a token, `agent.max_assistant_turns` is
                reached, or a deadline fired; let it pass.
            EngineError: The engine failed or was lost, or a field has a value that cannot be.
            AgentError: It is generating already, has not begun, or the trajectory has ended; a
                field is unknown.
        """
        return generate_turn(self, sampling or None, stop_strings)

    async def generate_ids(
        self,
        prompt_ids: Sequence[int],
        sampling: Mapping[str, Any] | SamplingParams | None = None,
    ) -> SampledTokens:
        """Have the model continue these tokens, for code that keeps ids rather than messages.

        What they have beyond the transcript is appended as an observation, as by `observe_ids`, and
        counts as an answer where it follows a turn of the model's.

        Args:
            prompt_ids: The transcript so far, and what the model reads next.
            sampling: Fields of `sampling` that differ in this generation, or all of it.

        Raises:
            LimitExceeded: As `generate`.
            EngineError: The engine failed or was lost.
            AgentError: The ids do not begin with the transcript, or are none; an argument is wrong;
                it is generating already, or has not begun. Nothing has been appended.
        """
        if not self.transcript:
            await self.begin(ids=prompt_ids)
        self._check_idle("generate_ids")
        drawn = self._sampling
        if sampling is not None:
            drawn = read_sampling("generate_ids", sampling, self._state)
        self.check_turns()
        await self._settle()
        known = self.transcript.prefix
        ids, length = self._renderer.pack_ids("generate_ids", prompt_ids), known.length
        if ids[:length].tobytes() != known.packed():
            raise AgentError(
                f"generate_ids: {len(ids)} ids that differ from the transcript's {length} at "
                f"{common_length(ids, known.ids)}; expected the transcript, and what follows it"
            )
        if len(ids) > length:
            is_answer = self._history.unanswered_ids is not None
            self._observe_soon(ids[length:])
            self._user_turns += is_answer
        await generate_turn(self, drawn)
        *_, span = self.transcript.generated_spans()
        return SampledTokens(
            ids=self.transcript.span_ids(span),
            log_probs=array("f", span.log_probs),
            versions=span.versions,
            finish_reason=str(span.finish_reason),
            cut_by=self.cut_by,
        )

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
        if not (results := await self.run_tools(calls)):
            return []
        messages: Given = [answer(*each) for each in zip(calls, results, strict=True)]
        if self._unsettled or calls != self._history.last_calls:
            messages = self._order(messages, is_checked=False)
        await self.answer(messages, is_ordered=True)
        return results

    async def run_tools(self, calls: Calls) -> list[ToolResult]:
        """Run the calls as `call_tools` does; nothing is appended."""
        calls = read_calls("run_tools", calls)
        self._check_idle("run_tools")
        await self._settle()
        with self._noting_limits():
            return await answer_calls(self, calls)

    # Conversations that are opened from it.

    @asynccontextmanager
    async def open_segment(
        self,
        messages: Given,
        purpose: str = SUBAGENT,
        tools: Sequence[str | Mapping[str, Any]] | None = None,
        sampling: Mapping[str, Any] | SamplingParams | None = None,
    ) -> AsyncIterator[Self]:
        """A conversation of its own for the block, as a context that an agent loop could run on.

        Several may be open at once, each used by one task; the trajectory's limits hold for all.
        Leaving the block closes it; it stays, as a segment.

        Args:
            messages: With which it begins; null keys are dropped as from a prompt's.
            purpose: Of its segment.
            tools: Names of its tools, or schemas of some that the agent answers; None: as this one.
            sampling: Fields of `sampling` that differ there, or all of it; None: as this one.

        Raises:
            LimitExceeded: The messages are more than fits.
            AgentError: They cannot be rendered, or an argument is wrong.
            ToolError: A schema is none.
        """
        offered = None if tools is None else _list_schemas(self.tools, tools)
        drawn = self.sampling
        if sampling is not None:
            drawn = read_sampling("open_segment", sampling, self._state)
        opened = await self.subagent(messages, purpose=purpose, tools=offered)
        opened.sampling = drawn
        try:
            yield opened
        finally:
            for each in opened.all():
                if each._generation is None:
                    each._end_turn()
                each._is_closed = True
                self.services.engines.forget(each.session_id)

    # The simulated user.

    async def ask_user(self) -> InteractionTurn:
        """Let the simulated user answer; its words are appended unless it is done.

        Raises:
            LimitExceeded: A deadline fired, or its words leave no room for another token.
        """
        turn, words = await self.hear_user()
        if words:
            await self.answer(words)
        return turn

    async def hear_user(self) -> tuple[InteractionTurn, list[Message]]:
        """The simulated user's turn, and the messages that say it; nothing is appended.

        Raises:
            LimitExceeded: A deadline fired.
        """
        state = self._state
        if state.user is None or not self.is_main:
            raise AgentError("ask_user: no interaction takes part in this trajectory")
        await self.settle()
        began = state.limit.now()
        with self._noting_limits(), self.answering():
            messages = list(template_messages(self.messages))
            turn = await contain(USER, partial(state.user.respond, messages))
        state.idle_since = now = state.limit.now()
        events, number = self.services.events, self.identity.number
        if events.is_on:
            at, since = events.since_start(now), events.since_start(began)
            events.tell_event(number, UserEnded(at=at, trajectory=number, began=since))
        return turn, state.read_user_turn(turn)

    # How it ends.

    async def check_tokens(self) -> Drift | None:
        """How the transcripts differ from their conversations rendered again: the worst difference.

        None where nothing was compared: where nothing was said, the history is rendered again in
        any case, or ids were observed.

        Raises:
            TemplateError: The template refuses a conversation.
        """
        return worst(
            [
                await each._renderer.find_drift(each._history)
                for each in self.all()
                if each._history.turns
                and each.history == "append_only"
                and not each._history.has_raw_ids
            ]
        )

    async def score(self) -> None:
        """Ask the tools for their final rewards, at the end; not where nothing was generated.

        Raises:
            LimitExceeded: As `settle`.
        """
        for each in (conversations := list(self.all())):
            await each.settle()
        tools = self._state.used_tools
        if tools is not None and any(each.sampled_tokens for each in conversations):
            self.tool_rewards.extend(await tools.calc_rewards())
            if self.reward is None:
                self.reward = tools.reward

    async def close(self) -> None:
        """End the tools and the simulated user; shielded, bounded, never raises."""
        state = self._state
        for each in self.all():
            self.services.engines.forget(each.session_id)
        state.is_over = True
        if state.used_tools is not None:
            await state.used_tools.close()
        user, state.user = state.user, None
        if user is not None:  # which may have no `finish`: that is found out within `clean_up`
            await state.clean_up("finish of the interaction", partial(methodcaller("finish"), user))


def _list_schemas(
    own: TrajectoryTools, tools: Sequence[str | Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """The schemas of tools that are named, or given as schemas."""
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise AgentError(f"open_segment: tools = {tools!r:.80}; expected a list")
    known = dict(zip(own.names, own.schemas, strict=True))
    for tool in tools:
        if isinstance(tool, str) and tool not in known:
            names = f"the trajectory's ({quote_all(known)})"
            raise AgentError(f"open_segment: the tool {tool!r:.80} is none of {names}")
    what = "open_segment: a tool"
    return [known[t] if isinstance(t, str) else as_openai_schema(t, what) for t in tools]


def list_segments(conversations: Iterable[AgentContext]) -> list[Segment]:
    """The tree of their rows; each conversation comes after the one that it departs from."""
    rows = [(each, row) for each in conversations for row in each._history.rows]
    positions = {id(row): at for at, (_, row) in enumerate(rows)}
    return [
        Segment(
            transcript=row.transcript,
            parent=None if row.parent is None else Parent(positions[id(row.parent)], row.position),
            purpose=row.purpose,
            trainable=each.trainable,
            reward=each._reward,
            session_id=each.session_id,
            seeds=list(row.seeds),
            messages=each.messages if row.messages is None else row.messages,
            token_rewards=row.spread_rewards(),
        )
        for each, row in rows
    ]
