"""A trajectory as a tree of spans, made of its events once it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from rollout.observe import events as told
from rollout.observe.written_values import beginning
from rollout.seeds import session_name
from rollout.types import ToolCall
from rollout.utf8 import encodable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.chat.trajectory import Trajectory
    from rollout.types import InvalidToolCall

Decode = Callable[[Sequence[int]], str]

AGENT, CHAT, TOOL, FUNCTION, USER, REWARD = "agent", "chat", "tool", "function", "user", "reward"


class Span(msgspec.Struct, kw_only=True):
    """A piece of a trajectory's time.

    Its name, its attributes and its error hold no half of a character, such as a lone surrogate of
    a model's: in what backends take as it is, one would fail whatever is sent together with it.

    Attributes:
        name: For people.
        kind: "agent" (the whole trajectory), "chat" (a turn of the model), "tool", "function" (of
            the user's, with `rollout.trace`), "user" (a simulated one) or "reward".
        began, ended: Seconds since 1970.
        attributes: By the names of the GenAI semantic conventions of OpenTelemetry where they have
            one, else ``rollout.…``.
        inputs, outputs: What went in and came out, where that is known: whatever it is; `plain` and
            `text_of` make of it what can be written.
        error: What went wrong; empty where nothing did.
        children: What happened within.
    """

    name: str
    kind: str
    began: float
    ended: float
    attributes: dict[str, Any] = {}
    inputs: Any = None
    outputs: Any = None
    error: str = ""
    children: list[Span] = []


@attrs.frozen(kw_only=True, slots=False)
class RunFacts:
    """What all traces of a run share.

    Attributes:
        wall_s: Seconds since 1970 when it began.
        model, provider, agent: Names.
        decode: Ids to text, where texts are wanted and the tokenizer is there.
    """

    wall_s: float
    model: str = ""
    provider: str = ""
    agent: str = ""
    decode: Decode | None = None

    @cached_property
    def of_chats(self) -> dict[str, Any]:
        """The attributes that all turns share."""
        return _known(
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": self.provider,
                "gen_ai.request.model": self.model,
            }
        )

    @cached_property
    def chat(self) -> str:
        """The name of the span of a turn."""
        return encodable(f"chat {self.model}".strip())

    @classmethod
    def of(cls, run: told.RunStarted) -> RunFacts:
        """Those that its first event tells."""
        config = run.config
        return cls(
            wall_s=run.wall_s,
            model=str(config.get("model", {}).get("path", "")),
            provider=str(config.get("engine", {}).get("kind", "")),
            agent=str(config.get("agent", {}).get("name", "")),
        )


def trace_of(
    ended: told.TrajectoryEnded,
    happened: Iterable[Any],
    trajectory: Trajectory | None,
    run: RunFacts,
) -> Span:
    """The tree of one trajectory.

    Args:
        happened: Its events from its start on, in their order, each followed by what it happened
            to.
        trajectory: Where there is one that somebody got.
    """
    root = _root(ended, trajectory, run)
    texts = _Texts(ended, trajectory, run.decode)
    functions: dict[int, Span] = {}
    parents: list[tuple[Span, int]] = []
    each = iter(happened)
    for event, subject in zip(each, each, strict=True):
        match event:
            case told.RequestEnded():  # before its turn's end
                texts.requests[event.request] = event
            case told.TurnEnded():
                root.children.append(_turn(event, run, texts))
            case told.ToolEnded():
                root.children.append(_tool(event, subject, run))
            case told.SpanEnded():
                functions[event.span] = span = _function(event, subject, run)
                parents.append((span, event.parent))
            case told.UserEnded():
                root.children.append(_timed(USER, "ask_user", event.began, event.at, run))
            case told.RewardEnded():
                root.children.append(_reward(event, run))
    if parents:
        _place(parents, functions, root)
    root.children.sort(key=lambda each: each.began)
    return root


def _place(parents: list[tuple[Span, int]], functions: dict[int, Span], root: Span) -> None:
    """Put the user's functions into what called them."""
    calls = [each for each in root.children if each.kind in (TOOL, REWARD)]
    for span, parent in parents:
        around = [c for c in calls if c.began <= span.began and span.ended <= c.ended]
        # Called by a tool, unless several were called at that time.
        home = functions.get(parent) or (around[0] if len(around) == 1 else root)
        home.children.append(span)


def _root(ended: told.TrajectoryEnded, trajectory: Trajectory | None, run: RunFacts) -> Span:
    prompt = None if trajectory is None else trajectory.prompt
    agent = (prompt.agent_name if prompt is not None else None) or run.agent
    attributes = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": run.provider,
        "gen_ai.agent.name": agent,
        "gen_ai.request.model": run.model,
        "gen_ai.conversation.id": session_name(ended.step, ended.uid, ended.member),
        "gen_ai.usage.input_tokens": ended.prompt_tokens + ended.observation_tokens,
        "gen_ai.usage.output_tokens": ended.generated_tokens,
        "rollout.step": ended.step,
        "rollout.sample_index": ended.group,
        "rollout.rollout_n": ended.member,
        "rollout.validate": ended.validate,
        "rollout.uid": ended.uid,
        "rollout.batch": ended.batch,
        "rollout.outcome": ended.outcome,
        "rollout.reason": ended.reason,
        "rollout.limit_source": ended.limit_source,
        "rollout.trainable": ended.trainable,
        "rollout.reward": ended.reward,
        "rollout.turns": ended.turns,
        "rollout.generation_s": ended.generation_s,
        "rollout.tool_s": ended.tool_s,
    }
    return Span(
        name=encodable(f"invoke_agent {agent}".strip()),
        kind=AGENT,
        began=run.wall_s + ended.began,
        ended=run.wall_s + ended.at,
        attributes=_known(attributes),
        error=beginning(ended.cause or ended.reason or ended.outcome)
        if ended.outcome == "failed"
        else "",
        inputs=_text_of_prompt(trajectory, run.decode),
        outputs=trajectory.answer if run.decode is not None and trajectory is not None else None,
    )


def _reward(event: told.RewardEnded, run: RunFacts) -> Span:
    span = _timed(REWARD, "reward", event.began, event.at, run)
    span.attributes = _known({"rollout.reward": event.reward})
    span.error = beginning(event.error)
    return span


def _timed(kind: str, name: str, began: float, ended: float, run: RunFacts) -> Span:
    return Span(name=name, kind=kind, began=run.wall_s + began, ended=run.wall_s + ended)


def _turn(event: told.TurnEnded, run: RunFacts, texts: _Texts) -> Span:
    attributes = {
        **run.of_chats,
        "gen_ai.usage.input_tokens": event.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": event.cached_tokens,
        "gen_ai.usage.output_tokens": event.generated_tokens,
        "rollout.turn": event.turn,
    }
    if event.requests:
        attributes["gen_ai.response.id"] = event.requests[-1]
        texts.add_phases(attributes, event.requests)
    if event.finish_reason:
        attributes["gen_ai.response.finish_reasons"] = (event.finish_reason,)
    if event.path:
        attributes["rollout.conversation"] = event.path
    if event.cut_by:
        attributes["rollout.cut_by"] = event.cut_by
    if event.held_s:
        attributes["rollout.carried_s"] = event.held_s
    return Span(
        name=run.chat,
        kind=CHAT,
        began=run.wall_s + event.began,
        ended=run.wall_s + event.at,
        attributes=attributes,
        outputs=texts.next_turn(event.path) if event.finish_reason else None,
        error="" if event.finish_reason else "no answer",
    )


def _tool(event: told.ToolEnded, subject: Any, run: RunFacts) -> Span:
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.type": "function",
        "rollout.turn": event.turn,
    }
    if event.tool:
        attributes["gen_ai.tool.name"] = tool = encodable(event.tool)
    if event.call_id:
        attributes["gen_ai.tool.call.id"] = encodable(event.call_id)
    if event.path:
        attributes["rollout.conversation"] = event.path
    call, text = subject or (None, None)
    return Span(
        name=f"execute_tool {tool}" if event.tool else "execute_tool",
        kind=TOOL,
        began=run.wall_s + event.began,
        ended=run.wall_s + event.at,
        attributes=attributes,
        inputs=_asked(call),
        outputs=text,
        error=beginning(event.error or "error") if event.is_error else "",
    )


def _asked(call: ToolCall | InvalidToolCall | None) -> Any:
    """What a tool was called with."""
    if call is None:
        return None
    return call.arguments if isinstance(call, ToolCall) else {"raw": call.raw}


def _function(event: told.SpanEnded, subject: Any, run: RunFacts) -> Span:
    span = _timed(FUNCTION, encodable(event.name), event.began, event.at, run)
    span.error = beginning(event.error)
    span.inputs, span.outputs = subject or (None, None)
    return span


class _Texts:
    """What a trajectory's turns were sampled as, and how long each phase of their requests took."""

    def __init__(
        self, ended: told.TrajectoryEnded, trajectory: Trajectory | None, decode: Decode | None
    ) -> None:
        self._session = session_name(ended.step, ended.uid, ended.member)
        self._trajectory, self._decode = trajectory, decode
        self._turns: dict[str, Iterator[str]] = {}
        self.requests: dict[str, told.RequestEnded] = {}

    def add_phases(self, attributes: dict[str, Any], requests: Iterable[str]) -> None:
        """Add the seconds of a turn's requests in each phase."""
        queue_s = prefill_s = decode_s = 0.0
        last = None
        for each in requests:
            if (known := self.requests.get(each)) is not None:
                queue_s += known.queue_s
                prefill_s += known.prefill_s
                decode_s += known.decode_s
                last = known
        if last is not None:
            attributes["rollout.queue_s"] = queue_s
            attributes["rollout.prefill_s"] = prefill_s
            attributes["rollout.decode_s"] = decode_s
            attributes["rollout.replica"] = last.replica

    def next_turn(self, path: str) -> str | None:
        """The text of a conversation's next turn."""
        if self._decode is None or self._trajectory is None:
            return None
        if path not in self._turns:
            self._turns[path] = self._texts(f"{self._session}#{path}" if path else self._session)
        return next(self._turns[path], None)

    def _texts(self, session: str) -> Iterator[str]:
        assert self._trajectory is not None
        assert self._decode is not None
        for segment in self._trajectory.segments:
            if segment.session_id == session:
                for span in segment.transcript.generated_spans():
                    yield self._decode(segment.transcript.span_ids(span))


def _text_of_prompt(trajectory: Trajectory | None, decode: Decode | None) -> str | None:
    """What the model read first, as its template wrote it."""
    if trajectory is None or decode is None or not trajectory.segments:
        return None
    transcript = trajectory.segments[0].transcript
    return next(
        (decode(transcript.span_ids(each)) for each in transcript.spans if each.kind == "prompt"),
        None,
    )


def _known(attributes: dict[str, Any]) -> dict[str, Any]:
    """Those that say something, texts without halves of characters."""
    return {
        name: encodable(value) if isinstance(value, str) else value
        for name, value in attributes.items()
        if value is not None and value != ""
    }
