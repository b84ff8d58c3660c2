"""What a recorder keeps: calls of a runtime, requests of agents, deliveries."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollout.seeds import session_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.watched_tools import Use
    from rollout.batch import RolloutBatch
    from rollout.chat.trajectory import Trajectory
    from rollout.engine.core import SamplingParams
    from rollout.engine.pool.generation import Generation
    from rollout.tensor_layout import Layout, Trim
    from rollout.types import Prompt


@dataclass(eq=False, slots=True)
class GenerationRecord:
    """One generation as the agent had it.

    Attributes:
        generation: What the agent was given; it must not change any more.
        prompt_ids: int32 little-endian, packed.
        sampling: How the driver asked for it to be sampled.
        started, ended: Clock times.
        failure: Name of what it raised; empty where it returned. "Cancelled" for a cancellation.
        is_engine_failure: Whether that was an `EngineError`.
    """

    generation: Generation
    prompt_ids: bytes
    sampling: SamplingParams
    started: float
    ended: float | None = None
    failure: str = ""
    is_engine_failure: bool = False

    @property
    def has_output(self) -> bool:
        """Whether it becomes a span of the transcript."""
        return bool(self.generation.ids or self.generation.finish_reason not in (None, "abort"))


@dataclass(eq=False, slots=True)
class CallRecord:
    """One call of a runtime.

    Attributes:
        kind: "generate", "stream", "collect" or "stream_groups".
        samples: Members of each prompt.
        is_validation: Whether `validation_sampling` holds.
        layout, trim: Of the tensors that it was to return.
        started, ended: Clock times; the end of a stream is when its block was left.
        failure: Name of what it raised; empty where it returned, "Cancelled" for a cancellation.
        batch: What it returned, or what its error carried as `partial`.
        received: What came out of a stream.
        is_complete: Whether everything was delivered: it returned, or the stream came to its end.
        is_refused: It raised before any work.
        generations: Those of each trajectory, by session id, in the order of their beginning.
        uses: Tools and simulated users of each trajectory, by (uid, member).
        groups, wanted_members: How many groups `collect` was to return, and members of each.
        may_carry: Whether its trajectories may be carried to the next call.
        cancelled_at: Clock time at which the harness cancelled its caller.
        stopped_at: Clock time at which `cancel` was called for all that there is.
    """

    kind: str
    prompts: Sequence[Prompt]
    step: int
    samples: int
    is_validation: bool
    started: float
    ended: float | None = None
    layout: Layout = "padded"
    trim: Trim = False
    failure: str = ""
    batch: RolloutBatch | None = None
    received: list[Trajectory] = field(default_factory=list)
    is_complete: bool = False
    is_refused: bool = False
    generations: dict[str, list[GenerationRecord]] = field(
        default_factory=lambda: defaultdict(list)
    )
    uses: dict[tuple[str, int], list[Use]] = field(default_factory=lambda: defaultdict(list))
    groups: int = 0
    wanted_members: int = 0
    may_carry: bool = False
    cancelled_at: float | None = None
    stopped_at: float | None = None

    @property
    def is_of_groups(self) -> bool:
        """Whether it chose among what it ran."""
        return self.kind in ("collect", "stream_groups")

    @property
    def members(self) -> int:
        """Trajectories that it was accepted for; of groups none are known beforehand."""
        return 0 if self.is_refused else len(self.prompts) * self.samples

    @property
    def delivered(self) -> list[Trajectory]:
        """Trajectories that its caller got hold of."""
        return self.received if self.batch is None else self.batch.trajectories

    def session_of(self, trajectory: Trajectory) -> str:
        """The session id of one of its trajectories."""
        return session_name(self.step, trajectory.uid, trajectory.member)

    def all_generations(self) -> list[GenerationRecord]:
        """The generations of all its trajectories."""
        return [record for several in self.generations.values() for record in several]

    def all_uses(self) -> list[Use]:
        """The tools and simulated users of all its trajectories."""
        return [use for several in self.uses.values() for use in several]


def name_of(error: BaseException) -> str:
    """The name under which a failure is recorded; every backend's cancellation is "Cancelled"."""
    name: Any = type(error).__name__
    return "Cancelled" if name in ("Cancelled", "CancelledError") else str(name)
