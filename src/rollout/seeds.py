"""Seeds, request ids and names of conversations.

Seeds derive from what a generation is (run seed, step, prompt, member, turn), by a hash that is
the same in every process: never from Python's salted `hash`, never from the order of events.

The router, the engines and the events know conversations by their names: the main one by its
trajectory's, `step/uid/member`; one that was opened from it has `#path` after that. A uid may hold
any sign, a member and a path hold digits and dots.
"""

from __future__ import annotations

import hashlib
import secrets

import msgspec

#: Seeds fit a non-negative int64, which every engine accepts.
SEED_BITS = 63


def derive_seed(run_seed: int, *parts: int | str) -> int:
    """A seed in [0, 2**63) for `parts` of the run `run_seed`; equal parts give equal seeds."""
    text = "\x1f".join([str(part) for part in (run_seed, *parts)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def fresh_seed() -> int:
    """A seed for a run that named none."""
    return secrets.randbits(SEED_BITS)


class RequestIds:
    """Ids of engine requests: 31 hex digits, never used twice, none a prefix of another.

    Of 32 a string would take the next larger piece of memory.
    """

    def __init__(self) -> None:
        self._owner = secrets.token_hex(8)
        self._count = 0

    def new(self) -> str:
        """The next id."""
        self._count += 1
        return f"{self._owner}{self._count:015x}"


def session_name(step: int, uid: str, member: int, path: str = "") -> str:
    """The conversation `path` of a trajectory; "" is the main one."""
    main = f"{step}/{uid}/{member}"
    return f"{main}#{path}" if path else main


def split_session(name: str) -> tuple[str, str]:
    """The name of the trajectory's main conversation, and the path of this one."""
    before, slash, last = name.rpartition("/")
    member, _, path = last.partition("#")
    return f"{before}{slash}{member}", path


class Identity(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Which trajectory this is, and which conversation of it.

    Attributes:
        uid: The prompt's uid.
        group: Position of the prompt in the call.
        member: Position within the group.
        step: The trainer's step.
        run_seed: What all seeds of the run derive from.
        validate: Whether this is a validation rollout.
        path: The conversation: "" is the main one, "0" the first that was opened from it, "0.1" the
            second that was opened from that.
        number: Of the trajectory in the run's events; 0 while nobody reads them.
    """

    uid: str
    group: int
    member: int
    step: int
    run_seed: int
    validate: bool
    path: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"trajectory {self.session_id}"

    @property
    def session_id(self) -> str:
        """Names the conversation to the router and the engines; the main one, the trajectory."""
        return session_name(self.step, self.uid, self.member, self.path)

    def opened(self, number: int) -> Identity:
        """Of the conversation that is opened from this one as its `number`-th, counted from 0."""
        path = f"{self.path}.{number}" if self.path else str(number)
        return msgspec.structs.replace(self, path=path)

    def seed_of_turn(self, turn: int) -> int:
        """The seed of the conversation's generation number `turn`, the same in every run."""
        parts = (self.path, turn) if self.path else (turn,)
        return derive_seed(self.run_seed, self.step, self.uid, self.member, *parts)
