"""Prompts without their template: what it writes around their contents is the same every time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rollout.chat.content_tests import content_tests
from rollout.chat.slotted_text import SlottedText, find_slots, pattern_of
from rollout.chat.special_token_escaping import are_plain_tools
from rollout.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from rollout.chat.encoding import TextEncoder, WrittenText
    from rollout.chat.messages import TemplateMessage
    from rollout.chat.rendering import Renderer

#: Prompts of more messages have too many patterns to learn them, and so many are remembered.
MOST_MESSAGES, MOST_FORMS = 4, 64


class PromptForms:
    """Writes prompts of a few messages; remembers one form for each pattern and list of tools.

    Args:
        renderer: Runs the template.
        encoder: Knows the special tokens.
    """

    def __init__(self, renderer: Renderer, encoder: TextEncoder) -> None:
        self._renderer = renderer
        self._encoder, self._is_plain = encoder, encoder.is_plain
        self._tests = content_tests(renderer.source) if renderer.is_steady else None
        self._forms: dict[tuple[object, bytes], SlottedText | None] = {}

    def written(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        most: int | None,
    ) -> WrittenText | None:
        """What the template makes of a prompt; None where it must be asked.

        Raises:
            TooManyTokens: It certainly has more than `most`.
        """
        if self._tests is None or len(messages) > MOST_MESSAGES:
            return None
        form = self._form(messages, tools)
        contents = None if form is None else form.contents(messages, self._tests)
        if form is None or contents is None or not all(map(str.isascii, contents)):
            return None  # others may be no text, as the renderer finds out
        if any(m["role"] == "assistant" and not self._is_plain(m["content"]) for m in messages):
            return None  # the template is let to write the tags of one
        return form.written(contents, self._encoder, most)

    def _form(
        self, messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]] | None
    ) -> SlottedText | None:
        try:
            key = pattern_of(messages), msgspec.msgpack.encode(tools or ())
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):  # no plain data
            return None
        if key not in self._forms and len(self._forms) < MOST_FORMS:
            self._forms[key] = self._find(messages, tools)
        return self._forms.get(key)

    def _find(
        self, messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]] | None
    ) -> SlottedText | None:
        if not are_plain_tools(self._encoder, tools):
            return None
        try:
            return find_slots(lambda given: self._renderer.render(given, True, tools), messages)
        except TemplateError:
            return None
