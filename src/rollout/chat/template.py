"""Messages to token ids, by a model's own chat template."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rollout.chat.continuation import HISTORY, ContinuationRenderer
from rollout.chat.messages import TemplateMessage, template_messages
from rollout.errors import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollout.types import Message

THINK, END_THINK = "<think>", "</think>"


class ChatTemplate:
    """A tokenizer and its chat template, used so that a transcript only ever grows.

    `prompt_ids` renders a conversation once; afterwards `observation_ids` gives the tokens that
    new messages add behind a generated turn. What was sampled is never rendered or tokenized
    again. Safe to use from several threads; encodes in the caller's.

    Args:
        tokenizer: A transformers tokenizer.
        chat_template: Jinja text that replaces the tokenizer's own template.

    Raises:
        TemplateError: There is no template, or there are several to choose from.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._source = chat_template if chat_template is not None else _own_template(tokenizer)
        self._encode = _encoder(tokenizer)
        self._added = frozenset(tokenizer.added_tokens_decoder)
        self._continuations = ContinuationRenderer(self._render, self._source)
        self._turn_ends: dict[str, tuple[int, ...]] = {}

    def prompt_ids(
        self,
        messages: Iterable[Message | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> array[int]:
        """(T,) the whole conversation and the opening of the assistant's turn.

        Args:
            messages: At least one.
            tools: OpenAI-style function dicts that the model may call.

        Raises:
            TemplateError: The messages are malformed or the template refuses them.
        """
        text = self._render(template_messages(messages), True, tools)
        return array("i", self._encode(text))

    def observation_ids(
        self,
        messages: Iterable[Message | Mapping[str, Any]],
        *,
        after: Sequence[int] | None,
    ) -> array[int]:
        """(T,) what `messages` add behind a generated turn, up to the next assistant's opening.

        It starts with the end of the generated turn (``<|im_end|>\\n`` in ChatML) as far as
        `after` lacks it: nothing of it is repeated, and a turn that was cut gets all of it.

        Args:
            messages: Tool results or user messages, all of them that come before the next turn.
            after: The ids so far, or only the last turn's; None where they are unknown, which
                counts as cut.

        Raises:
            TemplateError: The messages are malformed, the template refuses them, or it cannot be
                used append-only.
        """
        text, turn_end = self._continuations.render(template_messages(messages))
        ids = self._encode(text)
        written = self._written(ids, turn_end, after) if after is not None and len(after) else 0
        return array("i", ids[written:] if written else ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens included."""
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end token; None where it has none."""
        return _single_id(self.tokenizer.eos_token_id)

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's padding token, or else its end token, or else 0."""
        pad = _single_id(self.tokenizer.pad_token_id)
        return next((token for token in (pad, self.eos_token_id) if token is not None), 0)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn: the tokenizer's end token and the template's own."""
        return tuple(dict.fromkeys(self._stop_tokens()))

    @cached_property
    def vocab_size(self) -> int:
        """All ids of the tokenizer, added tokens included, lie in [0, vocab_size)."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @cached_property
    def opens_reasoning(self) -> bool:
        """Whether the opening of the assistant's turn ends inside ``<think>``."""
        opening = self._render([{"role": "user", "content": HISTORY}], True).rpartition(HISTORY)[2]
        return opening.rfind(THINK) > opening.rfind(END_THINK)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that agree where vocabulary and template agree, on every machine."""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        record = json.dumps([vocabulary, self._source, self.eos_token_id]).encode()
        return hashlib.sha256(record).hexdigest()[:16]

    def _render(
        self,
        messages: Sequence[TemplateMessage],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=self._source,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # a template is code of a stranger and raises what it likes
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateError(f"the chat template refuses [{roles}]: {error}") from error
        assert isinstance(text, str)
        _check_encodable(text)
        return text

    def _stop_tokens(self) -> Iterable[int]:
        if self.eos_token_id is not None:
            yield self.eos_token_id
        try:
            turn_end = self._encode(self._continuations.turn_end())
        except TemplateError:  # a template without answers still renders prompts
            return
        yield from [token for token in turn_end if token in self._added][:1]

    def _written(self, ids: list[int], turn_end: str, after: Sequence[int]) -> int:
        """How many of the first `ids` need not follow `after`, because they end it already.

        Only a special token tells that a turn is over; text before it (a space, in some
        templates) is then past, and what comes after it may or may not have been sampled.
        """
        end = self._turn_end_ids(turn_end, ids)
        special = next((at for at, token in enumerate(end) if token in self._added), len(end))
        for stop in range(len(end), special, -1):
            if list(after[special - stop :]) == list(end[special:stop]):
                return stop
        return 0

    def _turn_end_ids(self, turn_end: str, ids: list[int]) -> tuple[int, ...]:
        """The ids of `turn_end` as far as `ids` start with them, at least one of them."""
        end = self._turn_ends.get(turn_end)
        if end is None:
            end = self._turn_ends[turn_end] = tuple(self._encode(turn_end))
        length = 0
        while length < len(end) and length < len(ids) and ids[length] == end[length]:
            length += 1
        return end[:length] or tuple(ids[:1])


def _check_encodable(text: str) -> None:
    """JSON and Python can spell half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise TemplateError(f"the messages hold {half!r}: half of a character, no text") from None


def _own_template(tokenizer: PreTrainedTokenizerBase) -> str:
    own = tokenizer.chat_template
    if isinstance(own, Mapping):
        if len(own) == 1:
            return str(next(iter(own.values())))
        raise TemplateError(
            f"the tokenizer has several chat templates ({', '.join(own)}); "
            "put the one to use into a file and name it in model.chat_template"
        )
    if not own:
        raise TemplateError(
            "the tokenizer has no chat template; name a Jinja file in model.chat_template"
        )
    return str(own)


def _encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Text to ids, special tokens in the text recognised and none added.

    Works on a copy of the fast backend: others may set truncation or padding on theirs.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    own = type(backend).from_str(backend.to_str())
    own.no_truncation()
    own.no_padding()
    return lambda text: own.encode(text, add_special_tokens=False).ids


def _single_id(token_id: Any) -> int | None:
    return token_id if isinstance(token_id, int) else None
