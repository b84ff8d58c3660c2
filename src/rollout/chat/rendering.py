"""Messages to text, by a chat template, and which words of it are the messages' own.

`TemplateRenderer` has the template write a conversation. `render_escaped` finds in its text the
places that the conversation's authors and not the template wrote: spellings of special tokens there
stay text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from rollout.chat.encoding import Place, TextEncoder, WrittenText
from rollout.chat.messages import DIALECTS, TemplateMessage, as_parts, template_call
from rollout.errors import TemplateError
from rollout.utf8 import check_encodable, list_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[Mapping[str, Any]] | None
#: `render(messages, is_open, tools=None)`; an open text ends where the assistant's turn begins.
Render = Callable[..., str]

_USER: TemplateMessage = {"role": "user", "content": "q"}
_PROBE = "rolloutStringProbe"
#: Exact types of values that hold nothing else.
_SCALARS = frozenset((str, int, float, bool, type(None)))
#: Where messages keep their reasoning: transformers puts it under each of these names.
_RENAMED = frozenset(("reasoning_content", "thinking", "reasoning"))


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
        self, messages: Sequence[TemplateMessage], is_open: bool, tools: Tools = None
    ) -> str:
        """The text of a conversation; tool calls and results in the template's own dialect.

        Raises:
            TemplateError: The template refuses the messages.
        """
        return self._render(self.adapted(messages), is_open, tools)

    def adapted(self, messages: Sequence[TemplateMessage]) -> Sequence[TemplateMessage]:
        """`messages` with tool calls and results as the template wants them."""
        for message in messages:
            if "tool_calls" in message or message["role"] == "tool":
                return _adapt(messages, self.dialect)
        return messages

    @cached_property
    def dialect(self) -> tuple[str, ...]:
        """Which of `DIALECTS` it wants, found by showing the template a call and its result."""
        as_text, *others = ((name,) for name in DIALECTS)
        tried = [(*own, *other) for other in ((), *others) for own in ((), as_text)]
        return next((each for each in tried if self._takes_calls(each)), ())

    def _takes_calls(self, dialect: Iterable[str]) -> bool:
        """Whether it takes a call and its result so, and writes no arguments as Python's."""
        call = template_call("call_0", "tool", {"rolloutKey": "rolloutValue"})
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "content": "r", "name": "tool", "tool_call_id": "call_0"}
        text = _try(self._render, _adapt([_USER, calling, result], dialect), True)
        return bool(text) and str(call["function"]["arguments"]) not in text

    @cached_property
    def _takes_parts_only(self) -> bool:
        """Whether it leaves out a content that is a string (LLaVA): as parts it writes it."""
        probe = [{"role": "user", "content": _PROBE}]
        return self._reads_media and _PROBE not in _try(self._apply, probe, True, None)

    @cached_property
    def _no_tools(self) -> list[Any] | None:
        """What stands for no tools: some templates iterate over them without checking (Hermes)."""
        needs_list = not _try(self._apply, [_USER], True, None)
        return [] if needs_list and _try(self._apply, [_USER], True, []) else None

    def _render(
        self, messages: Sequence[TemplateMessage], is_open: bool, tools: Tools = None
    ) -> str:
        offered = [dict(tool) for tool in tools] if tools else self._no_tools
        if self._takes_parts_only:
            messages = [{**each, "content": as_parts(each["content"])} for each in messages]
        return self._apply(messages, is_open, offered)

    def _apply(
        self, messages: Sequence[TemplateMessage], is_open: bool, tools: list[Any] | None
    ) -> str:
        try:
            if self._compiled is not None and _is_plain(messages) and _is_plain(tools):
                text = self._compiled.render(
                    messages=messages,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=is_open,
                    **self._variables,
                )
            else:
                text = self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=tools,
                    chat_template=self.source,
                    add_generation_prompt=is_open,
                    tokenize=False,
                    **self.kwargs,
                )
        except Exception as error:  # a template is foreign code and raises what it likes
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateError(f"the chat template refuses [{roles}]: {error}") from error
        check_encodable(text)
        return str(text)

    @cached_property
    def _compiled(self) -> Any:
        """The template as transformers compiles it; None where the tokenizer has a way of its own.

        Called directly it takes a third of the time of `apply_chat_template`, which first makes
        plain values of all its arguments: ours are, as a rule. Its globals are copied at every
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


def _adapt(messages: Sequence[TemplateMessage], dialect: Iterable[str]) -> list[TemplateMessage]:
    adapted = list(messages)
    for name in dialect:
        adapted = DIALECTS[name](adapted)
    return adapted


def _try(render: Callable[..., str], *conversation: Any) -> str:
    """What a template makes of a conversation; "" where it refuses that."""
    try:
        return render(*conversation)
    except TemplateError:
        return ""


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

    Raises:
        TemplateError: The template refuses the messages.
        TooManyTokens: The text certainly has more than `max_tokens`.
    """
    text = render(messages, tools)
    encoder.refuse_beyond(max_tokens, text)
    if not encoder.pattern.search("\0".join(list_texts([messages, tools]))):
        return WrittenText(text)
    word = "rolloutSpecialToken"  # letters, which templates leave as they are
    while word in text:
        word += "a"
    spelled: dict[str, int] = {}  # equal texts get equal words: templates compare and look up

    def mark(text: str, *, left_out: Container[str] = (), is_sorted: bool = False) -> str:
        end = len(text.rstrip())  # templates look for tokens at the start or end of a content

        def add_word(match: re.Match[str]) -> str:
            token = match[0]
            if token in left_out:
                return token
            number = spelled.setdefault(token, len(spelled))
            is_last = match.end() >= end and not is_sorted
            return f"{word}{number}B{token}" if is_last else f"{token}{word}{number}A"

        return encoder.pattern.sub(add_word, text)

    for is_sorted in (False, True):  # a template may sort names, by how they begin
        change = partial(mark, is_sorted=is_sorted)
        own = partial(change, left_out=encoder.tags)
        marked = [
            map_texts(each, own if each["role"] == "assistant" else change) for each in messages
        ]
        offered = None if tools is None else map_texts(list(tools), change)
        if not spelled:
            return WrittenText(text)
        written = _remove_marks(render(marked, offered), word, [*spelled])
        if written.text == text:
            break
    return written


def _remove_marks(text: str, word: str, spelled: Sequence[str]) -> WrittenText:
    """The text without the words before ("B") and after ("A") the tokens, which stay plain.

    A template may have taken a token out, or changed it: what stands there then is not the token.
    """
    pieces, plain = list[str](), list[Place]()
    at = length = 0
    for match in re.finditer(f"{word}([0-9]+)([AB])", text):
        before, at, token = text[at : match.start()], match.end(), spelled[int(match[1])]
        pieces.append(before)
        length += len(before)
        if match[2] == "B" and text.startswith(token, at):
            plain.append((length, length + len(token)))
        elif match[2] == "A" and before.endswith(token):
            plain.append((length - len(token), length))
    return WrittenText("".join((*pieces, text[at:])), tuple(plain))


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with another text for each that is in it, keys of mappings included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_texts(key, change): map_texts(item, change) for key, item in value.items()}
    return [map_texts(each, change) for each in value] if isinstance(value, list | tuple) else value
