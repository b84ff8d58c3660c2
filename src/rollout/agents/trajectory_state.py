"""What all conversations of a trajectory share: its tools, its user, its limits, its figures."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.agents.ending import Ending
from rollout.agents.media_intake import get_content, replace_content
from rollout.agents.rendering import Renderer
from rollout.chat.messages import join_contents, text_of_content
from rollout.chat.reward_values import finite_number
from rollout.engine.core import WHOLE_ANSWERS
from rollout.errors import AgentError, LimitExceeded, ToolError
from rollout.interactions import InteractionContext, InteractionTurn
from rollout.limits import CARRY_S, NEVER, Clock, Deadline
from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
from rollout.tools.calls import attempt
from rollout.types import Message, Outcome, Prompt, name_prompt, without_null_keys
from rollout.utf8 import encodable, is_encodable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollout.agents.services import Services
    from rollout.agents.turn_log import TurnLog
    from rollout.engine.pool.generation import Generation
    from rollout.interactions import Interaction
    from rollout.seeds import Identity
    from rollout.tools import ToolResult, TrajectoryTools

logger = logging.getLogger("rollout.agents")

#: Reason of a failure by code that did not end when it was cancelled.
UNRESPONSIVE = "unresponsive"
#: What the code of a simulated user is called where it answers.
USER = "respond of the interaction"


class TrajectoryState:
    """The part of a trajectory that each of its conversations uses.

    Attributes:
        services: What all trajectories share.
        prompt: What it started from, with its uid.
        identity: Of the trajectory.
        limit: The trajectory's own, in which all others are opened.
        log: Remembers its answers; None where nothing does.
        renderer: Where the trajectory's own tools are offered.
        user_name: Of the simulated user that takes part; None where none does.
        user: That one, from the beginning of the trajectory to its close.
        idle_since: When its last generation, or its last user's answer, ended; 0 before.
        used_tools, used_sandbox: Those; None where nobody has asked for them yet.
        is_over: Whether its agent has ended, and its tools were closed.
        extra, reward, turn_scores, tool_rewards: As in `AgentContext`.
        ending: The outcome, where it is settled already.
        generations: Turns of the model, over all conversations, with those under way.
        generation_s: Seconds spent waiting for engines, queueing included.
        cached_tokens: Prompt tokens that engines had in their cache.
        resumes: How often a generation continued elsewhere because its replica was lost.
        restarts: Why generations began again then, each time one did.
        discarded_tokens: Tokens that were dropped by that.
        cut_prompt_tokens: Tokens that the prompt has lost, to fit; see `lengths.overlong_prompts`.
        sampled_placeholders: Turns that ended before a sampled placeholder of an image or a video.
        truncated_tokens: Sampled tokens of training rows that top_k, top_p or min_p were set for.
        pinned_calls: Calls of clients whose sampling `gateway.sampling` "pin" has overridden.
    """

    def __init__(
        self,
        services: Services,
        prompt: Prompt,
        identity: Identity,
        limit: Clock,
        log: TurnLog | None = None,
    ) -> None:
        self.services, self.identity, self.limit, self.log = services, identity, limit, log
        self.extra: dict[str, Any] = dict(prompt.extra)
        self.reward: Any = None
        self.turn_scores: list[float] = []
        self.tool_rewards: list[float] = []
        self.ending: Ending | None = None
        self.generations = self.cached_tokens = self.resumes = self.discarded_tokens = 0
        self.cut_prompt_tokens = self.sampled_placeholders = self.truncated_tokens = 0
        self.pinned_calls = 0
        self.restarts: tuple[str, ...] = ()
        self.generation_s = self.idle_since = 0.0
        self.prompt = name_prompt(prompt, identity.uid)
        kwargs = prompt.extra.get("interaction_kwargs")
        # As keys of `tools_kwargs`: those that hold None may be of other users, or Arrow's.
        self._user_kwargs = without_null_keys(kwargs) if isinstance(kwargs, Mapping) else None
        self.user_name = (self._user_kwargs or {}).get("name") or services.config.agent.interaction
        if self.user_name is not None:
            services.interactions.check(self.user_name)
        self.user: Interaction | None = None
        self._tool_calls, self.is_over = 0, False
        self.used_tools: TrajectoryTools | None = None
        self.used_sandbox: TrajectorySandbox | None = None
        names = services.tools.names
        if prompt.tools is not None or prompt.tools_kwargs or services.tools.opens_first:
            names = self.tools.names  # now, since what the prompt says of them may be wrong
        self.renderer: Renderer = services.renderers.get(names) or services.renderers.setdefault(
            names, Renderer(services, services.tools.schemas(names))
        )
        limit.owner = self

    async def open_first(self) -> None:
        """Open the tools that are open before the agent begins; the last message of the prompt goes
        on with what they observe.

        Raises:
            ToolError: One could not be opened.
        """
        observations = await self.tools.open_first()
        *before, last = self.prompt.messages
        if observations and isinstance(last, Mapping | Message):  # else rendering refuses it
            content = get_content(last)
            before_them = [] if isinstance(content, str | None) and not content else [content]
            last = replace_content(last, join_contents(*before_them, *observations))
            self.prompt = msgspec.structs.replace(self.prompt, messages=[*before, last])

    # Its tools and its sandbox: each is made when somebody first asks for it, as thousands of
    # trajectories wait without.

    @property
    def tools(self) -> TrajectoryTools:
        """Its tools.

        Raises:
            ToolError: The prompt names an unknown one; not where they have been made.
        """
        if self.used_tools is None:
            self.used_tools = self.services.tools.open_session(
                uid=self.identity.uid,
                member=self.identity.member,
                names=self.services.tools.names_for(self.prompt),
                tools_kwargs=self.prompt.tools_kwargs,
                extra=self.extra,
                prompt=self.prompt,
                sandbox=self.sandbox,
            )
            self.used_tools.is_closed = self.is_over
        return self.used_tools

    def find_idle_since(self) -> float:
        """When the last generation, call or answer of a user ended, on the loop's clock."""
        tools = self.used_tools
        return max(self.idle_since, 0.0 if tools is None else tools.idle_since)

    @property
    def sandbox(self) -> TrajectorySandbox:
        """Its sandbox, which is opened when it is first used."""
        if self.used_sandbox is None:
            services = self.services
            spec = services.sandboxes.spec_for(self.prompt.extra)
            cleanup_s = services.config.limits.cleanup_s
            self.used_sandbox = TrajectorySandbox(services.sandboxes, spec, cleanup_s=cleanup_s)
        return self.used_sandbox

    def limit_carry(self, since: float) -> Deadline:
        """By when it is to be continued, where it is carried since that time."""
        sandbox, tools = self.used_sandbox, self.used_tools
        has_sandbox = sandbox is not None and sandbox.is_open
        if not has_sandbox and (tools is None or not tools.has_open_sessions()):
            return NEVER
        carry_s = self.services.config.limits.carry_s
        return Deadline.after(carry_s, CARRY_S).later(since - self.limit.now())

    # Its simulated user.

    async def start_user(self) -> None:
        """Make and start the user who takes part, if one does."""
        if self.user_name is None:
            return
        self.user = self.services.interactions.create(self.user_name)
        await self.user.start(
            InteractionContext(
                uid=self.identity.uid,
                member=self.identity.member,
                kwargs=dict(self._user_kwargs or {}),
                ground_truth=self.prompt.ground_truth,
                extra=self.extra,
                threads=self.services.threads,
            )
        )

    def read_user_turn(self, turn: InteractionTurn) -> list[Message]:
        """Add what the user's turn brings to the trajectory; return the messages with its words."""
        if not isinstance(turn, InteractionTurn):
            what = f"respond of the interaction {self.user_name!r} returned {turn!r:.80}"
            raise AgentError(f"{what}; expected an InteractionTurn")
        if turn.score is not None:
            self.turn_scores.append(finite_number(turn.score, USER, field="score"))
        self.extra.update(turn.extra)
        if turn.is_done:
            return []
        text = text_of_content(f"interaction {self.user_name!r}", turn.text)
        return [Message(role="user", content=encodable(text), extra=turn.extra)]

    # How it ends.

    def check_open(self, what: str) -> None:
        """Raise an `AgentError` where its agent has ended: what is judged stays as it is."""
        if self.is_over:
            raise AgentError(f"{what}: the trajectory has ended")

    def end(self, outcome: Outcome | str, reason: str, *, limit_source: str | None = None) -> None:
        """Settle the outcome; see `AgentContext.end`."""
        if outcome not in tuple(Outcome):  # the text of a member is equal to it
            raise AgentError(f"end: outcome = {outcome!r:.80}; expected a member of Outcome")
        for name, text in (("reason", reason), ("limit_source", limit_source or "")):
            if not isinstance(text, str) or not is_encodable(text):
                raise AgentError(f"end: {name} = {text!r:.80}; expected a string in UTF-8")
        if self.ending is None:
            self.ending = Ending(outcome=Outcome(outcome), reason=reason, limit_source=limit_source)

    async def clean_up(self, what: str, function: Callable[[], Awaitable[Any]]) -> None:
        """Let foreign code clean up; shielded, bounded, never raises."""
        try:
            with anyio.CancelScope(shield=True):
                cleanup_s = self.services.config.limits.cleanup_s
                limit = Clock(Deadline.after(cleanup_s, "limits.cleanup_s"))
                await attempt(function, limit=limit, what=what)
        except ToolError as error:
            logger.warning("%s: %s failed: %s", self.identity.session_id, what, error)

    # Limits of counts. Each raises `LimitExceeded`.

    def check_turns(self) -> None:
        """Let another generation begin, within `agent.max_assistant_turns`."""
        most = self.services.config.agent.max_assistant_turns
        if most is not None and self.generations >= most:
            raise _exceed("max_assistant_turns", f"{most} is reached", "turns")

    def count_calls(self, count: int) -> None:
        """The model asks for so many calls more, within `agent.max_tool_calls`."""
        most = self.services.config.agent.max_tool_calls
        self._tool_calls += count
        if most is not None and self._tool_calls > most:
            fact = f"{most}: the model asked for {self._tool_calls}"
            raise _exceed("max_tool_calls", fact, "tool_calls")

    def count_errors(self, results: list[ToolResult], errors_in_a_row: int) -> int:
        """Return how many errors in a row there are after `results`.

        Within `agent.max_consecutive_errors`, and within `agent.max_consecutive_invalid_calls`
        those that could not be run.
        """
        most = self.services.config.agent.max_consecutive_invalid_calls
        if most is not None and self.tools.invalid_in_a_row >= most:
            raise _exceed("max_consecutive_invalid_calls", f"{most} is reached", "invalid_calls")
        for result in results:
            errors_in_a_row = errors_in_a_row + 1 if result.is_error else 0
        most = self.services.config.agent.max_consecutive_errors
        if most is not None and errors_in_a_row >= most:
            raise _exceed("max_consecutive_errors", f"{most} is reached", "errors")
        return errors_in_a_row

    # Figures.

    def count_generation(self, generation: Generation, seconds: float, known_tokens: int) -> None:
        """Count what a generation took and brought, and what the loss of replicas did to it.

        Args:
            generation: One that has ended, however.
            seconds: How long its caller waited for it.
            known_tokens: Of its prompt, those that an engine may still have.
        """
        self.generation_s += seconds
        self.resumes += generation.resumes
        self.restarts += generation.restarts
        self.discarded_tokens += generation.discarded_tokens
        self.cached_tokens += generation.cached_tokens
        if generation.is_truncated:
            kept = generation.kept
            self.truncated_tokens += generation.count if kept is None else kept
        if generation.last_part is None:
            return  # no engine was asked
        tally = self.services.tally
        tally.generated_tokens += generation.count
        if generation.finish_reason in WHOLE_ANSWERS:  # others need not say what was cached
            tally.known_tokens += known_tokens
            tally.reused_tokens += min(generation.cached_tokens, known_tokens)

    def count_cut(self, tokens: int) -> None:
        """The prompt has lost so many tokens, to fit: warn once, then count."""
        self.cut_prompt_tokens = tokens
        tally = self.services.tally
        if not tally.cut_prompts:
            logger.warning(
                "%s: the prompt has %d tokens too many, which it loses at its beginning "
                "(lengths.overlong_prompts = 'cut'); further ones are counted only",
                self.identity.session_id,
                tokens,
            )
        tally.cut_prompts += 1


def _exceed(name: str, fact: str, reason: str) -> LimitExceeded:
    source = f"agent.{name}"
    return LimitExceeded(f"{source} = {fact}", source=source, reason=reason)
