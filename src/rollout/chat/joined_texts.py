"""Where a chat template looks at a text that it has made of a content and of something else.

A content tells what is asked of it (`traced_text`). What ``~``, ``%``, ``join``, ``tojson``, macros
and blocks make of it is another text, which tells nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jinja2 import nodes

#: Filters whose text is another one than the content in it.
_JOINING = frozenset(("join", "safe", "tojson"))
#: Filters that tell something of a text.
_MEASURING = frozenset(("count", "first", "last", "length", "list"))
#: Tests that tell of a kind of value.
_OF_KINDS = frozenset(
    (
        *("boolean", "defined", "iterable", "mapping", "none", "number", "sequence", "string"),
        "undefined",
    )
)


def within(node: nodes.Node, kind: type[Any]) -> list[Any]:
    """The nodes of a kind in it, itself included."""
    return [*([node] if isinstance(node, kind) else []), *node.find_all(kind)]


def looks_at_joined(tree: nodes.Template) -> bool:
    """Whether it measures, cuts or compares a text in which a content may be joined with others.

    What is searched for in such a text is no such look: its literals tell which contents matter.
    """
    return any(_Joined(tree).looks(tree))


class _Joined:
    """What of a template may hold a content, and what may be such a joined text."""

    def __init__(self, tree: nodes.Template) -> None:
        from jinja2 import nodes

        self._nodes = nodes
        self._macros = {each.name: each for each in tree.find_all(nodes.Macro)}
        self._given = {"content", "message", "messages"}
        #: Names, and attributes of namespaces.
        self._joined: set[tuple[str, str]] = set()
        for loop in tree.find_all(nodes.For):
            if any("messages" in name for name in self._names(loop.iter)):
                self._given.update(self._names(loop.target))
        for block in tree.find_all(nodes.AssignBlock):
            self._bind(block.target)
        assigned = [*tree.find_all(nodes.Assign)]
        known = -1
        while known != (known := len(self._joined) + len(self._given)):
            for each in assigned:
                if self._is_own_json(each):  # of what is no text
                    continue
                if self._is_joined(each.node):
                    self._bind(each.target)
                elif self._holds(each.node):
                    self._given.update(self._names(each.target))

    def looks(self, tree: nodes.Template) -> Iterator[bool]:
        """Each way in which one could be looked at, and whether one is."""
        nodes = self._nodes
        compared = [*tree.find_all(nodes.Compare)]
        blank = {  # what is blank is rendered always
            id(each.expr)
            for each in compared
            if all(isinstance(o.expr, nodes.Const) and o.expr.value in (0, 1) for o in each.ops)
        }
        for item in tree.find_all(nodes.Getitem):
            is_part = isinstance(item.arg, nodes.Slice) or not isinstance(item.node, nodes.Call)
            is_name = isinstance(item.arg, nodes.Const) and isinstance(item.arg.value, str)
            yield is_part and not is_name and self._is_joined(item.node)
        for measured in tree.find_all(nodes.Filter):
            is_measured = measured.name in _MEASURING and id(measured) not in blank
            yield is_measured and measured.node is not None and self._is_joined(measured.node)
        for test in tree.find_all(nodes.Test):
            yield test.name not in _OF_KINDS and self._is_joined(test.node)
        for compare in compared:
            sides = [compare.expr, *(o.expr for o in compare.ops if o.op not in ("in", "notin"))]
            is_blank = any(isinstance(s, nodes.Const) and not s.value for s in sides)
            yield len(sides) > 1 and not is_blank and any(map(self._is_joined, sides))

    def _is_joined(self, node: nodes.Node) -> bool:
        """Whether an expression may be a text in which a content is joined with others."""
        nodes = self._nodes
        match node:
            case nodes.Name():
                return ("", node.name) in self._joined
            case nodes.Concat():
                return any(map(self._holds, node.nodes))
            case nodes.Mod():
                return self._holds(node)
            case nodes.CondExpr():
                return any(map(self._is_joined, filter(None, (node.expr1, node.expr2))))
            case nodes.Add():
                return self._is_joined(node.left) or self._is_joined(node.right)
            case nodes.Getattr(node=nodes.Name()):
                return (node.node.name, node.attr) in self._joined
            case nodes.Filter():
                is_made = node.name in _JOINING and self._holds(node)
                return is_made or (node.node is not None and self._is_joined(node.node))
            case nodes.Call(node=nodes.Name()) if node.node.name in self._macros:
                return any(map(self._holds, node.args or self._macros[node.node.name].body))
            case nodes.Call(node=nodes.Getattr(attr="join")):
                return any(map(self._holds, node.args))
            case nodes.Call(node=nodes.Getattr()):
                return self._is_joined(node.node.node)
            case nodes.Getitem():
                return self._is_joined(node.node)
        return False

    def _holds(self, node: nodes.Node) -> bool:
        """Whether there may be a content in it."""
        nodes = self._nodes
        attributes = within(node, nodes.Getattr)
        held = {("", name) for name in self._names(node)}
        held.update((name, each.attr) for each in attributes for name in self._names(each.node))
        return (
            any(each.attr == "content" for each in attributes)
            or any(each.value == "content" for each in within(node, nodes.Const))
            or not held.isdisjoint(self._joined)
            or not self._given.isdisjoint(self._names(node))
        )

    def _is_own_json(self, assign: nodes.Assign) -> bool:
        """``x = x|tojson``, as templates do with a content that is no text."""
        node = assign.node
        is_json = isinstance(node, self._nodes.Filter) and node.name == "tojson"
        return is_json and self._names(node) == self._names(assign.target)

    def _bind(self, target: nodes.Node) -> None:
        nodes = self._nodes
        self._joined.update(("", name) for name in self._names(target))
        self._joined.update((each.name, each.attr) for each in within(target, nodes.NSRef))

    def _names(self, node: nodes.Node) -> set[str]:
        return {each.name for each in within(node, self._nodes.Name)}
