"""What happens when a replica is lost."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
from typing import ClassVar, Literal

import attrs

from rollout.config.checks import Positive
from rollout.config.engines import EngineConfig
from rollout.config.section_type import Section, given_fields

#: In the place of `max_start_failures`.
NEVER_GIVEN_UP = (
    "unknown key: a replica is started again for as long as the run lasts; how long requests wait "
    "meanwhile is recovery.wait_s"
)


@attrs.frozen(kw_only=True)
class RecoveryConfig(Section):
    """What happens when a replica is lost; ``docs/engines.md`` shows each case in time."""

    section: ClassVar[str] = "recovery"
    #: Of its requests: "resume" continues elsewhere from the tokens that they have, "restart"
    #: restarts them, "fail" fails them (`scheduling.max_retries` may then run the member again).
    policy: Literal["resume", "restart", "fail"] = "resume"
    #: How long requests wait for a replica once none serves; left out, `engine.start_timeout_s`.
    #: None leaves it to `limits`.
    wait_s: Positive | None = 300.0
    #: Pause before the replica is restarted; doubled at each further death or failed start, up to
    #: 30 s. It is tried again for as long as the run lasts.
    backoff_s: Positive = 1.0

    @classmethod
    def instead_of(cls, key: str) -> str:
        """A replica is never given up."""
        return NEVER_GIVEN_UP if key == "max_start_failures" else ""

    def for_engine(self, engine: EngineConfig) -> "RecoveryConfig":
        """These settings, with what they were not given taken from the engine's."""
        given = given_fields(self)
        if "wait_s" in given:
            return self
        settled = attrs.evolve(self, wait_s=engine.start_timeout_s)
        object.__setattr__(settled, "_given", given)
        return settled
