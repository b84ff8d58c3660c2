"""What becomes of what a trainer cannot represent: said once, and warned of once a kind."""

# Annotations stay evaluated: the fields are checked by them.
import logging
from collections.abc import Mapping
from typing import Literal

import attrs

from rollout.config.section_type import Section

logger = logging.getLogger("rollout.integrations")


@attrs.frozen(kw_only=True)
class RowPolicy(Section):
    """What becomes of what a trainer cannot represent. The defaults teach nothing wrong.

    "mask" keeps a row with mask 0: it takes its place, and nothing is learned from it.
    """

    #: No response tokens: "eos" makes it one end-of-sequence token with mask 0.
    empty: Literal["eos", "error"] = "eos"
    #: No reward. "group_mean": the mean of the trainable rows of its group that have one (0.0
    #: where none has), with mask 0, so that the group's mean stays where it is; "nan" with mask 0,
    #: for trainers that leave those out themselves; "zero": 0.0, and learned from like others;
    #: "trainer": NaN, and learned from, since the trainer gives rewards itself.
    unrewarded: Literal["group_mean", "nan", "zero", "trainer", "error"] = "group_mean"
    #: More tokens than the trainer has room for, where it says so. "mask" and "cut" both take
    #: tokens off the beginning of the prompt and off the end of the response; after "cut" the rest
    #: is learned from, although its tokens were sampled after a longer prompt.
    over_long: Literal["mask", "cut", "error"] = "mask"
    #: Tokens that a trainer may not learn from, such as those of a side conversation.
    untrainable: Literal["mask", "keep"] = "mask"
    #: Trajectories of several segments. "rows": one each; else a trajectory is one row: "last" the
    #: one in which its main conversation ends, "longest" the one with the most sampled tokens to
    #: learn from.
    segments: Literal["rows", "last", "longest", "error"] = "rows"


#: What is warned of, by the count that says how often it came up.
_WARNINGS = {
    "empty": "{count} of {total} rows have no response tokens: they become one end-of-sequence "
    "token with mask 0",
    "unrewarded": "{count} of {total} rows have no reward: RowPolicy.unrewarded = {unrewarded!r}",
    "over_long": "{count} of {total} rows are longer than the trainer takes: "
    "RowPolicy.over_long = {over_long!r}",
    "segments_left_out": "{count} segments have no row, beside {total} that have one: "
    "RowPolicy.segments = {segments!r}",
}


def warn_of(counts: Mapping[str, int], policy: RowPolicy, warned: set[str]) -> None:
    """Log what came up among the rows, where `warned` does not have it yet."""
    values = {field.name: getattr(policy, field.name) for field in attrs.fields(RowPolicy)}
    for kind, text in _WARNINGS.items():
        if counts[kind] and kind not in warned:
            warned.add(kind)
            logger.warning("%s", text.format(count=counts[kind], total=counts["total"], **values))
