"""When an engine hands over what it has sampled, where it can do so between its steps only.

Loaded in engine processes: imports the standard library only.
"""

from __future__ import annotations

#: The next step may take this much longer than the longest recent one.
SLACK = 1.25
#: Of the interval: what is left is for the way from the step to the connection.
AIM = 0.8
#: What a long step counts at each one after it: a prefill is remembered for some twenty steps.
FORGETTING = 0.9


class StreamPacer:
    """The bound on how long a sampled token waits, kept by what steps have taken so far.

    Args:
        interval_s: The bound.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = AIM * interval_s
        self._step_s = 0.0

    def note_step(self, seconds: float) -> None:
        """A step has taken so long, from one chance to hand tokens over to the next."""
        self._step_s = max(min(seconds, self._interval_s), FORGETTING * self._step_s)

    def is_due(self, waited_s: float) -> bool:
        """Whether tokens that may have waited so long would wait too long for the next chance."""
        return waited_s + SLACK * self._step_s >= self._interval_s


class DecodeSpeed:
    """How fast an engine decodes that is asked for chunks of a number of tokens.

    Args:
        interval_s: How long a sampled token may wait for others.
        most: Tokens of a chunk at most.
    """

    def __init__(self, interval_s: float, most: int) -> None:
        self._interval_s = AIM * interval_s
        self._most = most
        self._token_s = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """So many tokens of one request came within so many seconds."""
        if tokens:
            self._token_s = max(seconds / tokens, FORGETTING * self._token_s)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk that an engine half as fast would sample in time; 1 while unknown."""
        if not self._token_s:
            return 1
        return max(1, min(self._most, int(self._interval_s / (2 * self._token_s))))
