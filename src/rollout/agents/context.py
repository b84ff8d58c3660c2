"""What an agent loop may do: have the model generate, call tools, ask the user."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from rollout.agents.budget import generation_budget
from rollout.agents.identity import Ending, Identity, RejectedPrompt
from rollout.agents.message_log import MessageLog, said_again
from rollout.agents.turn import AssistantTurn, answer
from rollout.agents.turn_end import TurnEnd
from rollout.agents.wording import Wording
from rollout.chat.messages import template_messages, text_of_content
from rollout.chat.transcript import Transcript
from rollout.engine.core import WHOLE_ANSWERS
from rollout.engine.driver.generation import Generation
from rollout.errors import (
    AgentError,
    ConfigError,
    EngineError,
    LimitExceeded,
)
from rollout.interactions import Interaction, InteractionContext, InteractionTurn
from rollout.limits import Deadline, PausableDeadline, fail_at_deadline
from rollout.supervision import Duty, UnresponsiveError
from rollout.tools.attempt import CallError, attempt
from rollout.types import InvalidToolCall, Message, Outcome, Prompt, ToolCall
from rollout.utf8 import encodable

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Sequence

    from rollout.agents.services import Services
    from rollout.chat.drift import Drift
    from rollout.config import AgentConfig
    from rollout.engine.core import SamplingParams
    from rollout.tools import ToolResult, TrajectoryTools

logger = logging.getLogger("rollout.agents")

#: Reason of a failure by code that did not end when it was cancelled.
UNRESPONSIVE = "unresponsive"


class AgentContext:
    """One trajectory from the inside.

    Attributes:
        transcript: The exact tokens so far; with `agent.history` "inference_template" those of the
            row that is being written.
        earlier: The rows before it.
        messages: The conversation so far.
        sampling: How the next generation is sampled; assign to change it. Its `max_new_tokens`
            is lowered to what the lengths leave, its `seed` set for each turn.
        extra: Becomes the trajectory's `extra`; tools, users and rewards see it too.
        turn_scores: What the simulated user gave.
        tool_rewards: What the tools gave.
        assistant_turns, user_turns: Generations so far; answers of tools or users so far.
        ending: The outcome, where it is settled already.
        cut_by: As `AssistantTurn.cut_by`, of the last generation.
        generation_s: Seconds spent waiting for engines, queueing included.
        resumes: How often a generation resumed elsewhere because its replica was lost.
        restarts: Why generations restarted then, each time one did.
        discarded_tokens: Tokens that were dropped by that.
    """

    def __init__(
        self,
        services: Services,
        prompt: Prompt,
        identity: Identity,
        sampling: SamplingParams,
        tools: TrajectoryTools,
        deadline: Deadline,
        extra: dict[str, Any],
        outermost: Deadline,
    ) -> None:
        self._prompt = prompt
        self._identity = identity
        self.sampling = sampling
        self.transcript = Transcript()
        self.messages: list[Message] = []
        self.extra = extra
        self.turn_scores: list[float] = []
        self.tool_rewards: list[float] = []
        self.assistant_turns = 0
        self.user_turns = 0
        self.ending: Ending | None = None
        self.cut_by: str | None = None
        self.generation_s = 0.0
        self.cached_tokens = 0
        self._known_tokens = 0
        self.resumes = 0
        self.restarts: list[str] = []
        self.discarded_tokens = 0
        self._services = services
        self._tools = tools
        self._outermost = outermost
        self._deadline = PausableDeadline(deadline, outermost)
        self._turn_deadline = deadline
        self._interaction: Interaction | None = None
        self._calls_asked = 0
        self._errors_in_a_row = 0
        self._in_reasoning = False
        self._said: dict[int, str] = {}
        self._message_log = MessageLog()
        self._wording = Wording(services, tools)
        self._unsettled: list[Sequence[Message | Mapping[str, Any]]] = []
        self.earlier: list[Transcript] = []

    @property
    def config(self) -> AgentConfig:
        """The `agent` section of the configuration."""
        return self._services.config.agent

    @property
    def prompt(self) -> Prompt:
        """What it started from."""
        return self._prompt

    @property
    def identity(self) -> Identity:
        """Which trajectory it is."""
        return self._identity

    @property
    def deadline(self) -> PausableDeadline:
        """The trajectory's own."""
        return self._deadline

    @property
    def tools(self) -> TrajectoryTools:
        """The tools offered to the model; `schemas` lists them."""
        return self._tools

    @property
    def has_interaction(self) -> bool:
        """Whether a simulated user takes part."""
        return self._interaction_name is not None

    def end(self, outcome: Outcome, reason: str, *, limit_source: str | None = None) -> None:
        """Settle the outcome; return from `run` afterwards. The first call counts."""
        if self.ending is None:
            self.ending = Ending(outcome=outcome, reason=reason, limit_source=limit_source)

    async def begin(self, messages: Sequence[Message | Mapping[str, Any]] | None = None) -> None:
        """Render the prompt and start the simulated user; `generate` does so if need be.

        Args:
            messages: In place of the prompt's own.
        """
        if self.transcript.spans:
            raise AgentError("begin: the trajectory has begun already")
        given = self.prompt.messages if messages is None else messages
        ids, self.messages = await self._wording.prompt(given)
        if self._interaction_name is not None:
            self._interaction = self._new_interaction(self._interaction_name)
        self.transcript.append_prompt(ids)
        self._message_log.begin(given, ids)
        self._in_reasoning = self._services.template.opens_reasoning
        if self._interaction is not None:
            await self._interaction.start(self._interaction_context())

    async def generate(self) -> AssistantTurn:
        """Have the model generate; its tokens are in the transcript then, also when cut short.

        Raises:
            LimitExceeded: A length leaves no room for a token, or a deadline fired; let it pass.
            EngineError: The engine failed or was lost.
        """
        if not self.transcript.spans:
            await self.begin()
        await self.settle()
        limits = self._services.config.limits
        turn = Deadline.after(limits.turn_s, "limits.turn_s", self._deadline.now)
        turn_deadline = PausableDeadline(turn, self._outermost, self._deadline)
        deadline = PausableDeadline(
            Deadline.after(limits.generation_s, "limits.generation_s", turn),
            self._outermost,
            turn_deadline,
        )
        generation = Generation()
        started, bounded_by = anyio.current_time(), ""
        is_over = False
        try:
            with self._settling_limits(), deadline.failing():
                await self._render_anew()
                budget, bounded_by = self._budget()
                await self._services.engines.generate(
                    generation,
                    session_id=self.identity.session_id,
                    prompt_ids=self.transcript.prefix,
                    sampling=self._sampling_of_turn(budget),
                    priority=self.prompt.priority,
                    known_experts=self.transcript.routed_length,
                    group_id=f"{self.identity.step}/{self.identity.uid}",
                    deadline=deadline,
                )
                if generation.finish_reason == "abort":
                    raise self._abort(deadline.now)
            is_over = True
        finally:
            self._turn_deadline = turn_deadline.now
            self.generation_s += anyio.current_time() - started
            self._note_recovery(generation)
            if self._take(generation, bounded_by, deadline.now) and not is_over:
                with suppress(Exception):  # a parser must not hide what ended the wait
                    self._parse(generation)
        return self._parse(generation)

    async def call_tools(self, calls: Sequence[ToolCall | InvalidToolCall]) -> list[ToolResult]:
        """Run the calls side by side and append what they answer; results in the order of calls.

        Raises:
            LimitExceeded: A deadline fired, or the answers leave no room for another token.
        """
        await self.settle()
        with self._settling_limits():
            self._check_calls(len(calls))
            results = await self._tools.run(calls, turn_deadline=self._turn_deadline)
            self.tool_rewards += [r.reward for r in results if r.reward is not None]
            self._services.tally.tool_calls += len(calls)
            self._check_errors(results)
        self.user_turns += 1
        await self._observe([answer(call, r) for call, r in zip(calls, results, strict=True)])
        return results

    def _check_calls(self, count: int) -> None:
        most = self.config.max_tool_calls
        self._calls_asked += count
        if most is not None and self._calls_asked > most:
            raise LimitExceeded(
                f"agent.max_tool_calls = {most}: the model asked for {self._calls_asked}",
                source="agent.max_tool_calls",
                reason="tool_calls",
            )

    def _check_errors(self, results: Sequence[ToolResult]) -> None:
        most = self.config.max_consecutive_invalid_calls
        if most is not None and self._tools.invalid_in_a_row >= most:
            raise LimitExceeded(
                f"agent.max_consecutive_invalid_calls = {most} is reached",
                source="agent.max_consecutive_invalid_calls",
                reason="invalid_calls",
            )
        most = self.config.max_consecutive_errors
        for result in results:
            self._errors_in_a_row = self._errors_in_a_row + 1 if result.is_error else 0
        if most is not None and self._errors_in_a_row >= most:
            raise LimitExceeded(
                f"agent.max_consecutive_errors = {most} is reached",
                source="agent.max_consecutive_errors",
                reason="errors",
            )

    async def ask_user(self) -> InteractionTurn:
        """Let the simulated user answer; its words are appended unless it is done.

        Raises:
            LimitExceeded: A deadline fired, or its words leave no room for another token.
        """
        if self._interaction is None:
            raise AgentError("ask_user: no interaction takes part in this trajectory")
        await self.settle()
        deadline = self._turn_deadline
        with (
            self._settling_limits(),
            Duty("respond of the interaction", deadline.at),
            fail_at_deadline(deadline),
        ):
            turn = await self._interaction.respond(template_messages(self.messages))
        if turn.score is not None:
            self.turn_scores.append(turn.score)
        self.extra.update(turn.extra)
        if not turn.is_done:
            self.user_turns += 1
            text = text_of_content(f"interaction {self._interaction_name!r}", turn.text)
            await self._observe([Message(role="user", content=encodable(text))])
        return turn

    def observe(self, messages: Sequence[Message | Mapping[str, Any]]) -> None:
        """Append messages that the model reads and did not write.

        Give all that come before the next turn at once: where nothing was generated since the last
        ones, a turn without words stands between. A text of more than 16,000 characters is encoded
        beside the event loop: `settle` and whatever else of the context is awaited append it.

        Raises:
            LimitExceeded: They would leave no room for one more token; nothing is appended. Of a
                long text `settle` may find that out.
        """
        worded = None
        if not self._unsettled:
            with self._settling_limits():
                worded = self._wording.observation_now(
                    messages, self.transcript, self._last_generated()
                )
        if worded is None:
            self._unsettled.append(messages)
        else:
            self._append(messages, *worded)

    async def settle(self) -> None:
        """Append what `observe` has left to be encoded.

        Raises:
            LimitExceeded: It would leave no room for one more token, and is dropped.
        """
        while self._unsettled:
            await self._observe(self._unsettled.pop(0))

    async def _observe(self, messages: Sequence[Message | Mapping[str, Any]]) -> None:
        after = self._last_generated()
        with self._settling_limits():
            worded = await self._wording.observation(messages, self.transcript, after)
        self._append(messages, *worded)

    def _last_generated(self) -> array[int] | None:
        """The ids of the last turn; None where something was observed since."""
        last = self.transcript.spans[-1]
        return self.transcript.span_ids(last) if last.kind == "generated" else None

    def _append(
        self, given: Sequence[Message | Mapping[str, Any]], ids: array[int], plain: list[Message]
    ) -> None:
        """Append an observation that has room."""
        if self.transcript.spans[-1].kind != "generated":
            self._note_silence()
        self.transcript.append_observation(ids)
        self._in_reasoning = self._services.template.opens_reasoning_after(given)
        self.messages += plain
        self._message_log.add(given)

    def _note_silence(self) -> None:
        """The template's opening of a turn stands there and ends at once: a turn without words."""
        self._said[len(self.messages)] = ""
        self.messages.append(Message(role="assistant", content=""))
        self._message_log.say({"role": "assistant", "content": ""})

    async def check_tokens(self) -> Drift | None:
        """How the transcript differs from its conversation rendered again.

        None if nothing was said, and where the history is rendered again in any case.

        Raises:
            TemplateError: The template refuses the conversation.
        """
        if not self._said or self.config.history != "append_only":
            return None
        return await self._wording.drift(self.transcript, self.messages, self._said)

    async def score(self) -> None:
        """Ask the tools for their final rewards, once all is said.

        Raises:
            LimitExceeded: As `settle`.
        """
        await self.settle()
        self.tool_rewards += await self._tools.calc_rewards()

    async def close(self) -> None:
        """End the tools and the simulated user; shielded, bounded, never raises."""
        self._services.engines.forget(self.identity.session_id)
        await self._tools.close()
        interaction, self._interaction = self._interaction, None
        if interaction is None:
            return
        limit_s = self._services.config.limits.cleanup_s
        deadline = Deadline.after(limit_s, "limits.cleanup_s")
        try:
            await attempt(
                interaction.finish, deadline, what="finish of the interaction", shield=True
            )
        except (CallError, LimitExceeded) as error:
            session = self.identity.session_id
            logger.warning("%s: finish of the interaction failed: %s", session, error)

    @contextmanager
    def _settling_limits(self) -> Iterator[None]:
        """A limit that fires settles the outcome, even where an agent swallows the error."""
        try:
            yield
        except LimitExceeded as error:
            self.end(error.outcome, error.reason, limit_source=error.source)
            raise
        except UnresponsiveError:
            self.end(Outcome.FAILED, UNRESPONSIVE)
            raise

    def _new_interaction(self, name: str) -> Interaction:
        try:
            return self._services.interactions.create(name)
        except ConfigError as error:
            raise RejectedPrompt("unknown_interaction", str(error)) from None

    @property
    def _interaction_name(self) -> str | None:
        return self._interaction_kwargs.get("name") or self._services.config.agent.interaction

    @property
    def _interaction_kwargs(self) -> Mapping[str, Any]:
        kwargs = self.prompt.extra.get("interaction_kwargs")
        return kwargs if isinstance(kwargs, Mapping) else {}

    def _interaction_context(self) -> InteractionContext:
        return InteractionContext(
            uid=self.identity.uid,
            member=self.identity.member,
            kwargs=dict(self._interaction_kwargs),
            ground_truth=self.prompt.ground_truth,
            extra=self.extra,
            threads=self._services.threads,
        )

    def _budget(self) -> tuple[int, str]:
        return generation_budget(
            self.transcript,
            self._services.config.lengths,
            self._services.engines.info.context_length,
            self.sampling.max_new_tokens,
        )

    def _sampling_of_turn(self, budget: int) -> SamplingParams:
        stops = {*self.sampling.stop_token_ids, *self._services.stop_token_ids}
        return msgspec.structs.replace(
            self.sampling,
            max_new_tokens=budget,
            seed=self.identity.seed_of_turn(self.assistant_turns),
            stop_token_ids=tuple(sorted(stops)),
        )

    def _note_recovery(self, generation: Generation) -> None:
        self.resumes += generation.resumes
        self.restarts += generation.restarts
        self.discarded_tokens += generation.discarded_tokens

    async def _render_anew(self) -> None:
        """Open another row where the template writes the history otherwise than the row has it.

        Raises:
            LimitExceeded: The new row would leave no room for a token; the old one stays.
        """
        if self.config.history == "append_only" or not self.assistant_turns:
            return
        row = await self._wording.row(self._message_log)
        if row.ids_bytes() != self.transcript.ids_bytes():
            self.earlier.append(self.transcript)
            self.transcript, self._known_tokens = row, 0

    def _abort(self, deadline: Deadline) -> Exception:
        """Why a generation was aborted that we had not ended."""
        if anyio.current_time() >= deadline.at:
            return deadline.error()  # the engine kept the deadline before we could
        return EngineError(f"{self.identity.session_id}: the engine aborted the generation")

    def _take(self, generation: Generation, bounded_by: str, deadline: Deadline) -> bool:
        """Append what arrived, whatever became of the wait for it; False where nothing did."""
        if not self.transcript.spans or not (generation.ids or generation.finish_reason):
            return False
        end = TurnEnd.of(
            generation.finish_reason,
            bounded_by=bounded_by,
            deadline=deadline,
            now=anyio.current_time(),
        )
        self.transcript.append_generated(
            generation.ids,
            generation.log_probs,
            versions=[(version, count) for version, count in generation.versions],
            finish_reason=end.finish_reason,
            top=generation.top(),
        )
        experts = generation.experts()
        if experts is not None:
            self.transcript.append_routed_experts(experts)
        self.cached_tokens += generation.cached_tokens
        self._tally_reuse(generation)
        self._services.tally.generated_tokens += len(generation.ids)
        self.assistant_turns += 1
        self.cut_by = end.cut_by
        return True

    def _tally_reuse(self, generation: Generation) -> None:
        """How much of what engines had of this row before they still had."""
        tally = self._services.tally
        if generation.finish_reason in WHOLE_ANSWERS:  # others need not say what was cached
            tally.known_tokens += self._known_tokens
            tally.reused_tokens += min(generation.cached_tokens, self._known_tokens)
        self._known_tokens = len(self.transcript)

    def _parse(self, generation: Generation) -> AssistantTurn:
        """Record what was said; the calls of a turn that was cut are dropped."""
        text = self._services.template.decode(generation.ids)
        parsed = self._services.parser.parse(
            text, self._tools.schemas, in_reasoning=self._in_reasoning
        )
        calls = () if self.cut_by is not None else parsed.calls
        self._said[len(self.messages)] = text
        self.messages.append(
            Message(
                role="assistant",
                content=parsed.content,
                tool_calls=tuple(call for call in calls if isinstance(call, ToolCall)),
            )
        )
        self._message_log.say(said_again(parsed, calls))
        return AssistantTurn(
            content=parsed.content,
            reasoning=parsed.reasoning,
            calls=calls,
            text=text,
            cut_by=self.cut_by,
        )
