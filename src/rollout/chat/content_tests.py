"""Which strings a chat template looks for in the contents of messages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rollout.chat.joined_texts import looks_at_joined, within

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jinja2 import nodes

#: Filters that make of a text what tells nobody what they were told.
_OPAQUE = frozenset(
    (
        *("abs", "batch", "center", "e", "escape", "filesizeformat", "float", "forceescape"),
        *("format", "groupby", "int", "pprint", "random", "round", "slice", "striptags"),
        *("title", "truncate", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr"),
    )
)
#: Tags of transformers that mark what an assistant says; they change no text.
_GENERATION_TAGS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")


def content_tests(source: str) -> tuple[str, ...] | None:
    """Strings whose presence in a content may change what the template does with it.

    These are the literals of ``'…' in x``, ``content == '…'``, ``x[:3] == '…'`` and the like, of
    method calls such as ``x.startswith('…')``, and of the filter ``replace``. Literals of white
    space only are left out: trimming is found by probing. What a macro or a block makes of a
    content is one too. None where nothing is known: the template cannot be read, or looks at
    contents in a way that is not seen.
    """
    from jinja2 import Environment, TemplateSyntaxError, nodes

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_GENERATION_TAGS.sub("", source))
    except TemplateSyntaxError:
        return None
    is_opaque = any(each.name in _OPAQUE for each in tree.find_all(nodes.Filter))
    if is_opaque or looks_at_joined(tree):
        return None
    texts = _literals(tree, _made_texts(tree))
    return tuple(sorted({text for text in texts if text.strip()}))


def _made_texts(tree: nodes.Template) -> frozenset[str]:
    """Names of macros, and of what they and blocks write, which may hold a content."""
    from jinja2 import nodes

    made = {macro.name for macro in tree.find_all(nodes.Macro)}
    given = {"content", "message", "messages"} | {
        name
        for loop in tree.find_all(nodes.For)
        if any("messages" in name.name for name in within(loop.iter, nodes.Name))
        for name in map(_name, within(loop.target, nodes.Name))
    }
    calls = {
        name
        for assign in tree.find_all(nodes.Assign)
        for call in within(assign.node, nodes.Call)
        if _name(call.node) in made and any(_holds(each, given) for each in call.args)
        for name in map(_name, within(assign.target, nodes.Name))
    }
    blocks = {_name(block.target) for block in tree.find_all(nodes.AssignBlock)}
    return frozenset(name for name in made | calls | blocks if name)


def _holds(node: nodes.Node, given: set[str | None]) -> bool:
    """Whether an expression is one of what may hold a content."""
    from jinja2 import nodes

    attributes = {each.attr for each in within(node, nodes.Getattr)}
    keys = {each.value for each in within(node, nodes.Const)}
    names = set(map(_name, within(node, nodes.Name)))
    return "content" in attributes | keys or not given.isdisjoint(names)


def _name(node: nodes.Node) -> str | None:
    """Of a variable."""
    from jinja2 import nodes

    return node.name if isinstance(node, nodes.Name) else None


def _literals(tree: nodes.Template, made: frozenset[str]) -> Iterator[str]:
    from jinja2 import nodes

    for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter)):
        for argument in _arguments(node, made):
            if isinstance(argument, nodes.Const) and isinstance(argument.value, str):
                yield argument.value


def _arguments(node: nodes.Node, made: frozenset[str]) -> list[nodes.Expr]:
    """What a comparison, call or filter holds against the text that it is about."""
    from jinja2 import nodes

    if isinstance(node, nodes.Compare):
        if any(operand.op in ("in", "notin") for operand in node.ops):
            return [node.expr]
        is_slice = isinstance(node.expr, nodes.Getitem) and isinstance(node.expr.arg, nodes.Slice)
        if is_slice or _is_content(node.expr, made):
            return [operand.expr for operand in node.ops]
    elif isinstance(node, nodes.Call):
        return node.args if isinstance(node.node, nodes.Getattr) else []
    elif isinstance(node, nodes.Filter):
        return node.args if node.name == "replace" else []
    return []


def _is_content(node: nodes.Expr, made: frozenset[str]) -> bool:
    """``content``, ``message.content`` or ``message['content']``, or what was made of one."""
    from jinja2 import nodes

    if isinstance(node, nodes.Filter | nodes.Call) and node.node is not None:
        return _is_content(node.node, made)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Name):
        return node.name == "content" or node.name in made
    return isinstance(node, nodes.Getattr) and node.attr == "content"
