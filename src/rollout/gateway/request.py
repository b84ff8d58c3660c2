"""One call of a client, and where it stands in the tree of its trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rollout.errors import TemplateError
from rollout.gateway.calls import GatewayError, refused_messages
from rollout.gateway.identity import Digest, keys_of, placed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.gateway.calls import GatewayCall, GivenMessage
    from rollout.gateway.identity import Placed
    from rollout.gateway.tree import Found, Node, Tree

ORDERS = ("system", "developer")


class Shape(msgspec.Struct, frozen=True):
    """What tells a conversation of one agent from that of another.

    Attributes:
        tools: Key of its tools.
        system: Keys of the system and developer messages that it begins with.
        opening: Keys of its messages up to the first that is none of these.
    """

    tools: bytes
    system: tuple[Digest, ...]
    opening: tuple[Digest, ...]


class Request:
    """A call, matched.

    Attributes:
        call: As the client made it.
        messages: The whole conversation.
        found: Its place.
        shape: What its conversation is known by.
    """

    def __init__(
        self, call: GatewayCall, messages: list[Placed], found: Found, shape: Shape
    ) -> None:
        self.call = call
        self.messages = messages
        self.found = found
        self.shape = shape

    @property
    def rest(self) -> list[Placed]:
        """The messages after the last generated turn."""
        return self.messages[self.found.depth :]


def matched(call: GatewayCall, tree: Tree, previous: Node | None = None) -> Request:
    """Find the place of a call.

    Args:
        call: What was asked.
        tree: Of its trajectory; the place is made there.
        previous: The generated turn that its messages follow, where they are only what is new.

    Raises:
        GatewayError: It has no messages, answers of tools that are missing or doubled, or arguments
            that nobody can compare.
    """
    given = call.messages if previous is None else _joined(previous, call)
    if not given:
        raise GatewayError(400, "invalid_request", "expected at least one message", call.field)
    try:
        messages = placed(given)
    except TemplateError as error:
        raise refused_messages(call, error) from error
    keys = keys_of(messages)
    head = len(_head_of([message for message, _ in messages]))
    opening = tuple(key.given for key in keys[: head + 1])
    shape = Shape(tree.tool_sets.key(call.tools), opening[:head], opening)
    found = tree.find(tree.root(shape.tools), keys, call.asker)
    if call.api == "responses":
        _keep(found.node, messages)
    return Request(call, messages, found, shape)


def _joined(previous: Node, call: GatewayCall) -> list[GivenMessage]:
    """The conversation up to a turn, then what is new; its own instructions replace others."""
    before: list[GivenMessage] = []
    node: Node | None = previous
    while node is not None:
        if node.message is not None:
            before.append(node.message)
        node = node.parent
    before.reverse()
    new = call.messages
    given = [each for each in new[:1] if each.is_instructions]
    kept = before[1:] if given and before and before[0].is_instructions else before
    return [*given, *kept, *new[len(given) :]]


def _keep(node: Node | None, messages: Sequence[Placed]) -> None:
    """Keep the messages of a path, for calls that name an answer instead of repeating them."""
    for message, _ in reversed(messages):
        if node is None or node.message is not None:
            return
        node.message = message
        node = node.parent


def _head_of(messages: Sequence[GivenMessage]) -> list[GivenMessage]:
    head = []
    for message in messages:
        if message.role not in ORDERS:
            break
        head.append(message)
    return head
