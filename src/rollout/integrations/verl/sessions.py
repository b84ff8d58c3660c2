"""What travels beside the requests of a trajectory: to verl's servers, and back from them.

A request of ours carries tokens and sampling, as every engine takes them. verl's client takes more
(images, keys of its servers' sampling), and tells more (global steps, experts, counters).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollout.seeds import split_session

#: Counters of speculative decoding, which verl adds up over the turns of a trajectory.
COUNTERS = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")


class Asked(msgspec.Struct, kw_only=True):
    """What is said to verl's client beside the tokens of a conversation's next request.

    Attributes:
        request_id: By which its load balancer keeps a trajectory on one server.
        sampling_params: In place of those that are made of the request; None: none.
        options: Further arguments of ``generate``: images, processor arguments, priority.
    """

    request_id: str
    sampling_params: Mapping[str, Any] | None = None
    options: dict[str, Any] = {}


class Told(msgspec.Struct, kw_only=True):
    """What verl's servers have said of a trajectory, over all of its requests.

    Attributes:
        answers: How many there were.
        num_preempted: How often its requests were preempted; -1 where no server says.
        routed_experts: Of the last answer that had any.
        extra_fields: Those of the first answer, with the last global step and sums of `COUNTERS`.
    """

    answers: int = 0
    num_preempted: int = -1
    routed_experts: Any = None
    extra_fields: dict[str, Any] = {}

    def note(self, output: Any) -> None:
        """One more answer, as verl's own tool agent takes it."""
        known = output.num_preempted
        if not self.answers:
            self.num_preempted = -1 if known is None else known
            self.extra_fields = dict(output.extra_fields)
        else:
            self.num_preempted += known or 0
            self._add(output.extra_fields)
        if output.routed_experts is not None:
            self.routed_experts = output.routed_experts
        self.answers += 1

    def _add(self, fields: Mapping[str, Any]) -> None:
        if fields.get("max_global_steps"):
            self.extra_fields["max_global_steps"] = fields["max_global_steps"]
        for name in COUNTERS:
            if name in fields and name in self.extra_fields:
                self.extra_fields[name] = int(self.extra_fields[name]) + int(fields[name])


class Session(msgspec.Struct, kw_only=True):
    """What is asked and told of one trajectory.

    Attributes:
        asked: What requests say, by the name of their conversation; that of the main one stands for
            those that have none.
        answers: The last `TokenOutput` of each conversation.
    """

    asked: dict[str, Asked] = {}
    told: Told = msgspec.field(default_factory=Told)
    answers: dict[str, Any] = {}


class Sessions:
    """What is asked and told, by trajectories."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def begin(self, trajectory: str, asked: Asked) -> Told:
        """A trajectory begins, or begins again: what its requests say unless they say more."""
        session = self._sessions[trajectory] = Session(asked={trajectory: asked})
        return session.told

    def ask(self, name: str, asked: Asked) -> None:
        """What the next requests of a conversation say."""
        self._of(name).asked[name] = asked

    def asked(self, name: str) -> Asked:
        """What is to be said with a request of a conversation."""
        asked, trajectory = self._of(name).asked, split_session(name)[0]
        return asked.get(name) or asked.get(trajectory) or Asked(request_id=trajectory)

    def tell(self, name: str, output: Any) -> None:
        """A conversation has an answer; nothing happens where its trajectory has ended."""
        session = self._sessions.get(split_session(name)[0])
        if session is None:
            return
        session.told.note(output)
        session.answers[name] = output

    def answer(self, name: str) -> Any:
        """The last answer of a conversation; None where it has none."""
        return self._of(name).answers.get(name)

    def told(self, trajectory: str) -> Told:
        """What has been said of a trajectory that nobody has ended."""
        session = self._sessions.get(trajectory)
        return Told() if session is None else session.told

    def end(self, trajectory: str) -> None:
        """Forget it."""
        self._sessions.pop(trajectory, None)

    def _of(self, name: str) -> Session:
        return self._sessions.setdefault(split_session(name)[0], Session())
