"""Other routers' policies, re-implemented from what their projects publish.

verl 0.9: a trajectory stays on its first replica; a new one goes to the fewest requests in flight,
ties by lot; the last 10,000 trajectories are remembered. The first verl with agent loops (`seeds`)
counted the trajectories placed on each replica and never counted one down.

smg 1.13 (the model gateway of the SGLang project), with the defaults of its command line: `random`,
`round_robin`, `power_of_two` (two by lot, the one that uses less of its KV cache, by the last
report; before the first, the one with fewer requests), `cache_aware` (shortest queue once the
queues differ by more than 64 and by half; else the replica with the longest match in a radix tree
of what went where, if that is more than 0.3 of the prompt; else the shortest queue), `least_load`
((waiting tokens + tokens sent since the last report) ÷ reported throughput + 0.15 s × k ÷ (1 − k)
for a KV cache used to the share k), `consistent_hashing` (150 points each, keyed by the
trajectory), `prefix_hash` (the same ring keyed by the first 256 tokens; past 1.25 times the mean
queue, the shortest) and `manual` (sticky, first placed by lot; its mode `min_load` places on the
shortest queue, ties by lot, which is verl's policy). `bucket` is for separate prefill workers and
has no place here. All of them see the engines' reports once a second here, more often than by their
default of 10 s.
"""

from __future__ import annotations

import bisect
import hashlib
import random  # noqa: TID251  (the peers draw lots; each run has a seed)
from collections import OrderedDict
from typing import TYPE_CHECKING

from rollout.engine.core import EngineLoad

if TYPE_CHECKING:
    from .workloads import Session

VERL_CACHE = 10_000
SMG_POINTS = 150
SMG_CACHE_THRESHOLD, SMG_ABS, SMG_REL = 0.3, 64, 1.5
SMG_KV_WEIGHT_S, SMG_THROUGHPUT = 0.15, 2000.0
SMG_PREFIX_TOKENS, SMG_LOAD_FACTOR = 256, 1.25


class Peer:
    """What they have in common: requests in flight and the last reports."""

    def __init__(self, replicas: int, seed: int) -> None:
        self.replicas = range(replicas)
        self.in_flight = [0] * replicas
        self.processed = [0] * replicas
        self.loads: list[EngineLoad] = []
        self.lot = random.Random(seed)

    def assign(self, now: float, session: Session, prompt_tokens: int, turn: int) -> int:
        """The replica of the next request, counted."""
        chosen = self.choose(session, prompt_tokens, turn)
        self.in_flight[chosen] += 1
        self.processed[chosen] += 1
        return chosen

    def choose(self, session: Session, prompt_tokens: int, turn: int) -> int:
        """The policy itself."""
        raise NotImplementedError

    def release(self, now: float, replica: int, session: Session, turn: int, cached: int) -> None:
        """One request fewer."""
        self.in_flight[replica] -= 1

    def report(self, now: float, loads: list[EngineLoad]) -> None:
        """Remember what the engines say."""
        self.loads = loads

    def forget(self, session: Session) -> None:
        """They are not told when a trajectory ends."""

    def shortest(self) -> int:
        """The shortest queue; among equal ones that which has served least."""
        return min(self.replicas, key=lambda i: (self.in_flight[i], self.processed[i], i))

    def any_of_fewest(self, counts: list[int]) -> int:
        """The replica with the smallest count, ties by lot."""
        fewest = min(counts)
        return self.lot.choice([i for i, count in enumerate(counts) if count == fewest])


class Verl(Peer):
    """verl 0.9: sticky, else least in flight."""

    def __init__(self, replicas: int, seed: int) -> None:
        super().__init__(replicas, seed)
        self.pins: OrderedDict[str, int] = OrderedDict()

    def choose(self, session: Session, prompt_tokens: int, turn: int) -> int:
        """A pinned trajectory never moves."""
        if session.name in self.pins:
            self.pins.move_to_end(session.name)
            return self.pins[session.name]
        chosen = self.pins[session.name] = self.place()
        if len(self.pins) > VERL_CACHE:
            self.pins.popitem(last=False)
        return chosen

    def place(self) -> int:
        """Where a new trajectory goes."""
        return self.any_of_fewest(self.in_flight)


class VerlSeeds(Verl):
    """The verl of the seeds: sticky, else fewest trajectories ever placed."""

    def __init__(self, replicas: int, seed: int) -> None:
        super().__init__(replicas, seed)
        self.placed = [0] * replicas

    def place(self) -> int:
        """Counts up only."""
        chosen = self.any_of_fewest(self.placed)
        self.placed[chosen] += 1
        return chosen


class SmgManual(Verl):
    """smg's `manual`: sticky, else by lot."""

    def place(self) -> int:
        """By lot."""
        return self.lot.randrange(len(self.replicas))


class SmgRandom(Peer):
    """smg's `random`."""

    def choose(self, session: Session, prompt_tokens: int, turn: int) -> int:
        """By lot."""
        return self.lot.randrange(len(self.replicas))


class SmgRoundRobin(Peer):
    """smg's `round_robin`."""

    def choose(self, session: Session, prompt_tokens: int, turn: int) -> int:
        """One after the other, whatever the trajectory."""
        return sum(self.processed) % len(self.replicas)


class SmgPowerOfTwo(Peer):
    """smg's `power_of_two`."""

    def choose(self, session: Session, prompt_tokens: int, turn: int) -> int:
        """The less used of two."""
        first, second = self.lot.sample(self.replicas, 2)
        if self.loads:
            return first if self.loads[first].kv_used <= self.loads[second].kv_used else second
        return first if self.in_flight[first] <= self.in_flight[second] else second


class SmgCacheAware(Peer):
    """smg's `cache_aware`; the prefixes are known here, so its tree is two dictionaries."""

    def __init__(self, replicas: int, seed: int) -> None:
        super().__init__(replicas, seed)
        self.prompts: dict[str, int] = {}
        self.histories: dict[str, tuple[int, int]] = {}

    def choose(self, session: Session, prompt_tokens: int, turn: int) -> int:
        """By match while the queues are balanced."""
        least, most = min(self.in_flight), max(self.in_flight)
        chosen = self.shortest()
        if not (most - least > SMG_ABS and most > SMG_REL * least):
            replica, matched = self.match(session)
            if matched > SMG_CACHE_THRESHOLD * prompt_tokens:
                chosen = replica
        self.prompts[session.group] = chosen
        self.histories[session.name] = (chosen, prompt_tokens)
        return chosen

    def match(self, session: Session) -> tuple[int, int]:
        """The replica whose requests share most with the trajectory, and how many tokens."""
        if session.name in self.histories:
            return self.histories[session.name]
        if session.group in self.prompts:
            return self.prompts[session.group], session.prompt_tokens
        return 0, 0


class SmgLeastLoad(Peer):
    """smg's `least_load`."""

    def __init__(self, replicas: int, seed: int) -> None:
        super().__init__(replicas, seed)
        self.sent = [0] * replicas
        self.throughput = [0.0] * replicas
        self.mean_sent = 0.0
        self.since = 0.0

    def choose(self, session: Session, prompt_tokens: int, turn: int) -> int:
        """The least score, or before any report the shortest queue."""
        if not self.loads:
            return min(self.replicas, key=self.in_flight.__getitem__)
        chosen = min(self.replicas, key=self.score)
        self.sent[chosen] += prompt_tokens
        self.mean_sent += (prompt_tokens - self.mean_sent) / 100
        return chosen

    def score(self, replica: int) -> float:
        """Estimated seconds; waiting tokens are the waiting requests' at the mean length."""
        load = self.loads[replica]
        used = min(load.kv_used, 0.999)
        tokens = load.queued * self.mean_sent + self.sent[replica]
        throughput = self.throughput[replica] or SMG_THROUGHPUT
        return tokens / throughput + SMG_KV_WEIGHT_S * used / (1 - used)

    def report(self, now: float, loads: list[EngineLoad]) -> None:
        """A report covers what was sent before it."""
        before = self.loads or [EngineLoad()] * len(loads)
        for i, (old, new) in enumerate(zip(before, loads, strict=True)):
            self.throughput[i] = (new.generated_tokens - old.generated_tokens) / (now - self.since)
            self.sent[i] = 0
        self.loads, self.since = loads, now


class SmgConsistentHashing(Peer):
    """smg's `consistent_hashing`, keyed by the trajectory."""

    def __init__(self, replicas: int, seed: int) -> None:
        super().__init__(replicas, seed)
        points = [(_point(f"{i}#{n}/{seed}"), i) for i in self.replicas for n in range(SMG_POINTS)]
        self.ring = sorted(points)

    def choose(self, session: Session, prompt_tokens: int, turn: int) -> int:
        """The next point clockwise."""
        return self.at(session.name)

    def at(self, key: str) -> int:
        """The replica that owns a key."""
        index = bisect.bisect_left(self.ring, (_point(key), -1))
        return self.ring[index % len(self.ring)][1]


class SmgPrefixHash(SmgConsistentHashing):
    """smg's `prefix_hash`: prompts here are at least as long as the hashed part."""

    def choose(self, session: Session, prompt_tokens: int, turn: int) -> int:
        """The owner of the prompt's beginning, unless it is overloaded."""
        owner = self.at(session.group)
        most = (sum(self.in_flight) + 1) / len(self.replicas) * SMG_LOAD_FACTOR
        if self.in_flight[owner] <= most:
            return owner
        light = [i for i in self.replicas if self.in_flight[i] <= most]
        return min(light, key=self.in_flight.__getitem__) if light else owner


def _point(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


PEERS: dict[str, type[Peer]] = {
    "verl": Verl,
    "verl_seeds": VerlSeeds,
    "smg_random": SmgRandom,
    "smg_round_robin": SmgRoundRobin,
    "smg_power_of_two": SmgPowerOfTwo,
    "smg_cache_aware": SmgCacheAware,
    "smg_least_load": SmgLeastLoad,
    "smg_consistent_hashing": SmgConsistentHashing,
    "smg_prefix_hash": SmgPrefixHash,
    "smg_manual": SmgManual,
}
