"""One row of a prompts file, with the columns that verl's data has, as a `Prompt`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from rollout.config.config_faults import Fault, got
from rollout.scheduling.prompts import PRIORITY, is_priority
from rollout.types import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

NESTED = "extra_info"
#: Keys of `extra_info` that verl means for tools and users; they may stand beside it as well.
LIFTED = ("tools_kwargs", "interaction_kwargs")


@attrs.frozen
class _Expectation:
    """What a column must hold where it holds anything."""

    text: str
    accepts: Callable[[Any], bool]


def _is_mapping_of_mappings(value: Any) -> bool:
    """Whether it is one; of a tool that has nothing, Arrow says None."""
    return isinstance(value, Mapping) and all(
        isinstance(item, Mapping | None) for item in value.values()
    )


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


_STRING = _Expectation("a string", lambda value: isinstance(value, str))
_OBJECT = _Expectation("an object", lambda value: isinstance(value, Mapping))
_EXPECTED = {
    "uid": _STRING,
    "agent_name": _STRING,
    "data_source": _STRING,
    "reward_model": _OBJECT,
    NESTED: _OBJECT,
    "priority": _Expectation(PRIORITY, is_priority),
    "sampling": _OBJECT,
    "tools": _Expectation("a list of names of tools", _is_list_of_strings),
    "tools_kwargs": _Expectation(
        "an object with one object for each tool", _is_mapping_of_mappings
    ),
    "interaction_kwargs": _OBJECT,
}
#: Columns that become fields of a prompt; every other one travels in its `extra`.
_OWN = ("prompt", "messages", "ground_truth", *_EXPECTED)


def prompt_of_row(row: Mapping[str, Any]) -> tuple[Prompt | None, list[Fault]]:
    """The prompt that a row describes, or None and everything that is wrong with the row.

    A column that is None is absent. Columns without a meaning here go to `extra`, beside what
    `extra_info` holds.
    """
    given = {name: value for name, value in row.items() if value is not None}
    faults = [*_faults_of_messages(given), *_faults_of_types(given)]
    if not faults:
        faults = [*_faults_of_pairs(given)]
    return (None, faults) if faults else (_prompt(given), [])


def _faults_of_messages(given: Mapping[str, Any]) -> Iterator[Fault]:
    names = [name for name in ("prompt", "messages") if name in given]
    if len(names) != 1:
        problem = "expected one of them" + (", got both" if names else "; the row has neither")
        yield Fault("prompt, messages", problem)
        return
    value = given[names[0]]
    if isinstance(value, str) and names == ["prompt"]:
        return
    if not isinstance(value, list):
        wanted = "a string or a list of messages" if names == ["prompt"] else "a list of messages"
        yield Fault(names[0], f"expected {wanted}{got(value)}", value)
        return
    for index, message in enumerate(value):
        yield from _faults_of_message(f"{names[0]}[{index}]", message)


def _faults_of_message(path: str, message: Any) -> Iterator[Fault]:
    if not isinstance(message, Mapping):
        yield Fault(path, f"expected an object with role and content{got(message)}", message)
        return
    if not isinstance(message.get("role"), str):
        role = message.get("role")
        yield Fault(f"{path}.role", f"expected a string{got(role)}", role)
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        yield Fault(f"{path}.content", f"expected a string{got(content)}", content)


def _faults_of_types(given: Mapping[str, Any]) -> Iterator[Fault]:
    yield from _mismatches("", given)
    nested = given.get(NESTED)
    if isinstance(nested, Mapping):
        lifted = {name: nested[name] for name in LIFTED if nested.get(name) is not None}
        yield from _mismatches(f"{NESTED}.", lifted)


def _mismatches(prefix: str, given: Mapping[str, Any]) -> Iterator[Fault]:
    for name, expected in _EXPECTED.items():
        if name in given and not expected.accepts(given[name]):
            value = given[name]
            # Of a list or an object, what is wrong may be inside.
            kind = "" if isinstance(value, list | Mapping) else got(value)
            yield Fault(f"{prefix}{name}", f"expected {expected.text}{kind}", value)


def _faults_of_pairs(given: Mapping[str, Any]) -> Iterator[Fault]:
    """Two columns that say different things under one name: nothing may be lost silently."""
    for name, value in _nested(given).items():
        beside = given.get(name, value) if name not in _OWN or name in LIFTED else value
        if beside != value:
            yield Fault(name, f"{NESTED}.{name} says otherwise; expected one of them", beside)
    scored = given.get("reward_model", {}).get("ground_truth")
    beside = given.get("ground_truth", scored)
    if scored is not None and beside != scored:
        problem = "reward_model.ground_truth says otherwise; expected one of them"
        yield Fault("ground_truth", problem, beside)


def _nested(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.get(NESTED, {}).items() if value is not None}


def _prompt(given: Mapping[str, Any]) -> Prompt:
    said = given.get("prompt", given.get("messages"))
    judge = dict(given.get("reward_model", {}))
    truth = judge.pop("ground_truth", None)
    nested = _nested(given)
    extra = {name: value for name, value in given.items() if name not in _OWN} | nested
    lifted = extra.pop("tools_kwargs", {})
    if judge:
        extra["reward_model"] = judge
    if "interaction_kwargs" in given:
        extra["interaction_kwargs"] = given["interaction_kwargs"]
    return Prompt(
        messages=[{"role": "user", "content": said}] if isinstance(said, str) else said,
        uid=given.get("uid"),
        agent_name=given.get("agent_name"),
        sampling=given.get("sampling", {}),
        tools=given.get("tools"),
        tools_kwargs=given.get("tools_kwargs", lifted),
        ground_truth=given.get("ground_truth", truth),
        data_source=given.get("data_source"),
        priority=given.get("priority", 0),
        extra=extra,
    )
