"""How old the weights may be that sampled what a stream of groups gives out."""

from __future__ import annotations

import attrs

#: A consumer that waits for so long, and for itself, is told why.
HINT_S = 5.0
WAITS_FOR_VERSION = (
    "stream_groups waits for update_weights: %d groups were taken, and further ones would be older "
    "than max_staleness allows. Call update_weights, with a version that is one higher, after each "
    "groups_per_step groups"
)
#: Said once in a call.
IS_LATE = (
    "stream_groups: a group was taken %d versions after its first tokens, max_staleness = %d: that "
    "holds where the version rises by one after each %d groups, and not more often"
)


@attrs.frozen(kw_only=True)
class StalenessBound:
    """How old the weights of a group's first token may be when its consumer takes it.

    Attributes:
        most: Versions.
        per_step: Groups that the consumer takes for each version.
        start: The version at the beginning.
    """

    most: int
    per_step: int
    start: int

    def room(self, version: int) -> int:
        """Groups that may have been taken, be ready, or be under way, in all.

        With one more, the last of them would be taken after more than `most` updates.
        """
        return (self.most + 1 + version - self.start) * self.per_step

    def taken_by(self, version: int) -> int:
        """Groups that the consumer takes until the end of that version."""
        return (version + 1 - self.start) * self.per_step

    def due(self, version: int) -> int:
        """The last version at which a group may be taken that began with that one."""
        return version + self.most
