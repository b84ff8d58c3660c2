"""Which strings a chat template looks for in the contents of messages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jinja2 import nodes

#: Tags of transformers that mark what an assistant says; they change no text.
_GENERATION_TAGS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")


def content_tests(source: str) -> tuple[str, ...] | None:
    """Strings whose presence in a content may change what the template does with it.

    These are the literals of ``'…' in x``, ``content == '…'``, ``x[:3] == '…'`` and the like, of
    method calls such as ``x.startswith('…')``, and of the filter ``replace``. Literals of white
    space only are left out: trimming is found by probing. None where the template cannot be read:
    nothing is known.
    """
    from jinja2 import Environment, TemplateSyntaxError

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_GENERATION_TAGS.sub("", source))
    except TemplateSyntaxError:
        return None
    return tuple(sorted({text for text in _literals(tree) if text.strip()}))


def _literals(tree: nodes.Template) -> Iterator[str]:
    from jinja2 import nodes

    for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter)):
        for argument in _arguments(node):
            if isinstance(argument, nodes.Const) and isinstance(argument.value, str):
                yield argument.value


def _arguments(node: nodes.Node) -> list[nodes.Expr]:
    """What a comparison, call or filter holds against the text that it is about."""
    from jinja2 import nodes

    if isinstance(node, nodes.Compare):
        if any(operand.op in ("in", "notin") for operand in node.ops):
            return [node.expr]
        is_slice = isinstance(node.expr, nodes.Getitem) and isinstance(node.expr.arg, nodes.Slice)
        if is_slice or _is_content(node.expr):
            return [operand.expr for operand in node.ops]
    elif isinstance(node, nodes.Call):
        return node.args if isinstance(node.node, nodes.Getattr) else []
    elif isinstance(node, nodes.Filter):
        return node.args if node.name == "replace" else []
    return []


def _is_content(node: nodes.Expr) -> bool:
    """``content``, ``message.content`` or ``message['content']``."""
    from jinja2 import nodes

    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    name = getattr(node, "attr", None) or getattr(node, "name", None)
    return isinstance(node, nodes.Getattr | nodes.Name) and name == "content"
