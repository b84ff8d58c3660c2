"""Finds in a rendered text what its authors wrote, where it looks like a special token.

A template gives back text without saying which part of it came from a message. So the spellings of
special tokens in messages and tools are replaced by words of our own before rendering, and put
back afterwards: where they are put back is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollout.chat.encoding import Place, WrittenText
from rollout.errors import TemplateError

if TYPE_CHECKING:
    from rollout.chat.encoding import TextEncoder
    from rollout.chat.messages import TemplateMessage

Tools = Sequence[Mapping[str, Any]] | None
#: Renders messages and tools.
RenderAll = Callable[[Sequence["TemplateMessage"], Tools], str]

#: Tags that assistants write themselves, so that the words of one in a prompt may hold them.
TAG = re.compile(r"</?\w+>")


def render_escaped(
    render: RenderAll,
    encoder: TextEncoder,
    messages: Sequence[TemplateMessage],
    tools: Tools,
    max_tokens: int | None = None,
) -> WrittenText:
    """The rendered text with the places in it that must stay plain.

    Of an assistant's message, tags like ``<think>`` are left to the template and the tokenizer:
    templates look for them.

    Args:
        render: Renders messages and tools.
        encoder: Knows what looks like a special token.
        messages, tools: What is rendered.
        max_tokens: Tokens that there is room for; None for any number.

    Raises:
        TemplateError: The template refuses the messages.
        TooManyTokens: The text certainly has more than `max_tokens`.
    """
    text = render(messages, tools)
    encoder.refuse_beyond(max_tokens, text)
    if _are_plain(encoder, messages) and _are_plain(encoder, tools):
        return WrittenText(text)
    word = "rolloutSpecialToken"  # letters, which templates leave as they are
    while word in text:
        word += "a"
    replaced = _Marking(encoder, word, text, is_kept=False).render(render, messages, tools)
    if replaced.text == text:
        return replaced
    try:  # the template looks for tokens in contents: it must find them there
        kept = _Marking(encoder, word, text, is_kept=True).render(render, messages, tools)
    except TemplateError:
        return replaced
    return kept if kept.text == text else replaced


def _are_plain(encoder: TextEncoder, value: object) -> bool:
    """Whether nothing in the texts of `value` looks like a special token."""
    texts: list[str] = []
    _gather_texts(value, texts)
    return encoder.is_plain("\0".join(texts))


def _gather_texts(value: object, texts: list[str]) -> None:
    if isinstance(value, str):
        texts.append(value)
    elif type(value) is dict or isinstance(value, Mapping):
        for key, item in value.items():
            _gather_texts(key, texts)
            _gather_texts(item, texts)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _gather_texts(item, texts)


class _Marking:
    """Marks special tokens spelled in strings, and finds the marks in the rendered text.

    Args:
        encoder: Knows what looks like a special token.
        word: What marks begin with; stands nowhere else.
        truth: The text without marks, which says how a token was quoted.
        is_kept: Whether the spelling stays beside its mark, for templates that look for it at
            the start or end of a content; else the mark stands in its place.
    """

    def __init__(self, encoder: TextEncoder, word: str, truth: str, *, is_kept: bool) -> None:
        self._encoder = encoder
        self._word = word
        self._truth = truth
        self._is_kept = is_kept
        self._originals: dict[str, str] = {}

    def render(
        self, render: RenderAll, messages: Sequence[TemplateMessage], tools: Tools
    ) -> WrittenText:
        marked = [
            self._marked(message, is_assistant=message["role"] == "assistant")
            for message in messages
        ]
        text = render(marked, None if tools is None else self._marked(list(tools)))
        return self._unmarked(text)

    def _marked(self, value: Any, *, is_assistant: bool = False) -> Any:
        """A copy of `value` with marks in its strings."""
        if isinstance(value, str):
            return self._marked_text(value, is_assistant)
        if isinstance(value, Mapping):
            return {
                self._marked(key): self._marked(item, is_assistant=is_assistant)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._marked(item, is_assistant=is_assistant) for item in value]
        return value

    def _marked_text(self, text: str, is_assistant: bool) -> str:
        pieces: list[str] = []
        at, end = 0, len(text.rstrip())
        for start, stop in self._encoder.special_token_spellings(text):
            token = text[start:stop]
            if is_assistant and TAG.fullmatch(token):
                continue
            pieces += (text[at:start], self._mark(token, is_last=stop >= end))
            at = stop
        return "".join((*pieces, text[at:])) if pieces else text

    def _mark(self, token: str, *, is_last: bool) -> str:
        mark = f"{self._word}{len(self._originals)}x"
        if self._is_kept:
            mark = mark + token if is_last else token + mark
        self._originals[mark] = token
        return mark

    def _unmarked(self, text: str) -> WrittenText:
        if not self._originals:
            return WrittenText(text)
        pieces: list[str] = []
        plain: list[Place] = []
        at = length = 0
        for match in re.finditer("|".join(map(re.escape, self._originals)), text):
            before = text[at : match.start()]
            length += len(before)
            token = self._as_written(self._originals[match[0]], length)
            pieces += (before, token)
            length += len(token)
            plain.append((length - len(token), length))
            at = match.end()
        return WrittenText("".join((*pieces, text[at:])), tuple(plain))

    def _as_written(self, token: str, at: int) -> str:
        """The token as the template wrote it: within JSON, quotation marks have backslashes."""
        quoted = json.dumps(token, ensure_ascii=False)[1:-1]
        is_quoted = quoted != token and self._truth.startswith(quoted, at)
        return quoted if is_quoted else token
