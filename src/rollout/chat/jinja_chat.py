"""Runs chat templates by Jinja alone, in the dialect and the sandbox that transformers gives them.

A template is foreign code. It sees plain values only, can change none of them, and finds no way
from one to the interpreter.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from rollout.chat.traced_text import TracedText
from rollout.lazy import derives_from

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.parser import Parser
    from jinja2.runtime import Macro

#: Where messages keep their reasoning: templates read the first, gpt-oss's the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
#: Exact types that hold nothing else, and how a value of a subclass becomes one of them.
_SCALARS: Mapping[type, Callable[[Any], object]] = {
    str: str.__str__,
    bool: bool,
    int: int.__int__,
    float: float.__float__,
}
#: Compiled templates that are remembered; a process has one for each model, and their variants.
_MOST_TEMPLATES = 64


def render_chat(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """What the template `source` makes of a conversation.

    Keys of messages whose value is None are left out, and reasoning is found under each of its
    names.

    Raises:
        jinja2.TemplateError: The template is not valid, refuses the conversation, or asks for what
            the sandbox forbids. It may raise anything else.
    """
    return _compiled(source).render(
        messages=[_message(each) for each in messages],
        tools=plain(tools),
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **plain(variables),
    )


def plain(value: Any) -> Any:
    """A copy made of what JSON has, and of tuples; anything else becomes ``<name of its type>``.

    Dataclasses and pydantic's models become mappings, NumPy's scalars those of Python.
    """
    if value is None or type(value) in _SCALARS or type(value) is TracedText:
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    return _simplified(value)


def _simplified(value: Any) -> Any:
    for kind, simple in _SCALARS.items():
        if isinstance(value, kind):
            return simple(value)
    if derives_from(type(value), "numpy", "generic"):
        return plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return plain(dump())
    return f"<{type(value).__name__}>"


def _message(message: Mapping[str, Any]) -> dict[Any, Any]:
    kept = {plain(name): plain(value) for name, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in _REASONING if name in kept), None)
    if reasoning is None:
        return kept
    return {"thinking": reasoning, **kept, "reasoning_content": reasoning}


@lru_cache(_MOST_TEMPLATES)
def _compiled(source: str) -> Template:
    return _environment().from_string(source)


@lru_cache(1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_refuse,
        strftime_now=_now,
        dict=_Dict(),
        namespace=_SafeNamespace,
    )
    return environment


class _Generation(Extension):
    """``{% generation %}`` around what the assistant says, which changes no text."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        """A scope of its own, as a call block is."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Macro) -> str:
        return caller()


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter of this name writes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class _Dict:
    """``dict`` without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _SafeNamespace(Namespace):
    """Jinja's, without names that lead to Python's inside."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name in it
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace holds no name that begins with '_', such as {name!r}")
