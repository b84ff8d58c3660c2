"""How a conversation begins that is opened beside another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollout.agents.budget import length_error
from rollout.agents.conversation_log import ConversationLog
from rollout.agents.identity import RejectedPrompt
from rollout.agents.places import Row
from rollout.chat.trajectory import BRANCH, COMPACTION
from rollout.chat.transcript import Transcript, common_length
from rollout.errors import AgentError, LimitExceeded

if TYPE_CHECKING:
    from rollout.agents.wording import Given, Worded, Wording
    from rollout.types import Message


async def begun(what: str, wording: Wording, messages: Given) -> Worded:
    """The first messages of a conversation in tokens.

    Where the model has spoken in them, they may take the room of its answers too.

    Args:
        what: What is done with them, for messages.
        wording: Of the conversation.
        messages: At least one.

    Raises:
        LimitExceeded: They are more than fits.
        AgentError: They cannot be rendered.
    """
    is_list = isinstance(messages, Sequence)  # what is none is refused with the words for it
    try:
        return await wording.prompt(messages, is_continued=is_list and any(map(_is_said, messages)))
    except RejectedPrompt as error:
        raise _refusal(what, error) from error


def _refusal(what: str, error: RejectedPrompt) -> LimitExceeded | AgentError:
    if error.reason == "bad_message":
        return AgentError(f"{what}: {error}")
    source = {"prompt_length": "lengths.prompt"}.get(error.reason, "engine.context_length")
    return length_error(source, str(error))


def first_log(row: Row, wording: Wording, worded: Worded) -> ConversationLog:
    """A conversation whose row begins with these messages."""
    log = ConversationLog.of(row, wording.reader)
    log.begin(worded, wording.prompt_room)
    return log


def opened_log(parent: Row, wording: Wording, worded: Worded, purpose: str) -> ConversationLog:
    """One beside a row, from whose end it departs; one that says again what stands there, where
    its tokens do.
    """
    row = Row(Transcript(), purpose, parent, len(parent.transcript))
    return first_log(reopened(row, worded), wording, worded)


def reopened(row: Row, worded: Worded) -> Row:
    """A row in which the model has not spoken, to begin with these messages."""
    row.transcript = Transcript()
    if row.purpose in (BRANCH, COMPACTION):
        assert row.parent is not None
        row.position = common_length(worded.ids, row.parent.transcript.prefix.ids)
    return row


def _is_said(message: Message | Mapping[str, Any]) -> bool:
    role = message.get("role") if isinstance(message, Mapping) else getattr(message, "role", None)
    return role == "assistant"
