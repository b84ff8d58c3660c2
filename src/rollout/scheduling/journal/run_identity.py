"""What a journal is of, and how another run differs from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.config import dump_config
from rollout.errors import ConfigError
from rollout.scheduling.journal.entries import Header
from rollout.seeds import fresh_seed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rollout.config import RolloutConfig
    from rollout.scheduling.journal.journal_reading import Contents

#: Keys that say where and how fast a run is worked on, and not what comes of it.
_MAY_CHANGE = (
    "journal",
    "placement",
    "router",
    "channel",
    "recovery",
    "gateway.host",
    "gateway.port",
    "engine.replicas",
    "scheduling.max_in_flight",
    "scheduling.adaptive_admission",
    "scheduling.freeze_heap",
)
#: Differences that an error names.
_NAMED = 5


def header_of(
    config: RolloutConfig, fingerprint: str, schemas: Sequence[Mapping[str, Any]]
) -> Header:
    """What a new journal begins with.

    Args:
        config: Of the run.
        fingerprint: Names the model; "" where nobody knows.
        schemas: Of all tools.
    """
    seed = fresh_seed() if config.seed is None else config.seed
    dumped = dump_config(config)
    return Header(
        run=f"{fresh_seed():016x}",
        run_seed=seed,
        model=_model_of(dumped, fingerprint),
        config=_lasting(dumped),
        prompts=config.journal.prompts or "",
        schemas=[dict(schema) for schema in schemas],
        all_config=dumped,
    )


def check_same(path: str, contents: Contents, new: Header) -> None:
    """Let a run pass that is the one a journal is of.

    Raises:
        ConfigError: It is not; names the differences.
    """
    old = contents.header
    if old is None:
        return
    for what, one, other in (
        ("model", old.model, new.model),
        ("configuration", old.config, new.config),
        ("prompt file", {"prompts": old.prompts}, {"prompts": new.prompts}),
    ):
        found = list(_differences(one, other))
        if found:
            more = f"\n  and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            lines = "".join(f"\n  {line}" for line in found[:_NAMED])
            raise ConfigError(
                f"journal.path = {path!r}: is the journal of another {what}; expected the same, or "
                f"another journal:{lines}{more}",
                tuple(found),
            )


def _model_of(dumped: Mapping[str, Any], fingerprint: str) -> dict[str, Any]:
    model = dict(dumped["model"])
    return {**{f"model.{key}": value for key, value in model.items()}, "fingerprint": fingerprint}


def _lasting(dumped: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The configuration by paths, without what may change and without the model."""
    flat: dict[str, Any] = {}
    for key, value in dumped.items():
        here = f"{path}{key}"
        if here in _MAY_CHANGE or here == "model":
            continue
        if isinstance(value, dict) and not path:
            flat |= _lasting(value, f"{here}.")
        else:
            flat[here] = value
    return flat


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys((*old, *new)):
        one, other = old.get(key), new.get(key)
        if one != other:
            yield f"{key} = {one!r:.200} there, {other!r:.200} here"
