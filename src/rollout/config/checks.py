"""What a field accepts, read from its annotation, without any coercion.

A rule travels inside the annotation (`Count = Annotated[int, Rule(...)]`), so that one statement
serves the type checker, the check and the text of the error.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from urllib.parse import urlsplit

import attrs

from rollout.config.config_faults import Fault, got, join_path

#: Ids are int32 on the wire and in transcripts.
MAX_ID = 2**31 - 1
#: What messages and records hold.
MAX_INTEGER = 2**63 - 1
PLAIN_DATA = "None, booleans, finite numbers, strings, lists and mappings with string keys"


@attrs.frozen
class Rule:
    """What a value must be beyond its type.

    Attributes:
        text: The whole expectation, type included: ``an integer ≥ 1``.
        accepts: Called with values of the right type only.
    """

    text: str
    accepts: Callable[[Any], bool]


def is_http_url(text: str) -> bool:
    """Whether `text` is an http or https URL with a host, and with a real port where it has one."""
    try:
        parts = urlsplit(text)
        is_valid = parts.port is None or parts.port > 0
    except ValueError:
        return False
    is_http = parts.scheme in ("http", "https") and bool(parts.hostname)
    return is_http and is_valid and not re.search(r"\s", text)


Flag = Annotated[bool, Rule("a boolean (true or false)", lambda _: True)]
Count = Annotated[int, Rule("an integer ≥ 1", lambda n: n >= 1)]
Port = Annotated[int, Rule("a port, an integer from 0 to 65535", lambda n: 0 <= n <= 65535)]
Natural = Annotated[int, Rule("an integer ≥ 0", lambda n: n >= 0)]
TokenId = Annotated[int, Rule(f"an integer from 0 to {MAX_ID}", lambda n: 0 <= n <= MAX_ID)]
TopK = Annotated[
    int,
    Rule(f"an integer from 1 to {MAX_ID}, or -1 for all", lambda n: 1 <= n <= MAX_ID or n == -1),
]
FrameBytes = Annotated[int, Rule("an integer from 4096 to 4294967295", lambda n: 4096 <= n < 2**32)]
NonNegative = Annotated[float, Rule("a number ≥ 0", lambda x: x >= 0)]
Number = Annotated[float, Rule("a number", lambda _: True)]
Positive = Annotated[float, Rule("a number > 0", lambda x: x > 0)]
Share = Annotated[float, Rule("a number between 0 and 1, both excluded", lambda x: 0 < x < 1)]
Probability = Annotated[float, Rule("a number from 0 to 1", lambda x: 0 <= x <= 1)]
PositiveProbability = Annotated[float, Rule("a number > 0 and ≤ 1", lambda x: 0 < x <= 1)]
Text = Annotated[str, Rule("a non-empty string", lambda text: bool(text.strip()))]


def is_class_path(text: str) -> bool:
    """Whether `text` reads ``package.module:Class``."""
    return bool(re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", text))


ClassPath = Annotated[str, Rule("a string like 'package.module:Class'", is_class_path)]
STRATEGIES = ("estimated_seconds", "least_requests", "round_robin")
StrategyName = Annotated[
    str,
    Rule(
        f"one of {', '.join(map(repr, STRATEGIES))} (the first one replaces 'consistent_hash' and "
        "classes of yours)",
        STRATEGIES.__contains__,
    ),
]
Weights = Annotated[tuple[Positive, ...], Rule("a list of numbers > 0", lambda _: True)]
Texts = Annotated[tuple[Text, ...], Rule("a list of strings", lambda _: True)]
GpuSlot = Annotated[
    str,
    Rule(
        "a string like 'node:0,1' (a Ray node's id or address, and GPU ids)",
        lambda text: bool(re.fullmatch(r"\S+:\d+(,\d+)*", text)),
    ),
]
GpuSlots = Annotated[tuple[GpuSlot, ...], Rule("a list of strings", lambda _: True)]
Url = Annotated[str, Rule("an http or https URL", is_http_url)]
Urls = Annotated[tuple[Url, ...], Rule("a list of one http or https URL or more", bool)]
TokenIds = Annotated[tuple[TokenId, ...], Rule("a list of token ids", lambda _: True)]
Outcomes = Annotated[
    tuple[Literal["completed", "length", "limit", "deadline"], ...],
    Rule("a list of outcomes (completed, length, limit, deadline)", lambda _: True),
]
DriftKinds = Annotated[
    tuple[Literal["whitespace", "special_tokens", "reasoning_stripped", "content"], ...],
    Rule(
        "a list of kinds of drift (whitespace, special_tokens, reasoning_stripped, content)",
        lambda _: True,
    ),
]
BuiltinTools = Annotated[
    tuple[Literal["calculator", "edit", "finish", "python", "search", "shell", "submit"], ...],
    Rule(
        "a list of shipped tools, each once (calculator, edit, finish, python, search, shell, "
        "submit)",
        lambda names: len(set(names)) == len(names),
    ),
]
PlainMapping = Annotated[Mapping[str, Any], Rule("a mapping", lambda _: True)]


def options_of(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if is_union else (annotation,)


def expectation(annotation: Any) -> str:
    """What a field of this annotation wants, in words."""
    return " or ".join(_option_text(option) for option in options_of(annotation))


def _option_text(option: Any) -> str:
    if option is types.NoneType:
        return "None"
    if get_origin(option) is Literal:
        return f"one of {', '.join(repr(choice) for choice in get_args(option))}"
    rule = _parts(option)[1]
    return rule.text if rule else f"{option.__name__}(...)"


def _parts(option: Any) -> tuple[Any, Rule | None]:
    """The bare type of an option, and its rule."""
    if get_origin(option) is Annotated:
        base, rule = get_args(option)
        return base, rule
    return option, None


def validate(annotation: Any, value: Any) -> tuple[Any, list[Fault]]:
    """`value` as a field keeps it, and its faults with paths relative to the field.

    A list becomes a tuple, an int a float where one is wanted, and a mapping a copy of itself;
    nothing else is converted. A faulty value comes back as it was.
    """
    options = options_of(annotation)
    if value is None and types.NoneType in options:
        return None, []
    wanted = expectation(annotation)
    base, rule = _parts(next(option for option in options if option is not types.NoneType))
    shape = get_origin(base)
    if shape is tuple:
        kept, faults = _validate_list(get_args(base)[0], wanted, value)
    elif shape is Mapping:
        kept, faults = _validate_mapping(base, wanted, value)
    elif shape is types.UnionType:
        kept, faults = value, []  # its rule judges it alone
    elif shape is Literal:
        kept, faults = _validate_choice(get_args(base), wanted, value)
    else:
        kept, faults = _validate_scalar(base, wanted, value)
    if rule and not faults and not rule.accepts(kept):
        faults = [Fault("", f"expected {wanted}", value)]
    return (value if faults else kept), faults


def _validate_scalar(kind: type, wanted: str, value: Any) -> tuple[Any, list[Fault]]:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind in (int, float) and is_number:
        return _validate_number(kind, wanted, value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return value, [Fault("", f"expected {wanted}{got(value)}", value)]
    return (str.__str__(value) if kind is str else value), []


def _validate_number(kind: type, wanted: str, value: float) -> tuple[Any, list[Fault]]:
    if kind is int:
        if isinstance(value, int) and abs(value) <= MAX_INTEGER:
            return int(value), []
        too_large = f", got one beyond {MAX_INTEGER}" if isinstance(value, int) else ""
        return value, [Fault("", f"expected {wanted}{too_large}", value)]
    if not is_finite(value):
        return value, [Fault("", f"expected {wanted}, got one that is not finite", value)]
    return float(value), []


def is_finite(value: float) -> bool:
    """Whether a number is neither NaN nor infinite, nor an int past the range of floats."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _validate_choice(choices: tuple[Any, ...], wanted: str, value: Any) -> tuple[Any, list[Fault]]:
    if isinstance(value, str) and value in choices:
        return _validate_scalar(str, wanted, value)
    kind = "" if isinstance(value, str) else got(value)
    return value, [Fault("", f"expected {wanted}{kind}", value)]


def _validate_list(item: Any, wanted: str, value: Any) -> tuple[Any, list[Fault]]:
    if not isinstance(value, (list, tuple)):
        return value, [Fault("", f"expected {wanted}{got(value)}", value)]
    validated = [validate(item, entry) for entry in value]
    faults = [
        fault.below(f"[{index}]") for index, (_, found) in enumerate(validated) for fault in found
    ]
    return tuple(kept for kept, _ in validated), faults


def _validate_mapping(base: Any, wanted: str, value: Any) -> tuple[Any, list[Fault]]:
    if not isinstance(value, Mapping):
        return value, [Fault("", f"expected {wanted}{got(value)}", value)]
    if get_args(base)[1] is not Any:  # its rule judges what is in it
        return dict(value), []
    faults: list[Fault] = []
    try:
        return _copy_plain(value, "", faults), faults
    except RecursionError:  # YAML can write a mapping that holds itself
        return value, [Fault("", f"expected {wanted} that does not hold itself", value)]


def _copy_plain(value: Any, path: str, faults: list[Fault]) -> Any:
    """A copy that shares nothing with `value`, as dicts and lists of plain data."""
    match value:
        case None | bool() | str():
            return value
        case int() | float() if is_finite(value):
            return value
        case list() | tuple():
            return [_copy_plain(v, f"{path}[{i}]", faults) for i, v in enumerate(value)]
        case Mapping() if all(isinstance(key, str) for key in value):
            return {k: _copy_plain(v, join_path(path, k), faults) for k, v in value.items()}
    faults.append(Fault(path, f"expected plain data ({PLAIN_DATA})", value))
    return value
