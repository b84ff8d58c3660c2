"""What a chat template does with conversations of every shape, seen from an append-only transcript.

Each scene is played as a rollout would: the prompt is rendered, a scripted model answers, what
follows is appended, and in the end the transcript is compared with a full rendering.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from rollout.chat.drift import Drift
from rollout.chat.reasoning import END_THINK, THINK
from rollout.chat.transcript import Transcript
from rollout.errors import TemplateError
from rollout.types import Message

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollout.chat.template import ChatTemplate

#: Stands for contents where a boundary is shown.
ELLIPSIS = "…"


class Scene(NamedTuple):
    """A conversation: a prompt, and what the model says with what follows each time."""

    name: str
    prompt: list[Message]
    turns: list[tuple[str, list[Message]]]


class SceneReport(msgspec.Struct, kw_only=True):
    """What became of a scene.

    Attributes:
        name: Of the scene.
        refusal: Why it cannot be played append-only; None where it can.
        boundary: What stands between the end of a turn and the next, contents left out; None in
            scenes of one turn.
        cut_end: What a turn that was cut gets before that; "" where nothing ends a turn.
        drift: How the transcript differs from a full rendering; None where that was refused.
        drift_refusal: Why there is no full rendering.
    """

    name: str
    refusal: str | None = None
    boundary: str | None = None
    cut_end: str = ""
    drift: Drift | None = None
    drift_refusal: str | None = None


def conformance_reports(template: ChatTemplate) -> Iterator[SceneReport]:
    """A report of each scene, in order."""
    for scene in _list_scenes(template):
        try:
            yield _play(template, scene)
        except TemplateError as error:
            yield SceneReport(name=scene.name, refusal=str(error))


def _play(template: ChatTemplate, scene: Scene) -> SceneReport:
    report = SceneReport(name=scene.name)
    transcript, messages, said = Transcript(), list(scene.prompt), {}
    transcript.append_prompt(template.prompt_ids(messages))
    is_reasoning = template.ends_in_reasoning(transcript.ids().tolist())
    for line, following in scene.turns:
        thinks = is_reasoning and line and END_THINK not in line  # the prompt has opened it
        words = f"Let me see.\n{END_THINK}\n\n{line}" if thinks else line
        is_call = bool(following) and following[0].role == "tool"
        ends = template.end_ids(is_call=is_call) if words else ()  # else an empty generation
        ids = [*template.text_ids(words), *ends]
        scores = [0.0] * len(ids)
        transcript.append_generated(ids, scores, versions=[(0, len(ids))], finish_reason="stop")
        said[len(messages)] = template.decode(ids)
        messages.append(Message(role="assistant", content=words))
        if following:
            added, is_reasoning = template.observe(following, after=ids)
            after_cut = template.observation_ids(following, after=None)
            transcript.append_observation(added)
            report.boundary = _leave_out_contents(template.decode(added), following)
            report.cut_end = template.decode(after_cut[: len(after_cut) - len(added)])
            messages += following
    try:
        report.drift = template.drift(transcript, messages, said)
    except TemplateError as error:
        report.drift_refusal = str(error)
    return report


def _leave_out_contents(text: str, messages: Sequence[Message]) -> str:
    for message in messages:
        content = message.content or ""
        if content.strip():
            text = text.replace(content, ELLIPSIS).replace(content.strip(), ELLIPSIS)
    return text


def _list_scenes(template: ChatTemplate) -> Iterator[Scene]:
    def user(text: str) -> Message:
        return Message(role="user", content=text)

    def result(text: str, number: int = 0) -> Message:
        call_id = f"functions.weather:{number}"
        return Message(role="tool", content=text, name="weather", tool_call_id=call_id)

    opening = "" if template.opens_reasoning else f"{THINK}\n"
    reasoned = f"{opening}Let me see.\n{END_THINK}\n\nIt is Bern."
    strange = "  Zürich\u00a012  345\t漢字 🙂👍🏽\n\n<|im_end|><s></think>\r\n"
    question, more = user("Which is the capital?"), user("And then?")
    yield Scene("plain", [question], [("It is Bern.", [])])
    instruction = Message(role="system", content="Be brief.")
    yield Scene("system", [instruction, question], [("Bern.", [more]), ("Basel.", [])])
    yield Scene("multi-turn", [question], [("Bern.", [more]), ("Basel.", [more]), ("No.", [])])
    results = [result("7 °C"), result("3 mm", 1)]
    yield Scene("tool call", [question], [("(calls)", results[:1]), ("Cold.", [])])
    yield Scene("parallel tool calls", [question], [("(calls)", results), ("Cold.", [])])
    yield Scene("reasoning", [question], [(reasoned, [more]), (reasoned, [])])
    yield Scene("unicode", [user(strange)], [(" Zürich 漢字\n", [user(strange)]), ("🙂", [])])
    turns = [("", [user("")]), ("Well.", [result("")]), ("", [])]
    yield Scene("empty content", [user("")], turns)
