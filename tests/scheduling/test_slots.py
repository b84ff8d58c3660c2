"""Which slot a prompt takes, what it reuses there, and how single tokens are attended together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.engine.cores.transformers.attention import RUN_COST, StepSpan, split_runs
from rollout.engine.cores.transformers.kv import LayerCache
from rollout.engine.cores.transformers.slots import SlotChoice, SlotTable, common_prefix


def ids(*parts: tuple[int, int]) -> np.ndarray:
    """Each part (token, count), one after the other."""
    return np.concatenate([np.full(count, token, dtype=np.int32) for token, count in parts])


def hold(table: SlotTable, index: int, tokens: np.ndarray, session_id: str = "") -> None:
    """Let a request compute all of `tokens` in a slot and end."""
    slot = table.slots[index]
    table.take(slot, tokens, len(tokens), len(tokens), session_id)
    table.release(slot)


@given(
    a=st.lists(st.integers(0, 2), max_size=40),
    b=st.lists(st.integers(0, 2), max_size=40),
    shared=st.lists(st.integers(0, 2), max_size=40),
)
def test_common_prefix_is_the_longest_one(a: list[int], b: list[int], shared: list[int]) -> None:
    first, second = shared + a, shared + b
    expected = 0
    while expected < min(len(first), len(second)) and first[expected] == second[expected]:
        expected += 1
    found = common_prefix(np.array(first, dtype=np.int32), np.array(second, dtype=np.int32))
    assert found == expected


def test_place_next_turn_extends_the_slot_of_its_session() -> None:
    table = SlotTable(3)
    history = ids((5, 100))
    hold(table, 0, history, "other")
    hold(table, 1, history, "mine")
    prompt = ids((5, 100), (6, 10))
    assert table.place(prompt, "mine") == SlotChoice(table.slots[1], 100, 100, None)


def test_place_known_beginning_is_copied_into_the_emptiest_slot() -> None:
    table = SlotTable(3)
    hold(table, 0, ids((5, 100), (7, 50)), "one")
    prompt = ids((5, 100), (6, 10))
    assert table.place(prompt, "two") == SlotChoice(table.slots[1], 0, 100, table.slots[0])


def test_place_whole_prompt_known_leaves_its_last_token_to_compute() -> None:
    table = SlotTable(1)
    prompt = ids((5, 100))
    hold(table, 0, prompt)
    assert table.place(prompt, "") == SlotChoice(table.slots[0], 99, 99, None)


def test_place_without_an_empty_slot_takes_the_one_used_longest_ago() -> None:
    table = SlotTable(2)
    hold(table, 1, ids((8, 60)))
    hold(table, 0, ids((9, 60)))
    assert table.place(ids((5, 20)), "") == SlotChoice(table.slots[1], 0, 0, None)


def test_place_prompt_that_another_computes_right_now_waits_for_it() -> None:
    table = SlotTable(2)
    prompt = ids((5, 100), (6, 10))
    running = table.slots[0]
    table.take(running, ids((5, 100), (7, 50)), 150, 0, "")
    assert table.place(prompt, "") is None
    running.computed = 90
    assert table.place(prompt, "") == SlotChoice(table.slots[1], 0, 90, running)
    table.release(running)
    assert table.place(prompt, "") is not None


def test_place_short_common_beginning_is_computed_again() -> None:
    table = SlotTable(2)
    hold(table, 0, ids((5, 20), (7, 50)), "one")
    assert table.place(ids((5, 20), (6, 10)), "") == SlotChoice(table.slots[1], 0, 0, None)


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 3000)), max_size=40
    )  # (gap to the slot before, length)
)
def test_split_runs_covers_every_row_once_with_neighbouring_slots(rows: list) -> None:
    slots = np.cumsum([gap for gap, _ in rows]).tolist()
    singles = [StepSpan(slot, n - 1, n) for slot, (_, n) in zip(slots, rows, strict=True)]
    runs = split_runs(singles)
    assert [first for first, _ in runs] == [0, *[last for _, last in runs[:-1]]][: len(runs)]
    assert not singles or runs[-1][1] == len(singles)
    cost = 0
    for first, last in runs:
        taken = [span.slot for span in singles[first:last]]
        assert taken == list(range(taken[0], taken[0] + len(taken)))
        cost += max(span.stop for span in singles[first:last]) * (last - first) + RUN_COST
    assert cost <= sum(span.stop + RUN_COST for span in singles)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_cache_on_a_cpu_takes_memory_as_far_as_slots_are_used() -> None:
    shown = torch.zeros(1, 2, 1, 64, dtype=torch.bfloat16)
    before = resident_bytes()
    layer = LayerCache(128, 544, shown, shown)
    assert layer.keys.shape == (128, 2, 64, 544)
    assert layer.values.shape == (128, 2, 544, 64)
    assert layer.keys.dtype == layer.values.dtype == torch.bfloat16
    layer.keys[7, :, :, :3] = 1.5
    layer.values[7, :, :3] = 2.5
    assert resident_bytes() - before < 8 << 20  # of 34 MiB
    layer.grow(1088)
    layer.copy(7, 9, 0, 4)
    for slot in (7, 9):
        assert layer.keys[slot, 1, 5, :4].tolist() == [1.5, 1.5, 1.5, 0]
        assert layer.values[slot, 1, :4, 5].tolist() == [2.5, 2.5, 2.5, 0]
    assert not layer.keys[8].any()
    assert not layer.values[8].any()
