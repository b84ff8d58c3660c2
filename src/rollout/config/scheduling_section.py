"""What runs, how many at once, and what becomes of failures."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
from collections.abc import Collection, Iterator
from typing import ClassVar, Literal

import attrs

from rollout.config.checks import Count, Flag, Natural, Outcomes, Probability
from rollout.config.config_faults import Fault
from rollout.config.group_policy import GroupPolicy
from rollout.config.section_type import Section


@attrs.frozen(kw_only=True)
class SchedulingConfig(Section):
    """What runs, and how many at once."""

    section: ClassVar[str] = "scheduling"
    #: Members of a group: trajectories for each prompt.
    samples_per_prompt: Count = 1
    #: Members of a group when `generate` validates.
    validation_samples_per_prompt: Count = 1
    #: Trajectories that run at once; bounds the memory of a batch.
    max_in_flight: Count = 1024
    #: Runs fewer at once while engines are too full to remember the trajectories' prefixes.
    adaptive_admission: Flag = True
    #: How often a member is run again from its start after its engine failed, or its sandbox was
    #: lost.
    max_retries: Natural = 2
    #: A batch stops early, with an error, once more of its trajectories than this have failed and
    #: they are more than `max_failure_share` of it. None never stops it.
    max_failures: Natural | None = 16
    #: Share of a batch that may fail; both bounds must be passed.
    max_failure_share: Probability = 0.5
    #: At limits.batch_s: "partial" returns what there is; "drop" does too, with everything that
    #: was cut marked untrainable; "raise" ends with an error that carries it.
    on_deadline: Literal["partial", "drop", "raise"] = "partial"
    #: Makes Python's full garbage collections, which stop the loop, rare while a runtime is open,
    #: and leaves out of them what lived when it had opened. A collector that is disabled, or has
    #: thresholds of yours, stays as it is.
    freeze_heap: Flag = True
    #: Outcomes that a trainer may learn from, and for which rewards are computed.
    trainable: Outcomes = ("completed", "length", "limit")
    #: Of `collect` and `stream_groups`, where a call says nothing else.
    groups: GroupPolicy = attrs.field(factory=GroupPolicy)

    def relation_faults(self, sound: Collection[str]) -> Iterator[Fault]:
        """A group wants no more members than it has, and names what says which are taken."""
        groups, samples = self.groups, self.samples_per_prompt
        if "groups" not in sound or not isinstance(groups, GroupPolicy):
            return
        members = groups.members
        if "samples_per_prompt" in sound and isinstance(members, int) and members > samples:
            problem = f"expected at most scheduling.samples_per_prompt = {samples}"
            yield Fault("groups.members", problem, members)
        if callable(groups.accept):
            problem = "expected 'package.module:name' in a configuration"
            yield Fault("groups.accept", problem, groups.accept)

    def samples_of(self, *, validate: bool) -> int:
        """Members of a group, where the caller says nothing."""
        return self.validation_samples_per_prompt if validate else self.samples_per_prompt
