"""What TRL asks a rollout function for, as groups of prompts; needs no TRL."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.errors import PromptError
from rollout.integrations.trl.prompt_groups import dataset_rows, groups_of, prompt_of


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@given(
    st.lists(st.sampled_from("ab"), min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 4)
)
def test_trl_groups_of_all_processes_cover_each_member_once(
    texts: list[str], size: int, processes: int
) -> None:
    rows = [(group, text) for group, text in enumerate(texts) for _ in range(size)]
    rows = rows[: len(rows) - len(rows) % processes]  # each process has as many
    share = len(rows) // processes
    found = []
    for process in range(processes):
        own = [says(text) for _, text in rows[process * share : (process + 1) * share]]
        groups = groups_of(own, size, process)
        assert [row for each in groups for row in range(each.first, each.first + each.count)] == [
            *range(share)
        ]
        found += groups
    members = [(each.number, each.member + at) for each in found for at in range(each.count)]
    assert members == [divmod(row, size) for row in range(len(rows))]
    assert len({each.name for each in found}) == len(found)  # or two would have equal seeds


def test_trl_prompts_that_differ_within_a_group_are_groups_of_their_own() -> None:
    groups = groups_of([says("a"), says("a"), says("b")], 3, 0)
    assert [(each.first, each.count, each.name) for each in groups] == [(0, 2, "0"), (2, 1, "0.2")]


def test_trl_row_becomes_a_prompt_without_the_keys_that_arrow_adds() -> None:
    call = {"function": {"name": "look", "arguments": {"at": "x", "key": None}}}
    messages = [
        {"role": "user", "content": "hi", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    columns = {"prompt": messages, "agent_name": "single_turn", "uid": "theirs", "level": 3}
    made = prompt_of(messages, {**columns, "sampling": {"top_k": 2}}, "0.0-1", {"top_k": -1})
    assert made.messages[1]["tool_calls"][0]["function"]["arguments"] == {"at": "x"}  # type: ignore[index]
    assert "tool_calls" not in made.messages[0]
    assert (made.uid, made.agent_name, made.sampling) == ("0.0-1", "single_turn", {"top_k": 2})
    assert made.extra == {"uid": "theirs", "level": 3}


def test_trl_row_with_unusable_columns_names_each() -> None:
    with pytest.raises(PromptError) as caught:
        prompt_of(says("a"), {"tools": 3, "sampling": "hot"}, "u", {})
    assert "tools = 3: expected a list or None" in str(caught.value)
    assert "sampling = 'hot': expected a mapping" in str(caught.value)


def _generate_and_score_completions(inputs: Any, prompts: Any) -> Any:
    """As TRL's method of that name calls a rollout function."""
    return (lambda: dataset_rows(prompts))()


def test_trl_dataset_rows_are_those_of_the_caller_where_it_has_them() -> None:
    rows = [{"prompt": says("a"), "level": 3}]
    assert _generate_and_score_completions(rows, [says("a")]) is rows
    assert _generate_and_score_completions(rows, [says("a"), says("b")]) is None
    assert _generate_and_score_completions([1], [says("a")]) is None
    assert dataset_rows([says("a")]) is None
