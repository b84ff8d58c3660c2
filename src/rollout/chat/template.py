"""Messages to token ids, by a model's own chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rollout.chat.continuation import USER_MARKER, ContinuationRenderer
from rollout.chat.drift import DRIFT_KINDS, Drift, FullRenderer, compare
from rollout.chat.encoding import WrittenText, get_encoder
from rollout.chat.messages import TemplateMessage, list_media, template_messages
from rollout.chat.reasoning import ends_with_opening, opens_reasoning
from rollout.chat.rendering import TemplateRenderer, map_texts, render_escaped
from rollout.chat.tokenizer_backend import spell_token
from rollout.errors import MediaError, TemplateError

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Sequence

    from transformers import PreTrainedTokenizerBase

    from rollout.chat.transcript import Transcript
    from rollout.media import Media, PlacedMedia
    from rollout.media.processor import MediaProcessor
    from rollout.types import Message

#: More tokens than end a turn, which may have been sampled and then need no room.
TURN_END_ROOM = 64


class ChatTemplate:
    """A tokenizer and its chat template, used so that a transcript only ever grows.

    `prompt_ids` renders a conversation once; afterwards `observation_ids` gives the tokens that
    new messages add after a generated turn. What was sampled is never rendered or tokenized
    again. Safe to use from several threads; encodes in the caller's.

    Special tokens are those that the template writes. Messages and tools may spell them: that
    stays text.

    Args:
        tokenizer: A transformers tokenizer.
        chat_template: Jinja text that replaces the tokenizer's own template.
        chat_template_kwargs: What else the template can read, e.g. ``{"enable_thinking": False}``.
        processor: Puts images and videos into tokens; None where the model reads text only.

    Attributes:
        tokenizer: As given.
        source: The template itself, Jinja text.
        encoder: Its text to ids.
        processor: As given.

    Raises:
        TemplateError: There is no template, or there are several to choose from.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        processor: MediaProcessor | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.processor = processor
        self.source = _own_template(tokenizer) if chat_template is None else chat_template
        self._renderer = TemplateRenderer(
            tokenizer, self.source, chat_template_kwargs or {}, reads_media=processor is not None
        )
        self.encoder = get_encoder(tokenizer)
        self._continuations = ContinuationRenderer(self._renderer.render, self.encoder, self.source)

    def prompt_ids(
        self,
        messages: Iterable[Message | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        max_tokens: int | None = None,
    ) -> array[int]:
        """(T,) the whole conversation and the opening of the assistant's turn.

        Args:
            messages: At least one.
            tools: OpenAI-style function dicts that the model may call.
            max_tokens: Tokens that there is room for; None for any number. What has a few more may
                be encoded all the same.

        Raises:
            TemplateError: The messages are malformed, or the template refuses them or makes no
                text of them.
            TooManyTokens: They certainly have more than `max_tokens`.
        """
        return self.encoder.encode(self._write_prompt(messages, tools, max_tokens), max_tokens)

    def prompt_text(
        self,
        messages: Iterable[Message | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """What the template makes of a whole conversation and the opening of the next turn.

        Raises:
            TemplateError: As `prompt_ids`.
        """
        return self._write_prompt(messages, tools, None).text

    def _write_prompt(
        self,
        messages: Iterable[Message | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        max_tokens: int | None,
    ) -> WrittenText:
        read, renderer = template_messages(messages), self._renderer
        adapted = renderer.adapted(read)  # ids of calls as they are, unmarked
        written = render_escaped(
            lambda marked, offered: renderer.render(marked, True, offered),
            self.encoder,
            adapted,
            tools,
            max_tokens,
        )
        if not written.text:
            roles = ", ".join(message["role"] for message in read)
            raise TemplateError(f"the chat template makes no text of [{roles}]")
        return self._expand_media(written, adapted)

    def _expand_media(
        self,
        written: WrittenText,
        messages: Sequence[TemplateMessage],
        before: Sequence[Media] = (),
    ) -> WrittenText:
        """A text with all the placeholders of the media in messages."""
        media = list_media(messages)
        if not media:
            return written
        if self.processor is None:
            raise MediaError(f"{len(media)} images or videos: the model reads text only")
        return WrittenText(*self.processor.expand(written.text, written.plain, media, before))

    def places_of(self, ids: Sequence[int], media: Sequence[Media]) -> tuple[PlacedMedia, ...]:
        """Where media stand among the ids of their messages, which hold no others."""
        return self.processor.places(ids, media) if self.processor and media else ()

    def observation_ids(
        self,
        messages: Iterable[Message | Mapping[str, Any]],
        *,
        after: Sequence[int] | None,
        max_tokens: int | None = None,
        before: Sequence[Media] = (),
    ) -> array[int]:
        """(T,) what `messages` add after a generated turn, up to the next assistant's opening.

        It starts with the end of the generated turn (``<|im_end|>\\n`` in ChatML) as far as
        `after` lacks it: nothing of it is repeated, and a turn that was cut gets all of it.

        Args:
            messages: Tool results or user messages, all of them that come before the next turn.
            after: The ids so far, or only the last turn's; None where they are unknown, which
                counts as cut.
            max_tokens: As in `prompt_ids`.
            before: The images and videos so far, where `messages` show more.

        Raises:
            TemplateError: The messages are malformed, the template refuses them, or it cannot be
                used append-only.
            TooManyTokens: They certainly have more than `max_tokens`.
        """
        return self.observe(messages, after=after, max_tokens=max_tokens, before=before)[0]

    def observe(
        self,
        messages: Iterable[Message | Mapping[str, Any]],
        *,
        after: Sequence[int] | None,
        max_tokens: int | None = None,
        before: Sequence[Media] = (),
    ) -> tuple[array[int], bool]:
        """`observation_ids`, and whether the turn after them begins inside reasoning."""
        adapted = self._renderer.adapted(template_messages(messages))
        room = None if max_tokens is None else max_tokens + TURN_END_ROOM
        written, turn_end, opens = self._continuations.render(adapted, room)
        ids = self.encoder.encode(self._expand_media(written, adapted, before), room)
        if after is not None and len(after):
            ids = ids[self._continuations.past(ids, turn_end, after) :]
        return ids, opens

    def drift(
        self,
        transcript: Transcript,
        messages: Iterable[Message | Mapping[str, Any]],
        said: Mapping[int, str],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Drift:
        """How the transcript's text differs from the whole conversation rendered again.

        Args:
            transcript: From the prompt to the end.
            messages: The conversation in it.
            said: The text that the model sampled, by position in `messages`.
            tools: As the prompt was rendered with.

        Raises:
            TemplateError: The template refuses the conversation.
        """
        renderer = FullRenderer(self._continuations)
        read, text = template_messages(messages), self.decode(transcript.ids())
        tokens = self.processor.tokens.values() if self.processor else ()
        words = {token: f"rolloutPlaceholder{at}x" for at, token in enumerate(tokens)}
        if words:  # those that somebody spells are no placeholders of media
            read, said = map_texts([read, said], lambda each: _replace_all(each, words))
        drifts: list[Drift] = []
        for with_calls in (False, True):
            try:
                full, is_stripped = renderer.render(read, said, tools, with_calls=with_calls)
            except TemplateError:
                if with_calls and not drifts:
                    raise
                continue
            rendering = self._expand_media(WrittenText(full), read).text
            rendering = _replace_all(rendering, {word: token for token, word in words.items()})
            if rendering != text:  # the vocabulary may not spell every text (NFC, missing bytes)
                rendering = self.decode(self.encoder.encode(rendering))
            specials = self.encoder.specials
            drifts.append(compare(text, rendering, specials, is_reasoning_stripped=is_stripped))
            if drifts[-1].kind == "identical":
                break
        return min(drifts, key=lambda drift: DRIFT_KINDS.index(drift.kind))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens included."""
        return self.encoder.decode(ids)

    def spell_token(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text: they may be a part of a character."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:  # it runs in Python
            return self.decode([token_id]).encode(errors="replace")
        return spell_token(backend, token_id)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end token; None where it has none."""
        end = self.tokenizer.eos_token_id
        return end if isinstance(end, int) else None

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's padding token, or else its end token, or else 0."""
        pad = self.tokenizer.pad_token_id
        return pad if isinstance(pad, int) else self.eos_token_id or 0

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn: the tokenizer's end token and the template's own."""
        ends = dict.fromkeys((self.eos_token_id, *self._continuations.stop_ids()))
        return tuple(end for end in ends if end is not None)

    def end_ids(self, *, is_call: bool = False) -> tuple[int, ...]:
        """The token with which a model ends a turn itself; none where nothing but the next does."""
        return self._continuations.end_ids(is_call=is_call)

    def text_ids(self, text: str) -> list[int]:
        """The ids of a text, special tokens in it recognised."""
        return self.encoder.encode(text).tolist()

    def token_ids(self, names: Iterable[str]) -> tuple[int, ...]:
        """The ids of those special tokens among `names` that the vocabulary has."""
        specials = self.encoder.specials
        return tuple(specials[name] for name in names if name in specials)

    @cached_property
    def vocab_size(self) -> int:
        """All ids of the tokenizer, added tokens included, lie in [0, vocab_size)."""
        return max(self.tokenizer.get_vocab().values()) + 1

    @cached_property
    def opens_reasoning(self) -> bool:
        """Whether the turn after a plain question begins inside reasoning (``<think>``)."""
        return opens_reasoning(self._around_question[1])

    @cached_property
    def _around_question(self) -> tuple[str, str]:
        """What a template writes before a question and after it."""
        text = self._renderer.render([{"role": "user", "content": USER_MARKER}], True)
        return text.partition(USER_MARKER)[0], text.rpartition(USER_MARKER)[2]

    def ends_in_reasoning(self, ids: Sequence[int]) -> bool:
        """Whether the turn after a prompt of `ids` begins inside reasoning, as its end says."""
        return ends_with_opening(self.decode(ids[-64:]))

    @cached_property
    def added_system_prompt(self) -> str:
        """What stands before a first question that no system prompt precedes, its opening included.

        Empty unless it holds more than special tokens and the name of a role.
        """
        head = self._around_question[0]
        pieces = self.encoder.split(WrittenText(head))[::2]
        words = sum(len(piece.split()) for piece in pieces)
        return head if words > 1 + (len(pieces) - 1) // 2 else ""

    @property
    def dialect_notes(self) -> tuple[str, ...]:
        """How tool calls and results are changed for the template, in words."""
        return self._renderer.dialect

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that agree where vocabulary and template agree, on every machine."""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        facts: list[Any] = [vocabulary, self.source, self.eos_token_id]
        if self._renderer.kwargs:
            facts.append(self._renderer.kwargs)
        record = json.dumps(facts, sort_keys=True, default=str).encode()
        return hashlib.sha256(record).hexdigest()[:16]


def _replace_all(text: str, others: Mapping[str, str]) -> str:
    for old, new in others.items():
        text = text.replace(old, new)
    return text


def _own_template(tokenizer: PreTrainedTokenizerBase) -> str:
    own: Any = tokenizer.chat_template
    if isinstance(own, Mapping) and len(own) == 1:
        (own,) = own.values()
    if isinstance(own, Mapping):
        raise TemplateError(
            f"the tokenizer has several chat templates ({', '.join(own)}); "
            "put the one to use into a file and name it in model.chat_template"
        )
    if not own:
        raise TemplateError(
            "the tokenizer has no chat template; name a Jinja file in model.chat_template"
        )
    return str(own)
