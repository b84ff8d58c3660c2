"""Which run a journal is of, and how another run differs from it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.chat.plain_data import NotPlainError, encoder, to_plain
from rollout.config import dump_config
from rollout.errors import ConfigError
from rollout.journal.records import Header
from rollout.seeds import fresh_seed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rollout.config import RolloutConfig
    from rollout.engine.core import EngineInfo

logger = logging.getLogger("rollout.journal")

#: Keys that say where and how fast a run is worked on, and not what comes of it.
_MAY_CHANGE = (
    "journal",
    "observe",
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


def choose_run_seed(config: RolloutConfig, before: Header | None) -> int:
    """Choose what all seeds of a run derive from: the same again where it is resumed."""
    if before is not None:
        return before.run_seed
    return fresh_seed() if config.seed is None else config.seed


def make_header(
    config: RolloutConfig,
    files: Mapping[str, str],
    schemas: Sequence[Mapping[str, Any]],
    run_seed: int,
    engine: EngineInfo | None = None,
) -> Header:
    """Make the header of a run.

    Args:
        files: Fingerprints of what the model's files hold, by what it is.
        schemas: Of all tools.
        engine: What the engines say of themselves.
    """
    dumped = dump_config(config)
    flat = _flatten(dumped)
    lasting = {
        key: value
        for key, value in flat.items()
        if not {key, key.partition(".")[0]} & {*_MAY_CHANGE, "model"}
    }
    return Header(
        run_seed=run_seed,
        model={**{f"model.{key}": value for key, value in dumped["model"].items()}, **files},
        config=lasting,
        prompts=config.journal.prompts or "",
        schemas=[dict(schema) for schema in schemas],
        all_config=dumped,
        engine={} if engine is None else msgspec.to_builtins(engine),
    )


def _flatten(dumped: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a dumped configuration by path, `section.key`."""
    flat: dict[str, Any] = {}
    for section, value in dumped.items():
        if isinstance(value, dict):
            flat |= {f"{section}.{key}": each for key, each in value.items()}
        else:
            flat[section] = value
    return flat


def check_header(path: str, old: Header | None, new: Header) -> None:
    """Check that a run is the one that a journal is of, or that it can begin one.

    Raises:
        ConfigError: It is another one, and the differences are named; or no journal can hold it.
    """
    if old is None:
        faults = list(_find_unwritable(new))
        if faults:
            lines = "".join(f"\n  {fault}" for fault in faults)
            raise ConfigError(f"journal.path = {path!r}: cannot hold this run:{lines}", (*faults,))
        return
    both = [key for key in new.model if key in old.model]  # before the model is loaded: not all
    for what, one, other in (
        ("model", {k: old.model[k] for k in both}, {k: new.model[k] for k in both}),
        ("configuration", old.config, new.config),
        ("prompt file", {"prompts": old.prompts}, {"prompts": new.prompts}),
    ):
        found = list(_find_differences(one, other))
        if found:
            more = f"\n  and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            lines = "".join(f"\n  {line}" for line in found[:_NAMED])
            raise ConfigError(
                f"journal.path = {path!r}: is the journal of another {what}; expected the same, or "
                f"another journal:{lines}{more}",
                tuple(found),
            )


def _find_unwritable(header: Header) -> Iterator[str]:
    values = [(f"the schema of tool {each['function']['name']!r}", each) for each in header.schemas]
    values += _flatten(header.all_config).items()
    for where, value in values:
        try:
            to_plain(value, where)
        except NotPlainError as error:
            yield str(error)


def _find_differences(
    old: Mapping[str, Any], new: Mapping[str, Any], path: str = ""
) -> Iterator[str]:
    for key in dict.fromkeys((*old, *new)):
        one, other = old.get(key), new.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _find_differences(one, other, f"{path}{key}.")
        elif one != other:
            there, here = (f"{of[key]!r:.200}" if key in of else "nothing" for of in (old, new))
            yield f"{path}{key} = {there} there, {here} here"


def warn_of_other_tools(path: str, old: Header | None, new: Header) -> None:
    """Warn of tools whose schemas differ from those before: so do the model's prompts."""
    if old is None:
        return
    schemas = msgspec.msgpack.decode(encoder.encode(new.schemas))  # as a journal gives them
    before, now = ({each["function"]["name"]: each for each in s} for s in (old.schemas, schemas))
    changes = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
    if changes:
        logger.warning(
            "%s: these tools have other schemas than before: %s; finished trajectories keep the "
            "answers that they had, others may ask otherwise and continue on their own",
            path,
            ", ".join(changes),
        )
