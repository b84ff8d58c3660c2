"""The book of a call's groups: whatever happens, no prompt is lost and none is used twice."""

from __future__ import annotations

import random  # noqa: TID251  (what happens)
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollout import Outcome, Prompt, Trajectory
from rollout.agents.identity import Identity
from rollout.scheduling.ended_groups import Ended
from rollout.scheduling.group_book import GroupBook, StalenessBound, Wanted
from rollout.scheduling.pulled_group import GROUP_S, GroupMember, PulledGroup
from rollout.scheduling.selection import mean_length

MEMBERS = 3


class World:
    """A source, what is kept of it, and calls that end at any moment."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.pulled = 0
        self.kept: list[PulledGroup] = []
        self.ends: Counter[int] = Counter()
        self.version = 0

    def next_group(self) -> PulledGroup:
        if self.kept:
            return self.kept.pop(0)
        self.pulled += 1
        return PulledGroup(self.pulled - 1, Prompt(messages=[], uid=f"p{self.pulled - 1}"))

    def prepare(self, group: PulledGroup) -> None:
        if group.is_begun or group.waiting:
            return
        for member in range(MEMBERS):
            group.waiting.append(member_of(group, member))

    def call(self, wanted: Wanted, bound: StalenessBound | None, moves: int) -> None:
        book = GroupBook(wanted, bound, lambda: self.version)
        running: list[GroupMember] = []
        for _ in range(moves):
            if book.is_complete:
                break
            if bound is not None:
                under_way = len(book.open_groups) + book.counts["accepted"]
                assert under_way <= bound.room(self.version)
            move = self.dice.randrange(5)
            if move == 0 and book.wants_group:
                group = book.fitting(self.next_group().for_call(wanted.members))
                self.prepare(group)
                if book.adopt(group):
                    self.judge(book, group)
            elif move in (1, 2) and (member := book.next_member()) is not None:
                if self.dice.random() < 0.1:
                    book.put_back(member)
                else:
                    book.begun(member)
                    running.append(member)
            elif move == 3 and running:
                self.end(book, running.pop(self.dice.randrange(len(running))))
            elif move == 4 and wanted.groups is None and (taken := book.take()) is not None:
                self.ends[taken.number] += 1
                if bound is not None and taken.version is not None:
                    assert self.version - taken.version <= bound.most
                if bound is not None and book.consumed % bound.per_step == 0:
                    self.version += 1
        if wanted.groups is not None:
            taken_all = book.take_all()
            assert [g.number for g in taken_all] == sorted(g.number for g in taken_all)
            assert len(taken_all) <= wanted.groups
            self.ends.update(group.number for group in taken_all)
        for member in running:
            if member.group.is_settled:  # it was cancelled, and has ended
                member.group.forget(member)
        leaving = book.leave()
        assert {m for m in leaving.carried if wanted.surplus == "cancel"} == set()
        for member in leaving.carried:
            member.group.running.pop(member)
            member.group.waiting.appendleft(member)
        self.kept = sorted([*self.kept, *leaving.kept], key=lambda group: group.number)

    def end(self, book: GroupBook, member: GroupMember) -> None:
        group = member.group
        outcome = self.dice.choice([Outcome.COMPLETED] * 4 + [Outcome.FAILED, Outcome.DEADLINE])
        trajectory = Trajectory(
            uid=group.uid, group=0, member=member.identity.member, outcome=outcome
        )
        if outcome is Outcome.DEADLINE:
            trajectory.limit_source = GROUP_S
        if not book.ended(group, Ended(0, member, trajectory)):
            book.restart(member_of(group, member.identity.member))
        if not group.is_settled and book.is_whole(group):
            self.judge(book, group)

    def judge(self, book: GroupBook, group: PulledGroup) -> None:
        chosen = group.wanted(book.wanted.members)
        book.settle(group)
        if book.is_to_drop(group):
            book.drop(group)
            self.ends[group.number] += 1
            return
        numbers = [each.member.identity.member for each in chosen]
        assert numbers == sorted(set(numbers))
        is_accepted = self.dice.random() < 0.7
        book.judged(group, is_accepted=is_accepted)
        if not is_accepted:
            self.ends[group.number] += 1


def member_of(group: PulledGroup, member: int) -> GroupMember:
    identity = Identity(
        uid=group.uid, group=group.number, member=member, step=0, run_seed=0, validate=False
    )
    return GroupMember(group.prompt, identity, group=group)


WANTED = st.builds(
    Wanted,
    groups=st.none() | st.integers(1, 4),
    members=st.integers(1, MEMBERS),
    oversample=st.sampled_from([1.0, 1.5, 3.0]),
    surplus=st.sampled_from(["cancel", "carry"]),
    on_group_deadline=st.sampled_from(["keep", "drop", "refill"]),
    refills=st.integers(0, 2),
)

#: Of the weights, between two calls.
UPDATES = st.integers(0, 3)


@given(
    st.integers(0, 2**32),
    st.lists(st.tuples(WANTED, st.integers(0, 120)), min_size=1, max_size=5),
)
def test_book_random_calls_every_pulled_prompt_has_one_end_or_is_kept(
    seed: int, calls: list[tuple[Wanted, int]]
) -> None:
    world = World(seed)
    for wanted, moves in calls:
        world.call(wanted, None, moves)
        kept = Counter(group.number for group in world.kept)
        assert kept + world.ends == Counter(range(world.pulled))


@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(1, 4), st.integers(0, 400))
def test_book_staleness_of_what_is_taken_is_within_its_bound(
    seed: int, most: int, per_step: int, moves: int
) -> None:
    bound = StalenessBound(most=most, per_step=per_step, start=0)
    World(seed).call(Wanted(groups=None, members=MEMBERS), bound, moves)


@given(
    st.integers(0, 2**32),
    st.lists(
        st.tuples(
            WANTED, st.none() | st.integers(0, 3), st.integers(1, 4), st.integers(0, 120), UPDATES
        ),
        max_size=5,
    ),
)
def test_book_staleness_of_what_earlier_calls_left_is_within_its_bound(
    seed: int, calls: list[tuple[Wanted, int | None, int, int, int]]
) -> None:
    world = World(seed)
    for wanted, most, per_step, moves, updates in calls:
        bound = None
        if most is not None and wanted.groups is None:
            bound = StalenessBound(most=most, per_step=per_step, start=world.version)
        world.call(wanted, bound, moves)
        world.version += updates
        kept = Counter(group.number for group in world.kept)
        assert kept + world.ends == Counter(range(world.pulled))


def test_mean_length_counts_those_that_were_cut_as_longer() -> None:
    assert mean_length([(10, False), (20, False)]) == 15
    assert mean_length([(10, False), (10, True), (30, False)]) == 10 + 20 * 2 / 3
    assert mean_length([]) == 0
