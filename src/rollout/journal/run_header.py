"""Which run a journal is of, and how another run differs from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rollout.chat.plain_data import NotPlainError, encoder, to_plain
from rollout.config import dump_config
from rollout.errors import ConfigError
from rollout.journal.log_file import logger
from rollout.journal.records import Header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rollout.agents.services import Services
    from rollout.config import RolloutConfig

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


def make_header(run_seed: int, services: Services, fingerprint: str) -> Header:
    """Make the header of a run.

    Args:
        fingerprint: Of the model.
    """
    files = {
        "fingerprint": fingerprint,
        "vocabulary and chat template": services.template.fingerprint,
    }
    return Header(
        run_seed=run_seed,
        config=dump_config(services.config),
        files=files,
        schemas=[dict(schema) for schema in services.tools.schemas()],
        engine=msgspec.to_builtins(services.engines.info),
    )


def check_config(path: str, old: Header | None, config: RolloutConfig) -> None:
    """Check that a journal, if there is one, is of this configuration.

    Raises:
        ConfigError: It is of another one; names the differences.
    """
    if old is not None:
        before, now = (_list_lasting(each) for each in (old.config, dump_config(config)))
        _refuse_differences(path, before, now)


def check_header(path: str, old: Header | None, new: Header) -> None:
    """Check that a run, its model's files included, is that of a journal, or can begin one.

    Raises:
        ConfigError: It is another one, and the differences are named; or no journal can hold it.
    """
    if old is not None:
        _refuse_differences(path, old.files, new.files)
        _warn_of_other_tools(path, old, new)
        return
    faults = []
    values = [(f"the schema of tool {each['function']['name']!r}", each) for each in new.schemas]
    for where, value in (*values, *_flatten(new.config).items()):
        try:
            to_plain(value, where)
        except NotPlainError as error:
            faults.append(str(error))
    if faults:
        lines = "".join(f"\n  {fault}" for fault in faults)
        raise ConfigError(f"journal.path = {path!r}: cannot hold this run:{lines}", (*faults,))


def _list_lasting(dumped: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a dumped configuration that may not change, by path."""
    return {
        key: value
        for key, value in _flatten(dumped).items()
        if key == "journal.prompts" or not {key, key.partition(".")[0]} & {*_MAY_CHANGE}
    }


def _flatten(dumped: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a dumped configuration by path, `section.key`."""
    flat: dict[str, Any] = {}
    for section, value in dumped.items():
        if isinstance(value, dict):
            flat |= {f"{section}.{key}": each for key, each in value.items()}
        else:
            flat[section] = value
    return flat


def _refuse_differences(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    found = list(_find_differences(old, new))
    if found:
        more = f"\n  and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        lines = "".join(f"\n  {line}" for line in found[:_NAMED])
        raise ConfigError(
            f"journal.path = {path!r}: is the journal of another run; expected the same, or "
            f"another journal:{lines}{more}",
            tuple(found),
        )


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


def _warn_of_other_tools(path: str, old: Header, new: Header) -> None:
    """Warn of tools whose schemas differ from those before: so do the model's prompts."""
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
