"""Between a configuration and plain nested data: a cattrs converter that coerces nothing."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from rollout.config.checks import options_of
from rollout.config.config_faults import Fault, config_error, got
from rollout.config.section_type import (
    Section,
    annotations_of,
    deferred_faults,
    gather_faults,
    given_fields,
    is_section,
)
from rollout.config.sections import RolloutConfig

if TYPE_CHECKING:
    from cattrs import Converter

#: The key that names the class where a section has one class for each kind.
KIND = "kind"


@functools.cache
def converter() -> Converter:
    """The converter of this package.

    Keys and leaf values pass untouched: the classes judge them, so that Python and files are
    equally strict. What has no shape of a section becomes a `Fault` in its place.
    """
    from cattrs import Converter  # costs as much as the rest of this package together

    strict = Converter()

    def structure(values: Any, annotation: Any) -> Section | Fault:
        cls = class_of(values, annotation)
        if isinstance(cls, Fault):
            return cls
        fields = annotations_of(cls)
        given = {str(key): value for key, value in values.items()}
        if is_kinded(annotation):
            given.pop(KIND, None)
        for name in given.keys() & fields.keys():
            if is_section(fields[name]):
                given[name] = strict.structure(given[name], fields[name])
        return cls(**given)

    def unstructure(section: Section) -> dict[str, Any]:
        keys = [*([KIND] if hasattr(section, KIND) else []), *written_fields(type(section))]
        return {key: strict.unstructure(getattr(section, key)) for key in keys}

    strict.register_structure_hook_func(is_section, structure)
    strict.register_unstructure_hook_func(is_section, unstructure)
    strict.register_unstructure_hook(tuple, lambda values: [*map(strict.unstructure, values)])
    return strict


def is_kinded(annotation: Any) -> bool:
    """Whether a section has one class for each kind."""
    return len(options_of(annotation)) > 1


def default_kind(annotation: Any) -> str:
    """The kind of a section whose data names none: that of the first class."""
    kind: str = options_of(annotation)[0].kind
    return kind


def class_of(values: Any, annotation: Any) -> type[Section] | Fault:
    """The class that `values` are meant for, by their kind where there are several."""
    if not isinstance(values, Mapping):
        return Fault("", f"expected a mapping of keys to values{got(values)}", values)
    if not is_kinded(annotation):
        cls: type[Section] = annotation
        return cls
    kinds = {option.kind: option for option in options_of(annotation)}
    kind = values.get(KIND, default_kind(annotation))
    if isinstance(kind, str) and kind in kinds:
        chosen: type[Section] = kinds[kind]
        return chosen
    wrong_type = "" if isinstance(kind, str) else got(kind)
    known = ", ".join(repr(name) for name in kinds)
    return Fault(KIND, f"expected one of {known}{wrong_type}", kind)


def written_fields(cls: Any) -> list[str]:
    """The fields that a dump holds: all but those whose default follows from others."""
    fields = attrs.fields(cls)
    return [field.name for field in fields if not getattr(field.default, "takes_self", False)]


def dump_config(config: RolloutConfig) -> dict[str, Any]:
    """The configuration as plain nested data that JSON can hold; tuples become lists.

    Sections with several classes carry their `kind`. Values that follow from others (the
    `replicas` of `HttpEngine`, what `validation_sampling` has from `sampling`) are left out.
    `config_from_dict` gives an equal configuration.
    """
    dumped: dict[str, Any] = converter().unstructure(config)
    given = given_fields(config.validation_sampling)
    validation = dumped["validation_sampling"]
    dumped["validation_sampling"] = {key: validation[key] for key in validation if key in given}
    return dumped


def build_config(values: Any) -> tuple[RolloutConfig, list[Fault]]:
    """The configuration that `values` describe, to be used only where there are no faults."""
    with deferred_faults() as faulty:
        built = converter().structure(values, RolloutConfig)
    shapeless = [built.below("(top level)")] if isinstance(built, Fault) else []
    return built, shapeless or gather_faults(faulty)


def config_from_dict(values: Mapping[str, Any]) -> RolloutConfig:
    """The configuration that nested mappings describe; what they leave out takes its default.

    Raises:
        ConfigError: With every fault: unknown keys, wrong types, values out of range.
    """
    config, faults = build_config(values)
    if faults:
        raise config_error("the configuration", faults)
    return config
