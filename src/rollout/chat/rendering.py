"""A chat template as a function: messages in, text out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.chat.messages import (
    TemplateMessage,
    as_parts,
    template_call,
    with_arguments_as_text,
    with_nine_letter_ids,
    with_results_as_user,
)
from rollout.errors import TemplateError
from rollout.utf8 import check_encodable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

    #: `render(messages, add_generation_prompt, tools=None)`.
    Render = Callable[..., str]


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """How a template wants tool calls and their results.

    Attributes:
        arguments_as_text: Arguments as a string of JSON, which it writes down as it is (DeepSeek);
            others want a mapping.
        nine_letter_ids: It refuses ids of calls that are not nine letters or digits (Mistral).
        results_as_user: It knows no tool results (Gemma 2 and 3): a user says them.
    """

    arguments_as_text: bool = False
    nine_letter_ids: bool = False
    results_as_user: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        """What is changed, in words."""
        known = (
            (self.arguments_as_text, "arguments as text"),
            (self.nine_letter_ids, "ids of nine letters"),
            (self.results_as_user, "results as words of the user"),
        )
        return tuple(note for is_so, note in known if is_so)

    def adapt(self, messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
        """`messages` as the template wants them."""
        adapted = list(messages)
        if self.arguments_as_text:
            adapted = with_arguments_as_text(adapted)
        if self.nine_letter_ids:
            adapted = with_nine_letter_ids(adapted)
        return with_results_as_user(adapted) if self.results_as_user else adapted


class Renderer:
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
        tools: Sequence[Mapping[str, Any]] | None = None,
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
        if any("tool_calls" in message or message["role"] == "tool" for message in messages):
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
            return _PROBE not in self._written([{"role": "user", "content": _PROBE}], True, None)
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
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        offered = [dict(tool) for tool in tools] if tools else self._no_tools
        return self._apply(messages, add_generation_prompt, offered)

    def _apply(
        self,
        messages: Sequence[TemplateMessage],
        add_generation_prompt: bool,
        tools: list[Any] | None,
    ) -> str:
        if self._takes_parts_only:
            messages = [{**each, "content": as_parts(each["content"])} for each in messages]
        return self._written(messages, add_generation_prompt, tools)

    def _written(
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

        Called directly it takes half the time of `apply_chat_template`, which first makes plain
        values of all that it is given: ours are, as a rule.
        """
        from transformers import PreTrainedTokenizerBase
        from transformers.utils import chat_template_utils

        usual = PreTrainedTokenizerBase.apply_chat_template
        is_usual = type(self._tokenizer).apply_chat_template is usual and _is_plain(self._variables)
        compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
        return compile_template(self.source) if is_usual and compile_template else None

    @cached_property
    def _variables(self) -> dict[str, Any]:
        return {**self._tokenizer.special_tokens_map, **self.kwargs}


def _is_plain(value: Any) -> bool:
    """Whether it is made of what JSON has, without the keys that transformers renames."""
    kind = type(value)
    if kind is dict:
        for key, each in value.items():
            if (type(each) is not str and not _is_plain(each)) or key in _RENAMED:
                return False
        return True
    return kind in _SCALARS or (kind is list and all(map(_is_plain, value)))


#: Exact types of values that hold nothing else.
_SCALARS = frozenset((str, int, float, bool, type(None)))
#: Where messages keep their reasoning: transformers puts it under each of these names.
_RENAMED = frozenset(("reasoning_content", "thinking", "reasoning"))
_USER: TemplateMessage = {"role": "user", "content": "q"}
_PROBE = "rolloutStringProbe"


def own_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's own template.

    Raises:
        TemplateError: It has none, or several.
    """
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


def around(text: str, places: Sequence[tuple[int, int]]) -> Iterator[str]:
    """The pieces of a text between these places."""
    at = 0
    for start, stop in places:
        yield text[at:start]
        at = stop
    yield text[at:]
