"""Values of users in a journal: back as they were, or refused by the field that holds them."""

from __future__ import annotations

from collections import OrderedDict
from datetime import date
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest

import rollout
from journal_material import CALLED, config_of, cut_before_end, prompts, run
from rollout import (
    ConfigError,
    Message,
    Outcome,
    Prompt,
    PromptError,
    Reward,
    Trajectory,
    function_tool,
)
from rollout.chat.plain_data import EXPECTED, MAX_DEPTH, TOO_DEEP, NotPlainError, to_plain
from rollout.journal.values import find_media, pack_prompt, read_prompt
from rollout.media.records import KnownContents
from rollout.medium import Media
from rollout.testing import run_virtual
from rollout.tools import ToolResult
from rollout.types import ToolCall


def nested(depth: int) -> Any:
    value: Any = None
    for _ in range(depth):
        value = [value]
    return value


def endless() -> list[Any]:
    value: list[Any] = []
    value.append((value, value))
    return value


def test_extra_that_is_nested_without_end_fails_its_trajectory_alone(tmp_path: Path) -> None:
    def attaching(trajectory: Trajectory) -> Reward:
        return Reward(value=1.0, extra={"v": endless()} if trajectory.uid == "quick" else {})

    given = prompts("quick", "sum")
    path = tmp_path / "journal"
    quick, whole = run(config_of(path), given, reward=attaching).trajectories
    assert whole.outcome is Outcome.COMPLETED
    assert (quick.outcome, quick.reason, quick.extra) == (Outcome.FAILED, "journal", {})
    assert quick.cause is not None
    assert quick.cause.message == f"extra['v'] {TOO_DEEP}; {EXPECTED}"
    again = run(config_of(path), given, reward=attaching, resume=True)
    assert again.statistics.returned == 2


def test_extra_itself_may_be_any_mapping(tmp_path: Path) -> None:
    given = [Prompt("quick", uid="quick", extra=MappingProxyType({"a": (1, 2)}))]
    extra, config = MappingProxyType({"b": (1, 2)}), config_of(tmp_path / "journal")
    run(config, given, reward=lambda _: Reward(value=1.0, extra=extra))
    again = run(config, given, resume=True).trajectories[0]
    assert (again.outcome, again.extra) == (Outcome.COMPLETED, {"a": [1, 2], "b": [1, 2]})


def test_result_of_a_tool_that_is_no_plain_data_is_not_written_and_asked_for_again(
    tmp_path: Path,
) -> None:
    @function_tool
    async def add(a: int, b: int) -> ToolResult:
        """Add.

        Args:
            a: One.
            b: Another.
        """
        CALLED.append((a, b))
        return ToolResult(str(a + b), data=object())

    path = tmp_path / "journal"
    first = run(config_of(path), prompts("sum"), tools=[add], reward=None)
    assert first.trajectories[0].outcome is Outcome.COMPLETED
    cut_before_end(path)
    run(config_of(path), prompts("sum"), tools=[add], reward=None, resume=True)
    assert CALLED == [(1, 1), (2, 2)]


def test_prompt_that_is_no_plain_data_is_refused_by_field(tmp_path: Path) -> None:
    given = Prompt("quick", extra={"v": object()})
    with pytest.raises(PromptError, match=r"^prompts\[0\].*\.extra\['v'\] is a object"):
        run(config_of(tmp_path / "journal"), [given])


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.ma.masked_array([1, 2, 3], mask=[0, 1, 0]), r"numpy\.ma\..*MaskedArray"),
        (OrderedDict(a=1), "collections.OrderedDict"),
    ],
)
def test_value_that_would_come_back_as_another_is_refused(value: Any, name: str) -> None:
    with pytest.raises(NotPlainError, match=rf"^extra\['v'\]\[0\] is a {name}; expected"):
        to_plain({"v": [value]}, "extra")


def test_prompt_that_is_no_plain_data_is_text_where_its_caller_gives_it_again(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path / "journal", journal={"unwritable": "text"})
    fields: dict[str, Any] = {
        "ground_truth": Decimal("1.5"),
        "tools_kwargs": {"add": {"day": date(2026, 1, 31)}},
        "extra": {"it": object(), "n": 1},
    }
    given = msgspec.structs.replace(prompts("quick")[0], **fields)
    seen: list[Any] = []

    def reward(trajectory: Trajectory) -> float:
        assert trajectory.prompt is not None
        seen.append(trajectory.prompt.ground_truth)
        return 1.0

    first = run(config, [given], reward=reward, step=0)
    again = run(config, [given], reward=reward, step=0, resume=True)
    assert seen == [Decimal("1.5")]
    ids = [each.trajectories[0].transcript.ids_bytes() for each in (first, again)]
    assert ids[0] == ids[1]
    (loaded,) = rollout.load_trajectories(tmp_path / "journal")
    assert loaded.prompt is not None
    assert loaded.prompt.ground_truth == "Decimal('1.5')"
    assert loaded.prompt.tools_kwargs == {"add": "{'day': datetime.date(2026, 1, 31)}"}
    assert loaded.prompt.extra == {"it": "<object object>", "n": 1}
    other = msgspec.structs.replace(given, ground_truth=Decimal("2.5"))
    with pytest.raises(PromptError, match="differs in ground_truth"):
        run(config, [other], reward=reward, step=0, resume=True)


def test_prompt_of_a_source_that_is_no_plain_data_is_refused_though_text_is_written(
    tmp_path: Path,
) -> None:
    """What is left of a source comes back from the journal."""
    config = config_of(tmp_path / "journal", journal={"unwritable": "text"})
    given = msgspec.structs.replace(prompts("quick")[0], ground_truth=Decimal("1.5"))

    async def act() -> None:
        async with rollout.open_rollout(config) as runtime:
            await runtime.collect([given], 1, step=0)

    with pytest.raises(PromptError, match=r"ground_truth is a decimal\.Decimal"):
        run_virtual(act)


def test_packed_prompt_has_its_messages_as_they_were_given() -> None:
    """Each as a `Message` or a mapping, with values of all kinds; media without contents."""
    extra = {"list": [1, [2]], "bytes": b"\xff", "empty": "", "deep": nested(MAX_DEPTH - 2)}
    call = ToolCall(name="add", arguments={"a": [1]}, id="7", raw="…")
    picture = Media(kind="image", content=b"png", mime="image/png", width=2, height=3)
    messages = [
        Message(role="system", content="", extra=extra, fields={"k": [None]}),
        {"role": "user", "content": "hé", "extra": extra},
        Message(role="assistant", tool_calls=(call,), name="it"),
        Message(role="user", content="see", parts=("see", picture)),
    ]
    prompt = Prompt(messages=messages, uid="it", tools=["add"], ground_truth=[4], priority=2)
    packed = pack_prompt(prompt, "prompts[0]")
    media = KnownContents(find_media(prompt).get, "here")
    assert read_prompt(packed, media=media) == prompt
    shown = read_prompt(packed).messages[3]
    assert isinstance(shown, Message)
    assert shown.parts[1].content == b""  # type: ignore[union-attr]


def test_packed_prompt_of_a_message_that_no_record_holds_names_the_field() -> None:
    message = Message(role="user", content="hi", extra={"it": object()})
    with pytest.raises(PromptError, match=r"prompts\[0\]\.messages\[0\]\.extra\['it'\] is"):
        pack_prompt(Prompt(messages=[message]), "prompts[0]")


def test_run_that_no_journal_can_hold_is_refused_by_key(tmp_path: Path) -> None:
    config = config_of(tmp_path / "journal")
    model = attrs.evolve(config.model, chat_template_kwargs={"x": 2**70})
    with pytest.raises(ConfigError) as refused:
        run(attrs.evolve(config, model=model), prompts("quick"))
    [line] = refused.value.faults
    assert line.startswith("model.chat_template_kwargs.x is an int of more than 64 bits")
    assert not (tmp_path / "journal").exists()
