"""The tokens with which a model ends its turn, in the words of a chat template."""

from __future__ import annotations

import itertools
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from rollout.chat.placeholder_exchange import USER_MARKER
from rollout.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rollout.chat.continuation import ContinuationRenderer
    from rollout.chat.encoding import TextEncoder

#: Ends of a turn that some templates never write, or only of turns that call what they know.
OTHER_ENDS = ("<|eom_id|>",)


class EndTokens:
    """The special tokens that end a turn.

    Safe to use from several threads.

    Args:
        continuations: Knows what the template puts after a turn.
        encoder: Knows the special tokens.
        source: The template.
    """

    def __init__(
        self, continuations: ContinuationRenderer, encoder: TextEncoder, source: str
    ) -> None:
        self._continuations = continuations
        self._encoder = encoder
        self._source = source
        self._specials = frozenset(encoder.specials.values())
        self._turn_end_ids: dict[str, tuple[int, ...]] = {}

    def all(self) -> Iterable[int]:
        """Those of turns, in order, or else those that open the turns after."""
        return self._own or self._next_openings()

    def of_turn(self, *, is_call: bool) -> tuple[int, ...]:
        """The one that ends a turn with calls or without; none where nothing but the next does."""
        if not self._own:
            return ()
        ends = self._continuations.turn_ends()
        return tuple(self._find_specials(ends.called if is_call else ends.said)[:1])

    def past(self, ids: Sequence[int], turn_end: str, after: Sequence[int]) -> int:
        """How many of the first `ids` need not follow `after`, because they end it already.

        Only a special token tells that a turn is over; text before it (a space, in some
        templates) is then past, and what comes after it may or may not have been sampled.
        """
        end = self._end_ids(turn_end, ids)
        special = 0
        while special < len(end) and end[special] not in self._specials:
            special += 1
        tail = tuple(after[-len(end) :])
        for stop in range(len(end), special, -1):
            if tail[special - stop :] == end[special:stop]:
                return stop
        # The model may end a turn by another token than a template that continues (harmony).
        return special + 1 if turn_end and int(after[-1]) in self._own else 0

    @cached_property
    def _own(self) -> dict[int, None]:
        """Those that end a turn, in order; empty where only the next turn does."""
        try:
            ends = self._continuations.turn_ends()
        except TemplateError:  # a template without answers still renders prompts
            return {}
        texts = (ends.said, ends.called) if ends.said else ()
        found = [self._find_specials(text)[:1] for text in texts]
        known = self._encoder.specials
        others = [known[name] for name in OTHER_ENDS if name in self._source and name in known]
        return dict.fromkeys(itertools.chain(*found, others))

    def _next_openings(self) -> Iterator[int]:
        """The special tokens that open other turns, where nothing else ends the assistant's."""
        for role in ("user", "tool"):
            with suppress(TemplateError):
                added = self._continuations.render([{"role": role, "content": USER_MARKER}])
                yield from self._find_specials(added.written.text.partition(USER_MARKER)[0])[:1]

    def _find_specials(self, text: str) -> list[int]:
        return [token for token in self._encoder.encode(text) if token in self._specials]

    def _end_ids(self, turn_end: str, ids: Sequence[int]) -> tuple[int, ...]:
        """The ids of `turn_end` as far as `ids` start with them, at least one of them."""
        end = self._turn_end_ids.get(turn_end)
        if end is None:
            end = self._turn_end_ids[turn_end] = tuple(self._encoder.encode(turn_end))
        if tuple(ids[: len(end)]) == end:  # as a rule
            return end or tuple(ids[:1])
        length = 0
        while length < len(end) and length < len(ids) and ids[length] == end[length]:
            length += 1
        return end[:length] or tuple(ids[:1])
