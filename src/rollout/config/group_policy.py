"""Which groups a call of `collect` or `stream_groups` wants, and what becomes of the others."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
import re
from typing import Annotated, ClassVar, Literal

import attrs

from rollout.config.checks import Count, Flag, Natural, Positive, Rule
from rollout.config.section_type import Section, annotations_of, given_fields
from rollout.worker_threads import is_async

_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def can_judge(accept: object) -> bool:
    """Whether it says at once whether a group is taken."""
    return callable(accept) and not is_async(accept)


Times = Annotated[float, Rule("a number from 1 to 1000", lambda x: 1 <= x <= 1000)]
Accept = Annotated[
    object,
    Rule(
        "'package.module:name', or in a call a function (no coroutine) of a Group that returns a "
        "bool",
        lambda value: bool(
            _REFERENCE.fullmatch(value) if isinstance(value, str) else can_judge(value)
        ),
    ),
]


@attrs.frozen(kw_only=True)
class GroupPolicy(Section):
    """Which groups `collect` and `stream_groups` want; ``docs/training.md`` explains it.

    What a call is given stands over what the configuration says.
    """

    section: ClassVar[str] = "scheduling.groups"
    #: Members wanted of the `samples_per_prompt` that are started: the first ones to end of those
    #: that a trainer may learn from (`scheduling.trainable`). The others are cancelled. Where too
    #: few are, members that met a deadline and then failed ones make up the number. None wants all.
    members: Count | None = None
    #: `collect` starts up to so many times the groups that it is to return, and takes the first
    #: ones to finish.
    oversample: Times = 1.0
    #: Says whether a finished group is taken: a function of a `Group` that returns a bool, such as
    #: ``rollout.scheduling:has_signal``. Other groups are refused, and further prompts take their
    #: place. It is called on the event loop, and must return at once. None takes all.
    accept: Accept | None = None
    #: Groups refused in a call of `collect`, or one after the other in a stream, before it ends
    #: with an error; those that "refill" replaces count, in a stream also those that "drop" leaves
    #: out. None never ends it.
    max_refused: Natural | None = 1024
    #: What becomes of groups that run when a call has what it wants: "cancel" ends them, and their
    #: prompts start again in the next call; "carry" keeps their tokens, and they continue there.
    surplus: Literal["cancel", "carry"] = "cancel"
    #: Seconds for a group, from its first member's admission; None leaves it to `limits`.
    group_s: Positive | None = None
    #: What then becomes of it: "keep" takes it with members cut off, "drop" leaves it out, and
    #: `collect` returns a group less; "refill" has another prompt take its place.
    on_group_deadline: Literal["keep", "drop", "refill"] = "keep"
    #: Restarts a member that failed (its engine, its tools, its agent), alone, up to
    #: `scheduling.max_retries` times.
    refill_failed: Flag = False

    def over(self, base: "GroupPolicy") -> "GroupPolicy":
        """This policy, with what it was not given taken from `base`."""
        given = given_fields(self)
        return GroupPolicy(
            **{
                name: getattr(self if name in given else base, name)
                for name in annotations_of(GroupPolicy)
            }
        )
