"""What every section of a configuration has: construction that checks everything at once.

A section refuses to exist with a fault, and its error lists all of its faults. While a
configuration is being loaded, faults are deferred instead: faulty sections are built, carry their
faults and pass them on to the section that contains them, so that the loader can report the faults
of the whole configuration in one error.
"""

from __future__ import annotations

import difflib
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from rollout.config.checks import expectation, options_of, validate
from rollout.config.config_faults import Fault, config_error, got

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

#: The faulty sections built so far, where faults are deferred.
_deferred: ContextVar[list[Section] | None] = ContextVar("deferred", default=None)


class SectionType(type):
    """Makes the call of a section's class check its arguments."""

    def __call__(cls, /, *args: Any, **values: Any) -> Any:
        fields = annotations_of(cls).keys()
        derived: Mapping[str, Any] = getattr(cls, "derived_defaults")(values)  # noqa: B009
        given = frozenset(values)
        values = {**derived, **values}
        faults = [unknown_key(cls, key, values[key]) for key in values if key not in fields]
        kept: dict[str, Any] = {}
        faulty = set()
        for name, (value, found) in validated_fields(cls, values).items():
            kept[name] = value
            if found:
                faulty.add(name)
                faults += (fault.below(name) for fault in found)
        settled: Mapping[str, Any] = getattr(cls, "settled")(kept)  # noqa: B009
        section = super().__call__(*args, **{**kept, **settled})
        object.__setattr__(section, "_given", given)
        faults += section.relation_faults(fields - faulty)
        return _settle(section, faults) if faults else section


class Section(metaclass=SectionType):
    """Base of the attrs classes that make up a configuration."""

    __slots__ = ("_faults", "_given")

    #: Path of the section in the configuration; empty for the whole.
    section: ClassVar[str] = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy was built with the same fields; the others are defaults there too."""
        return partial(type(self), **{name: getattr(self, name) for name in given_fields(self)}), ()

    @classmethod
    def derived_defaults(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Defaults that follow from what was given, for fields that were not."""
        return {}

    @classmethod
    def settled(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fields that are completed from others; `values` are judged, and may be faults."""
        return {}

    def relation_faults(self, sound: Collection[str]) -> Iterable[Fault]:
        """Faults between fields; fields not in `sound` have faults of their own already."""
        return ()

    @classmethod
    def homes_of(cls, key: str) -> list[str]:
        """Where a key that this section does not know would be right, for the error text."""
        return []

    @classmethod
    def instead_of(cls, key: str) -> str:
        """What to use in the place of a key that others have and this library has not; or ""."""
        return ""


def annotations_of(cls: Any) -> dict[str, Any]:
    """The annotation of each field of an attrs class, rules included."""
    return {field.name: field.type for field in attrs.fields(cls)}


def validated_fields(cls: Any, values: Mapping[str, Any]) -> dict[str, tuple[Any, list[Fault]]]:
    """The value and the faults of each field that was given, or should have been."""
    validated = {}
    for field in attrs.fields(cls):
        if field.name in values:
            validated[field.name] = validate_field(field.type, values[field.name])
        elif field.default is attrs.NOTHING:
            missing = Fault("", f"missing; expected {expectation(field.type)}")
            validated[field.name] = missing, [missing]
    return validated


def validate_field(annotation: Any, value: Any) -> tuple[Any, list[Fault]]:
    """`validate`, and beside it: a section brings its own faults, a fault stands for itself."""
    if isinstance(value, Fault):
        return value, [value]
    if not is_section(annotation):
        return validate(annotation, value)
    if type(value) in options_of(annotation):
        return value, list(faults_of(value))
    return value, [Fault("", f"expected {expectation(annotation)}{got(value)}", value)]


def is_section(annotation: Any) -> bool:
    """Whether an annotation is a section's class, or a union of such."""
    return all(isinstance(option, SectionType) for option in options_of(annotation))


def faults_of(section: Section) -> tuple[Fault, ...]:
    """The faults that a section built under `deferred_faults` carries; relative paths."""
    return getattr(section, "_faults", ())


def given_fields(section: Section) -> frozenset[str]:
    """The fields that a section was built with; the others took their defaults."""
    every = frozenset(annotations_of(type(section)))
    given: frozenset[str] = getattr(section, "_given", every)
    return given & every


def _settle(section: Section, faults: list[Fault]) -> Section:
    """Raise the faults of a new section, or put them on it where they are deferred."""
    faulty = _deferred.get()
    if faulty is None:
        placed = (fault.below(section.section) for fault in faults)
        raise config_error(type(section).__name__, placed)
    object.__setattr__(section, "_faults", tuple(faults))
    faulty.append(section)
    return section


@contextmanager
def deferred_faults() -> Iterator[list[Section]]:
    """Within the block sections are built whatever their faults; yields the faulty ones."""
    faulty: list[Section] = []
    token = _deferred.set(faulty)
    try:
        yield faulty
    finally:
        _deferred.reset(token)


def gather_faults(faulty: Iterable[Section]) -> list[Fault]:
    """The faults of all these sections with whole paths, those inside another one only once."""
    sections = list(faulty)
    inside = {
        id(getattr(outer, name)) for outer in sections for name in annotations_of(type(outer))
    }
    outermost = (section for section in sections if id(section) not in inside)
    return [fault.below(section.section) for section in outermost for fault in faults_of(section)]


def unknown_key(cls: Any, key: str, value: object) -> Fault:
    """The fault of a key that `cls` does not have; names the nearest that it has."""
    instead = cls.instead_of(key)
    if instead:
        return Fault(key, instead, value)
    kind = getattr(cls, "kind", None)
    known = [*(["kind"] if kind else []), *annotations_of(cls)]
    homes: list[str] = cls.homes_of(key)
    nearest = homes or [repr(name) for name in difflib.get_close_matches(key, known, 1, cutoff=0)]
    of_kind = f" for kind {kind!r}" if kind else ""
    return Fault(
        key,
        f"unknown key{of_kind}; did you mean {' or '.join(nearest)}? (known: {', '.join(known)})",
        value,
    )


def fields_named(key: str, classes: Mapping[str, type]) -> list[str]:
    """The labels of those classes that have a field named `key`."""
    return [label for label, cls in classes.items() if key in annotations_of(cls)]
