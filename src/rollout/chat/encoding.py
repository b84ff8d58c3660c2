"""Messages to token ids: message list → template text → pieces → ids.

`TemplateRenderer` has the chat template write a conversation. `render_escaped` finds in its text
the places that its authors and not the template wrote: spellings of special tokens there stay text.
A `TextEncoder` splits the text at the special tokens that the template wrote, encodes each piece
between two of them as plain text, and remembers it by its exact text: the system's message with the
tools is encoded once for thousands of prompts, and a question once for all members of a group.

Where a tokenizer cannot be split so, the whole text is encoded.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.chat.fast_encoding import make_encoder, make_plain_codec
from rollout.chat.messages import (
    Dialect,
    TemplateMessage,
    as_parts,
    template_call,
    with_arguments_as_text,
)
from rollout.chat.reasoning import END_THINK, THINK
from rollout.chat.tokenizer_parts import can_be_split, copy_tokenizer, longest_token, match_any
from rollout.errors import TemplateError
from rollout.utf8 import check_encodable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedTokenizerBase

    from rollout.chat.fast_encoding import Decode, Encode

#: Where text must be kept from being read as special tokens: ``[start, stop)``.
Place = tuple[int, int]
Tools = Sequence[Mapping[str, Any]] | None
#: `render(messages, add_generation_prompt, tools=None)`.
Render = Callable[..., str]

#: Bytes of pieces, texts and ids together, that an encoder remembers, and of one piece at most.
_REMEMBERED, _LARGEST_PIECE = 32 << 20, 1 << 20
#: What an entry of a dict takes beside its text and ids.
_ENTRY = 150
#: Begins and ends the tokens that stand for special ones; of a private plane, so in no text.
_BOUNDARY = "\U000f5a17"
#: Markup that some vocabularies (Gemma's) hold as ordinary entries of their table of added tokens.
_MARKUP = re.compile(
    r"</?(?:a|b|i|p|s|u|h[1-6]|t[dhr]|ol|ul|li|em|br|img|sub|sup|code|strong|table|tbody|thead"
    r"|tfoot|caption|blockquote)>"
)
_USER: TemplateMessage = {"role": "user", "content": "q"}
_PROBE = "rolloutStringProbe"


class TemplateRenderer:
    """Renders conversations by one chat template.

    Args:
        tokenizer: Runs the template and gives it its special tokens.
        source: The template.
        kwargs: What else the template can read, such as ``enable_thinking``.
        reads_media: Whether the model does, so that the template may take contents as parts only.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: str,
        kwargs: Mapping[str, Any],
        *,
        reads_media: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self.source = source
        self.kwargs = dict(kwargs)
        self._reads_media = reads_media

    def render(
        self,
        messages: Sequence[TemplateMessage],
        add_generation_prompt: bool,
        tools: Tools = None,
    ) -> str:
        """The text of a conversation; tool calls and results in the template's own dialect.

        Raises:
            TemplateError: The template refuses the messages.
        """
        text = self._render(self.adapted(messages), add_generation_prompt, tools)
        check_encodable(text)
        return text

    def adapted(self, messages: Sequence[TemplateMessage]) -> Sequence[TemplateMessage]:
        """`messages` with tool calls and results as the template wants them."""
        for message in messages:
            if "tool_calls" in message or message["role"] == "tool":
                return self.dialect.adapt(messages)
        return messages

    @cached_property
    def dialect(self) -> Dialect:
        """Found by showing the template a call and its result."""
        as_text = Dialect(arguments_as_text=self._wants_text())
        ids = msgspec.structs.replace(as_text, nine_letter_ids=True)
        as_user = msgspec.structs.replace(as_text, results_as_user=True)
        for dialect in (as_text, ids, as_user):
            if self._takes_results(dialect):
                return dialect
        return as_text

    @cached_property
    def _takes_parts_only(self) -> bool:
        """Whether it leaves out a content that is a string (LLaVA): as parts it writes it."""
        if not self._reads_media:
            return False
        try:
            return _PROBE not in self._apply([{"role": "user", "content": _PROBE}], True, None)
        except TemplateError:
            return True

    @cached_property
    def _no_tools(self) -> list[Any] | None:
        """What stands for no tools: some templates go through the list unasked (Hermes)."""
        for nothing in (None, list[Any]()):
            try:
                self._apply([_USER], True, nothing)
            except TemplateError:
                continue
            return nothing
        return None

    def _wants_text(self) -> bool:
        call = template_call("abcdefghi", "tool", {"rolloutKey": "rolloutValue"})
        messages = [_USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            return str(call["function"]["arguments"]) in self._render(messages, False)
        except TemplateError:
            pass
        try:
            return '"rolloutValue"' in self._render(with_arguments_as_text(messages), False)
        except TemplateError:
            return False

    def _takes_results(self, dialect: Dialect) -> bool:
        call = template_call("call_0", "tool", {})
        result = {"role": "tool", "content": "r", "name": "tool", "tool_call_id": "call_0"}
        answers: Iterable[TemplateMessage] = (
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "assistant", "content": "a"},
        )
        for answer in answers:
            try:
                self._render(dialect.adapt([_USER, answer, result]), True)
            except TemplateError:
                continue
            return True
        return False

    def _render(
        self,
        messages: Sequence[TemplateMessage],
        add_generation_prompt: bool,
        tools: Tools = None,
    ) -> str:
        offered = [dict(tool) for tool in tools] if tools else self._no_tools
        if self._takes_parts_only:
            messages = [{**each, "content": as_parts(each["content"])} for each in messages]
        return self._apply(messages, add_generation_prompt, offered)

    def _apply(
        self,
        messages: Sequence[TemplateMessage],
        add_generation_prompt: bool,
        tools: list[Any] | None,
    ) -> str:
        try:
            if self._compiled is not None and _is_plain(messages) and _is_plain(tools):
                text = self._compiled.render(
                    messages=messages,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **self._variables,
                )
            else:
                text = self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=tools,
                    chat_template=self.source,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **self.kwargs,
                )
        except Exception as error:  # a template is foreign code and raises what it likes
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateError(f"the chat template refuses [{roles}]: {error}") from error
        assert isinstance(text, str)
        return text

    @cached_property
    def _compiled(self) -> Any:
        """The template as transformers compiles it; None where the tokenizer has a way of its own.

        Called directly it takes a third of the time of `apply_chat_template`, which first makes
        plain values of all that it is given: ours are, as a rule. Its globals are copied at every
        call: from one dict, not from jinja's chain of them, which takes longer than most renders.
        """
        from transformers import PreTrainedTokenizerBase
        from transformers.utils import chat_template_utils

        usual = PreTrainedTokenizerBase.apply_chat_template
        is_usual = type(self._tokenizer).apply_chat_template is usual and _is_plain(self._variables)
        compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
        if not is_usual or compile_template is None:
            return None
        environment = compile_template("").environment  # it is the same for every template
        return environment.template_class.from_code(
            environment, environment.compile(self.source), dict(environment.globals)
        )

    @cached_property
    def _variables(self) -> dict[str, Any]:
        return {**self._tokenizer.special_tokens_map, **self.kwargs}


def _is_plain(value: Any) -> bool:
    """Whether it is made of what JSON has, without the keys that transformers renames."""
    kind = type(value)
    if kind is dict and _RENAMED.isdisjoint(value):
        value = value.values()
    elif kind is not list:
        return kind in _SCALARS
    for each in value:  # noqa: SIM110  (most are texts, and a generator takes longer)
        if type(each) is not str and not _is_plain(each):
            return False
    return True


#: Exact types of values that hold nothing else.
_SCALARS = frozenset((str, int, float, bool, type(None)))
#: Where messages keep their reasoning: transformers puts it under each of these names.
_RENAMED = frozenset(("reasoning_content", "thinking", "reasoning"))


#: What the tags look like that assistants write themselves.
TAG = re.compile(r"</?\w+>")


def render_escaped(
    render: Callable[[Sequence[TemplateMessage], Tools], str],
    encoder: TextEncoder,
    messages: Sequence[TemplateMessage],
    tools: Tools,
    max_tokens: int | None = None,
) -> WrittenText:
    """The rendered text with the places in it that must stay plain.

    A template gives back text without saying which part of it came from a message. So spellings of
    special tokens in messages and tools get words of our own beside them, which are found and
    removed in the text. Of an assistant's message, tags like ``<think>`` are left to the template
    and the tokenizer: templates look for them.

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
    if encoder.is_plain("\0".join(_list_texts([messages, tools or ()]))):
        return WrittenText(text)
    word = "rolloutSpecialToken"  # letters, which templates leave as they are
    while word in text:
        word += "a"
    marks = _SpelledMarks(encoder, word)
    marked = [
        map_texts(each, partial(marks.add, is_assistant=each["role"] == "assistant"))
        for each in messages
    ]
    offered = None if tools is None else map_texts(list(tools), marks.add)
    return marks.remove(render(marked, offered)) if marks.spelled else WrittenText(text)


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with another text for each that is in it, keys of mappings included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_texts(key, change): map_texts(item, change) for key, item in value.items()}
    return [map_texts(each, change) for each in value] if isinstance(value, list | tuple) else value


def _list_texts(value: object) -> list[str]:
    found, texts = [value], list[str]()
    for item in found:  # which grows meanwhile
        if isinstance(item, str):
            texts.append(item)
        elif isinstance(item, (dict, Mapping)):  # tried in this order, a dict is known at once
            found += item
            found += item.values()
        elif isinstance(item, (list, tuple)):
            found += item
    return texts


class _SpelledMarks:
    """Words of our own beside the special tokens that messages spell.

    Args:
        encoder: Knows what looks like a special token.
        word: What marks begin with; stands nowhere else.

    Attributes:
        spelled: The tokens, and whether the mark of each stands before it.
    """

    def __init__(self, encoder: TextEncoder, word: str) -> None:
        self._encoder = encoder
        self._word = word
        self.spelled: list[tuple[str, bool]] = []

    def add(self, text: str, *, is_assistant: bool = False) -> str:
        """`text` with a mark beside each token in it."""
        pieces: list[str] = []
        at, end = 0, len(text.rstrip())
        for start, stop in self._encoder.special_token_spellings(text):
            token = text[start:stop]
            if is_assistant and token in self._encoder.tags:
                continue
            is_before = stop >= end  # templates look for tokens at the start or end of a content
            mark = f"{self._word}{len(self.spelled)}x"
            pieces += (text[at:start], mark + token if is_before else token + mark)
            self.spelled.append((token, is_before))
            at = stop
        return "".join((*pieces, text[at:]))

    def remove(self, text: str) -> WrittenText:
        """The text that was rendered of marked values, and where the tokens stand in it."""
        pieces: list[str] = []
        plain: list[Place] = []
        at = length = 0
        for match in re.finditer(f"{self._word}([0-9]+)x", text):
            before, at = text[at : match.start()], match.end()
            pieces.append(before)
            length += len(before)
            token, is_before = self.spelled[int(match[1])]
            for spelling in (token, json.dumps(token, ensure_ascii=False)[1:-1]):  # in JSON
                if text.startswith(spelling, at) if is_before else before.endswith(spelling):
                    start = length if is_before else length - len(spelling)
                    plain.append((start, start + len(spelling)))
                    break
        return WrittenText("".join((*pieces, text[at:])), tuple(plain))


class TooManyTokens(TemplateError):
    """A text has more tokens than there is room for; known before it was encoded.

    Attributes:
        least: So many tokens it has at least.
    """

    def __init__(self, least: int, max_tokens: int) -> None:
        super().__init__(f"the text has at least {least} tokens; there is room for {max_tokens}")
        self.least = least


class WrittenText(msgspec.Struct, frozen=True):
    """A rendered text, and the places in it that only look like special tokens.

    Attributes:
        text: As the template wrote it.
        plain: Places that stay plain text, in order, none overlapping another.
    """

    text: str
    plain: tuple[Place, ...] = ()


class TextEncoder:
    """Text to ids by one tokenizer, no special token added. Get one by `get_encoder`.

    A tokenizer that transformers runs in Python encodes whole texts, and those with plain places
    piece by piece. Safe to use from several threads.

    Attributes:
        specials: Spelling and id of each token that a template may write: those marked special,
            and the other added ones that are neither white space nor markup.
        tags: Those that assistants write themselves, so that their words in a prompt may hold them.
        added: How many added tokens the tokenizer had.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        tokens = tokenizer.added_tokens_decoder
        self.specials = {each.content: at for at, each in tokens.items() if _is_special(each)}
        own = (THINK, END_THINK)
        tags = (each for each in tokens.values() if TAG.fullmatch(each.content))
        self.tags = {tag.content for tag in tags if not tag.special or tag.content in own}
        self.added = len(tokens)
        self._pattern = match_any(self.specials)
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._encode_whole: Encode | None = None
        self._marked: _TemplateMarks | None = None
        if self._backend is None:
            self._decode: Decode = lambda ids: str(
                tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            )
            encode: Encode = partial(_encode_in_python, tokenizer, split_special_tokens=True)
            self._encode_whole = partial(_encode_in_python, tokenizer)
        else:
            encode, self._decode = make_plain_codec(self._backend, self.specials)
            if not can_be_split(self._backend):
                self._encode_whole = make_encoder(copy_tokenizer(self._backend))
                self._marked = _TemplateMarks(self._backend, self.specials)
        self._piece_ids = _Remembered(encode)

    def encode(self, written: WrittenText | str, max_tokens: int | None = None) -> array[int]:
        """The ids; special tokens are recognised outside the plain places only.

        Args:
            written: What is encoded; in a string, every special token is recognised.
            max_tokens: Tokens that there is room for; None for any number.

        Raises:
            TooManyTokens: They are certainly more than `max_tokens`.
            TemplateError: The text holds half of a character.
        """
        if isinstance(written, str):
            written = WrittenText(written)
        self.refuse_beyond(max_tokens, written.text)
        if self._encode_whole is not None and not written.plain:
            return array("i", self._encode_whole(written.text))
        parts = self.split(written)
        if self._marked is not None and _BOUNDARY not in written.text:
            return array("i", self._marked.encode(parts))
        ids: array[int] = array("i")
        for at, part in enumerate(parts):
            if at % 2:
                ids.append(self.specials[part])
            elif part:
                ids.frombytes(self._piece_ids(part))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens included."""
        listed = ids.tolist() if isinstance(ids, array) else list(map(int, ids))
        try:
            return self._decode(listed)
        except Exception:  # fastokens does not know an id
            if self._backend is None:
                raise
            return str(self._backend.decode(listed, skip_special_tokens=False))

    def refuse_beyond(self, max_tokens: int | None, text: str) -> None:
        """Raise where the length of `text` says that it has more than `max_tokens` tokens.

        Raises:
            TooManyTokens: It has.
        """
        if max_tokens is None or len(text) <= max_tokens or self._longest is None:
            return
        characters, dropped = self._longest
        if len(text) <= max_tokens * characters:
            return
        least = -(-(len(text) - sum(map(text.count, dropped))) // characters)
        if least > max_tokens:
            raise TooManyTokens(least, max_tokens)

    @cached_property
    def _longest(self) -> tuple[int, str] | None:
        return None if self._backend is None else longest_token(self._backend)

    def is_plain(self, text: str) -> bool:
        """Whether nothing in `text` looks like a special token."""
        return self._pattern.search(text) is None

    def special_token_spellings(self, text: str) -> list[Place]:
        """Where `text` would be read as special tokens."""
        return [match.span() for match in self._pattern.finditer(text)]

    def split(self, written: WrittenText) -> list[str]:
        """The texts around the special tokens that the template wrote, and those tokens between."""
        text, parts, at, start = written.text, list[str](), 0, 0
        for plain_start, plain_stop in (*written.plain, (len(text),) * 2):
            for match in self._pattern.finditer(text, start, plain_start):
                parts += (text[at : match.start()], match[0])
                at = match.end()
            start = plain_stop
        return [*parts, text[at:]]


class _Remembered:
    """The ids of pieces of text, as bytes; those that were used longest ago are forgotten first."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._lock = threading.Lock()
        self._known: OrderedDict[str, bytes] = OrderedDict()
        self._size = 0

    def __call__(self, piece: str) -> bytes:
        try:
            self._known.move_to_end(piece)
            return self._known[piece]
        except KeyError:  # unknown, or another thread has just had it forgotten
            ids = self._encode(piece)
        size = _measure(piece, ids)
        if size <= _LARGEST_PIECE:
            with self._lock:
                self._size += size if piece not in self._known else 0
                self._known[piece] = ids
                while self._size > _REMEMBERED:
                    self._size -= _measure(*self._known.popitem(last=False))
        return ids


def _measure(piece: str, ids: bytes) -> int:
    return sys.getsizeof(piece) + sys.getsizeof(ids) + _ENTRY


class _TemplateMarks:
    """Encodes whole texts whose special tokens are replaced by marks of our own.

    Its tokenizer reads every special token of the vocabulary as text, and recognises four made-up
    ones: one for each way in which a special token may take the white space around it.
    """

    def __init__(self, backend: Any, specials: Mapping[str, int]) -> None:
        from tokenizers import AddedToken

        own = copy_tokenizer(backend)
        own.add_special_tokens(list(specials))  # known already: they become special, ids stay
        own.encode_special_tokens = True
        names = {
            (left, right): f"{_BOUNDARY}{int(left)}{int(right)}{_BOUNDARY}"
            for left, right in itertools.product((False, True), repeat=2)
        }
        own.add_tokens(
            [
                AddedToken(name, lstrip=left, rstrip=right, normalized=False, special=False)
                for (left, right), name in names.items()
            ]
        )
        added = backend.get_added_tokens_decoder().values()
        self._marks = {token.content: names[token.lstrip, token.rstrip] for token in added}
        self._mark_ids = frozenset(own.token_to_id(name) for name in names.values())
        self._encode = make_encoder(own)
        self._specials = specials

    def encode(self, parts: Sequence[str]) -> list[int]:
        """The ids of texts with special tokens between them."""
        text = "".join(self._marks[part] if at % 2 else part for at, part in enumerate(parts))
        special = iter([self._specials[token] for token in parts[1::2]])
        return [
            next(special) if token_id in self._mark_ids else token_id
            for token_id in array("i", self._encode(text))
        ]


#: Encoders are heavy, and several templates may share a tokenizer.
_ENCODERS: weakref.WeakKeyDictionary[Any, TextEncoder] = weakref.WeakKeyDictionary()


def get_encoder(tokenizer: PreTrainedTokenizerBase) -> TextEncoder:
    """The encoder of a tokenizer, made again where tokens were added since."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return TextEncoder(tokenizer)  # which would keep the tokenizer; and it is made at once
    known = _ENCODERS.get(tokenizer)
    if known is None or known.added != len(tokenizer.added_tokens_decoder):
        known = _ENCODERS[tokenizer] = TextEncoder(tokenizer)
    return known


def _encode_in_python(tokenizer: Any, text: str, **options: bool) -> bytes:
    return array("i", tokenizer.encode(text, add_special_tokens=False, **options)).tobytes()


def _is_special(token: Any) -> bool:
    is_text = not token.content.strip() or _MARKUP.fullmatch(token.content)
    return bool(token.special or not is_text)
