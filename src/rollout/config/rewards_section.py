"""How reward functions are called."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
from typing import ClassVar

import attrs

from rollout.config.checks import Natural, Positive
from rollout.config.section_type import Section


@attrs.frozen(kw_only=True)
class RewardsConfig(Section):
    """How reward functions are called; ``docs/rewards.md`` explains it. `limits.reward_s` bounds
    each call.
    """

    section: ClassVar[str] = "rewards"
    #: Child processes in which the functions are called, each one call at a time: for code that
    #: holds the interpreter lock, crashes or does not return. 0 calls them in this process, sync
    #: ones in threads and async ones on the event loop.
    processes: Natural = 0
    #: How often a call that raised, was not back in time, lost its process, or returned what is no
    #: reward is made again.
    retries: Natural = 0
    #: Pause before the first of them; doubled at each further one, up to 30 s.
    backoff_s: Positive = 0.5
