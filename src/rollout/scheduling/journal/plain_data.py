"""Values of users in a journal: what becomes of those that are no plain data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rollout.chat.plain_data import NotPlainError, show_value, to_plain, to_plain_items
from rollout.errors import JournalError

logger = logging.getLogger("rollout.journal")


def plain(value: Any, where: str) -> Any:
    """`to_plain`, refused as a journal refuses.

    Raises:
        JournalError: It holds what is no plain data; names where that stands.
    """
    try:
        return to_plain(value, where)
    except NotPlainError as error:
        raise JournalError(str(error)) from None


def plain_items(items: Mapping[Any, Any], where: str) -> dict[Any, Any]:
    """The same for the items of any mapping, which comes back as a dict.

    Raises:
        JournalError: One holds what is no plain data; names where that stands.
    """
    try:
        return to_plain_items(items, where)
    except NotPlainError as error:
        raise JournalError(str(error)) from None


class Unwritable:
    """What becomes of values that are no plain data.

    Attributes:
        is_text: They are written as text, with a warning; else they are refused.
    """

    def __init__(self, *, as_text: bool) -> None:
        self.is_text = as_text
        self._said: set[str] = set()

    def items(
        self, items: Any, where: str, *, are_numbers: bool = False
    ) -> tuple[dict[Any, Any], JournalError | None]:
        """The items of a mapping as they are written, and why others are not.

        Args:
            items: Mapping of keys to values.
            where: Names it.
            are_numbers: Whether values are numbers, and a float stands for one of them as text: who
                sums them up could do nothing with a text.
        """
        fault: JournalError | None = None
        try:
            return to_plain_items(items, where), None
        except NotPlainError:  # the loop below names it
            pass
        written: dict[Any, Any] = {}
        for key, value in items.items():
            try:
                to_plain_items({key: None}, where)
                written[key] = to_plain(value, f"{where}[{key!r}]")
            except NotPlainError as error:
                found = JournalError(str(error))
                fault = fault or found
                if self.is_text:
                    self._say(type(value).__qualname__, found)
                    text = show_value(value, float) if are_numbers else show_value(value)
                    written[show_value(key, str)] = text
        return written, None if self.is_text else fault

    def text_of(self, value: Any, where: str, error: JournalError) -> Any:
        """What is written of one that cannot be written itself; of a mapping, item by item.

        Args:
            error: Why.
        """
        if isinstance(value, Mapping):
            return self.items(value, where)[0]
        self._say(type(value).__qualname__, error)
        return show_value(value)

    def _say(self, kind: str, error: JournalError) -> None:
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s; it is written as text, and so are others of this type", error)
