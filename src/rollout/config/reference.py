"""The reference of every field, from the classes: ``python -m rollout.config.reference``."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import attrs

from rollout.config.checks import expectation, options_of
from rollout.config.section_type import Section, annotations_of, is_section
from rollout.config.sections import RolloutConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Begins the comment of a field, which stands above it.
_COMMENT = "#: "
_FIELD = re.compile(r"    (\w+): ")
TITLE = "Configuration reference"
INTRODUCTION = (
    "Every field of every section, as the classes in `rollout.config` define it. "
    "[configuration.md](configuration.md) says how configurations are written and checked. "
    "`make docs` writes this page."
)


def configuration_reference() -> str:
    """The page, in Markdown."""
    parts = [f"# {TITLE}", INTRODUCTION]
    shown: dict[Any, str] = {}
    for name, annotation in annotations_of(RolloutConfig).items():
        if is_section(annotation):
            parts += _section_parts(name, annotation, shown.setdefault(annotation, name))
    own = {name: a for name, a in annotations_of(RolloutConfig).items() if not is_section(a)}
    parts += ["## Beside the sections", _table(RolloutConfig, own)]
    return "\n\n".join(parts) + "\n"


def _section_parts(name: str, annotation: Any, first: str) -> Iterator[str]:
    """A section's heading, what it is for, and its fields; `first` is where these stand."""
    options: tuple[type[Section], ...] = options_of(annotation)
    is_kinded = len(options) > 1
    yield f"## `{name}`"
    note = _comments(RolloutConfig).get(name)
    if note:
        yield note
    if first != name:
        yield f"`{annotation.__name__}`, with the fields of `{first}`."
        return
    for option in options:
        text = inspect.cleandoc(option.__doc__ or "")
        if is_kinded:
            yield f'### `{name}.kind = "{getattr(option, "kind")}"`: `{option.__name__}`'  # noqa: B009
        else:
            text = f"`{option.__name__}`. {text}"
        yield text
        fields = annotations_of(option)
        yield _table(option, {key: a for key, a in fields.items() if not is_section(a)})
        for key, inner in fields.items():
            if is_section(inner):
                yield f"### `{name}.{key}`"
                yield f"`{inner.__name__}`. {inspect.cleandoc(inner.__doc__ or '')}"
                yield _table(inner, annotations_of(inner))


def _table(cls: type, fields: dict[str, Any]) -> str:
    comments = _comments(cls)
    defaults = {field.name: field.default for field in attrs.fields(cls)}
    rows = ["| key | expected | default | |", "| --- | --- | --- | --- |"]
    for name, annotation in fields.items():
        cells = (f"`{name}`", expectation(annotation), _default(defaults[name]), comments[name])
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)


def _default(default: Any) -> str:
    if default is attrs.NOTHING:
        return "must be given"
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return "follows from others" if default.takes_self else f"`{default.factory()!r}`"
    return f"`{default!r}`"


def _comments(cls: type) -> dict[str, str]:
    """What stands above each field, those of the classes that it derives from included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if attrs.has(base):
            found |= _own_comments(base)
    return found


def _own_comments(cls: type) -> dict[str, str]:
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        if line.strip().startswith(_COMMENT.strip()):
            above.append(line.strip().removeprefix(_COMMENT))
            continue
        field = _FIELD.match(line)
        if field:
            found[field[1]] = " ".join(above)
        above = []
    return found


if __name__ == "__main__":
    print(configuration_reference(), end="")
