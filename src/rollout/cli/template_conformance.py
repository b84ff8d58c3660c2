"""What a chat template does with conversations of every shape, seen from an append-only transcript.

Each is played as a rollout would: the prompt is rendered, a scripted model answers, what follows is
appended, and in the end the transcript is compared with a full rendering.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rollout.chat.reasoning import END_THINK, THINK
from rollout.chat.transcript import Transcript
from rollout.errors import TemplateError
from rollout.types import Message

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollout.chat.drift import Drift
    from rollout.chat.template import ChatTemplate

#: Stands for contents where a boundary is shown.
ELLIPSIS = "…"


class SceneReport(NamedTuple):
    """What became of a conversation.

    Attributes:
        name: Of its shape.
        refusal: Why it cannot be played append-only; None where it can.
        boundary: What stands between the end of a turn and the next, contents left out; None in
            those of one turn.
        cut_end: What a turn that was cut gets before that; "" where nothing ends a turn.
        drift: How the transcript differs from a full rendering, or why there is no such rendering.
    """

    name: str
    refusal: str | None = None
    boundary: str | None = None
    cut_end: str = ""
    drift: Drift | str = ""


def conformance_reports(template: ChatTemplate) -> Iterator[SceneReport]:
    """A report of each conversation, in order."""
    for name, messages in _write_scenes(template).items():
        try:
            yield _play(template, name, messages)
        except TemplateError as error:
            yield SceneReport(name, str(error))


def _play(template: ChatTemplate, name: str, messages: list[Message]) -> SceneReport:
    turns = [at for at, message in enumerate(messages) if message.role == "assistant"]
    transcript, report, sampled = Transcript(), SceneReport(name), dict[int, str]()
    transcript.append_prompt(template.prompt_ids(messages[: turns[0]]))
    is_reasoning = template.ends_in_reasoning(transcript.ids().tolist())
    for at, stop in zip(turns, [*turns[1:], len(messages)], strict=True):
        text, following = messages[at].content or "", messages[at + 1 : stop]
        if is_reasoning and text and END_THINK not in text:  # the prompt has opened it
            text = f"Let me see.\n{END_THINK}\n\n{text}"
        is_call = bool(following) and following[0].role == "tool"
        ends = template.end_ids(is_call=is_call) if text else ()  # else an empty generation
        ids = [*template.text_ids(text), *ends]
        scores = [0.0] * len(ids)
        transcript.append_generated(ids, scores, versions=[(0, len(ids))], finish_reason="stop")
        sampled[at] = template.decode(ids)
        if following:
            added, is_reasoning = template.observe(following, after=ids)
            after_cut = template.observation_ids(following, after=None)
            transcript.append_observation(added)
            boundary = _leave_out_contents(template.decode(added), following)
            cut_end = template.decode(after_cut[: len(after_cut) - len(added)])
            report = report._replace(boundary=boundary, cut_end=cut_end)
    try:
        return report._replace(drift=template.drift(transcript, messages, sampled))
    except TemplateError as error:
        return report._replace(drift=str(error))


def _leave_out_contents(text: str, messages: Sequence[Message]) -> str:
    for content in (message.content or "" for message in messages):
        if content.strip():
            text = text.replace(content, ELLIPSIS).replace(content.strip(), ELLIPSIS)
    return text


def _write_scenes(template: ChatTemplate) -> dict[str, list[Message]]:
    """Conversations by their shape: what the assistant says in them, the model samples."""

    def result(text: str, number: int = 0) -> Message:
        call_id = f"functions.weather:{number}"
        return Message(role="tool", content=text, name="weather", tool_call_id=call_id)

    turn, user = partial(Message, role="assistant"), partial(Message, role="user")
    question, more = user(content="Which is the capital?"), user(content="And then?")
    system, bern = Message(role="system", content="Be brief."), turn(content="Bern.")
    opening = "" if template.opens_reasoning else f"{THINK}\n"
    reasoned = turn(content=f"{opening}Let me see.\n{END_THINK}\n\nIt is Bern.")
    strange = user(content="  Zürich\u00a012  345\t漢字 🙂👍🏽\n\n<|im_end|><s></think>\r\n")
    calling, cold = turn(content="(calls)"), turn(content="Cold.")
    no_user, no_turn = user(content=""), turn(content="")
    return {
        "plain": [question, bern],
        "system": [system, question, bern, more, bern],
        "multi-turn": [question, bern, more, turn(content="Basel."), more, turn(content="No.")],
        "tool call": [question, calling, result("7 °C"), cold],
        "parallel tool calls": [question, calling, result("7 °C"), result("3 mm", 1), cold],
        "reasoning": [question, reasoned, more, reasoned],
        "unicode": [strange, turn(content=" Zürich 漢字\n"), strange, turn(content="🙂")],
        "empty content": [no_user, no_turn, no_user, turn(content="Well."), result(""), no_turn],
    }
