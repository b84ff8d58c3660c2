"""The groups of a call: whatever happens, no prompt is lost and none is used twice."""

from __future__ import annotations

import random  # noqa: TID251  (what happens)
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollout import GroupPolicy, Outcome, Prompt, Trajectory
from rollout.scheduling.groups import Groups, Staleness
from rollout.scheduling.members import GROUP_S, Member, MemberGroup
from rollout.seeds import Identity

MEMBERS = 3
#: How many groups a call wants, how many members of each, and its policy.
Wanted = tuple[int | None, int, GroupPolicy]


class World:
    """A source, what is kept of it, and calls that end at any moment."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.pulled = 0
        self.kept: list[MemberGroup] = []
        self.ends: Counter[int] = Counter()
        self.version = 0

    def next_group(self) -> MemberGroup:
        if self.kept:
            return self.kept.pop(0)
        self.pulled += 1
        return MemberGroup(self.pulled - 1, Prompt(messages=[], uid=f"p{self.pulled - 1}"))

    def prepare(self, group: MemberGroup) -> None:
        if group.is_begun or group.waiting:
            return
        for member in range(MEMBERS):
            group.waiting.append(member_of(group, member))

    def call(self, wanted: Wanted, moves: int, bound: Staleness | None = None) -> None:
        how_many, members, policy = wanted
        groups = Groups(
            how_many,
            members,
            policy,
            staleness=bound,
            version=lambda: self.version,
        )
        running: list[Member] = []
        for _ in range(moves):
            if groups.is_done:
                break
            if bound is not None:
                under_way = len(groups.open) + groups.counts["accepted"]
                assert under_way <= bound.count_allowed(self.version)
            move = self.dice.randrange(5)
            if move == 0 and groups.wants_group:
                group = groups.refresh(self.next_group())
                self.prepare(group)
                groups.adopt(group)
                if groups.can_judge(group):
                    self.judge(groups, group)
            elif move in (1, 2) and (member := groups.next_member()) is not None:
                if self.dice.random() < 0.9:  # else it got no slot
                    groups.begin(member)
                    running.append(member)
            elif move == 3 and running:
                self.end(groups, running.pop(self.dice.randrange(len(running))))
            elif move == 4 and (taken := groups.take()) is not None:
                self.ends[taken.number] += 1
                if bound is not None and taken.version is not None:
                    assert self.version - taken.version <= bound.most
                if bound is not None and groups.consumed % bound.per_step == 0:
                    self.version += 1
        if how_many is not None:
            while (taken := groups.take()) is not None:
                self.ends[taken.number] += 1
            assert groups.consumed <= how_many
        for member in running:
            if member.group.is_complete:  # it was cancelled, and has ended
                member.group.forget(member)
        left = groups.take_leftovers()
        assert {m for m in left.carried if policy.surplus == "cancel"} == set()
        for member in left.carried:
            member.group.running.remove(member)
            member.group.waiting.insert(0, member)
        self.kept = sorted([*self.kept, *left.groups], key=lambda group: group.number)

    def end(self, groups: Groups, member: Member) -> None:
        group = member.group
        outcome = self.dice.choice([Outcome.COMPLETED] * 4 + [Outcome.FAILED, Outcome.DEADLINE])
        trajectory = Trajectory(
            uid=group.uid, group=0, member=member.identity.member, outcome=outcome
        )
        if outcome is Outcome.DEADLINE:
            trajectory.limit_source = GROUP_S
        groups.record_end(member, trajectory)
        if not group.is_complete and groups.can_judge(group):
            self.judge(groups, group)

    def judge(self, groups: Groups, group: MemberGroup) -> None:
        chosen = group.choose(groups.members)
        groups.close_group(group)
        if groups.is_to_drop(group):
            is_replaced = groups.policy.on_group_deadline == "refill"
            groups.settle(group, "replaced" if is_replaced else "dropped")
            self.ends[group.number] += 1
            return
        numbers = [member.identity.member for member in chosen]
        assert numbers == sorted(set(numbers))
        if self.dice.random() < 0.7:
            groups.settle(group, "accepted")
        else:
            groups.settle(group, "refused")
            self.ends[group.number] += 1


def member_of(group: MemberGroup, member: int) -> Member:
    identity = Identity(
        uid=group.uid, group=group.number, member=member, step=0, run_seed=0, validate=False
    )
    return Member(group.prompt, identity, group)


WANTED = st.tuples(
    st.none() | st.integers(1, 4),
    st.integers(1, MEMBERS),
    st.builds(
        GroupPolicy,
        oversample=st.sampled_from([1.0, 1.5, 3.0]),
        surplus=st.sampled_from(["cancel", "carry"]),
        on_group_deadline=st.sampled_from(["keep", "drop", "refill"]),
    ),
)

#: Of the weights, between two calls.
UPDATES = st.integers(0, 3)


@given(
    st.integers(0, 2**32),
    st.lists(
        st.tuples(
            WANTED, st.none() | st.integers(0, 3), st.integers(1, 4), st.integers(0, 200), UPDATES
        ),
        max_size=5,
    ),
)
def test_groups_random_calls_lose_no_prompt_and_give_none_that_is_too_old(
    seed: int, calls: list[tuple[Wanted, int | None, int, int, int]]
) -> None:
    world = World(seed)
    for wanted, most, per_step, moves, updates in calls:
        bound = None
        if most is not None and wanted[0] is None:
            bound = Staleness(most=most, per_step=per_step, start=world.version)
        world.call(wanted, moves, bound)
        world.version += updates
        kept = Counter(group.number for group in world.kept)
        assert kept + world.ends == Counter(range(world.pulled))
