"""What a journal is of, and how another run differs from it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.chat.plain_data import encoder
from rollout.config import dump_config
from rollout.errors import ConfigError, JournalError
from rollout.scheduling.journal.entries import Header
from rollout.scheduling.journal.plain_data import plain
from rollout.seeds import fresh_seed
from rollout.types import format_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rollout.config import RolloutConfig
    from rollout.engine.core import EngineInfo
    from rollout.scheduling.journal.journal_reading import Contents

logger = logging.getLogger("rollout.journal")

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


def seed_of_run(config: RolloutConfig, before: Contents | None) -> int:
    """What all seeds of a run derive from: the same again where it is resumed."""
    if before is not None and before.header is not None:
        return before.header.run_seed
    return fresh_seed() if config.seed is None else config.seed


def header_of(
    config: RolloutConfig,
    files: Mapping[str, str],
    schemas: Sequence[Mapping[str, Any]],
    run_seed: int,
    engine: EngineInfo | None = None,
) -> Header:
    """What a new journal begins with.

    Args:
        config: Of the run.
        files: Fingerprints of what the model's files hold, by what it is.
        schemas: Of all tools.
        run_seed: What all seeds derive from.
        engine: What the engines say of themselves.
    """
    dumped = dump_config(config)
    return Header(
        run=f"{fresh_seed():016x}",
        run_seed=run_seed,
        model={**{f"model.{key}": value for key, value in dumped["model"].items()}, **files},
        config=_lasting(dumped),
        prompts=config.journal.prompts or "",
        schemas=[dict(schema) for schema in schemas],
        all_config=dumped,
        engine={} if engine is None else msgspec.to_builtins(engine),
    )


def check_same(path: str, contents: Contents, new: Header) -> None:
    """Let a run pass that is the one a journal is of, or that can begin one.

    Raises:
        ConfigError: It is not, and the differences are named; or it holds what no journal can.
    """
    old = contents.header
    if old is None:
        _check_encodable(path, new)
        return
    both = [key for key in new.model if key in old.model]  # other versions name other facts
    for what, one, other in (
        ("model", {k: old.model[k] for k in both}, {k: new.model[k] for k in both}),
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


def _check_encodable(path: str, header: Header) -> None:
    try:
        encoder.encode(header)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        faults = list(_unplain(header)) or [format_error(error)]
        lines = "".join(f"\n  {fault}" for fault in faults)
        raise ConfigError(
            f"journal.path = {path!r}: cannot hold this run:{lines}", tuple(faults)
        ) from None


def _unplain(header: Header) -> Iterator[str]:
    """What of a run no journal can hold."""
    values = [(f"the schema of tool {each['function']['name']!r}", each) for each in header.schemas]
    for section, value in header.all_config.items():
        if isinstance(value, dict):
            values += [(f"{section}.{key}", each) for key, each in value.items()]
        else:
            values.append((section, value))
    for where, value in values:
        try:
            plain(value, where)
        except JournalError as error:
            yield str(error)


def say_other_tools(path: str, contents: Contents, new: Header) -> None:
    """Warn of tools whose schemas are not those of before: the model's prompts are others then."""
    old = contents.header
    if old is None:
        return
    before, now = ({each["function"]["name"]: each for each in _read_back(s)} for s in (old, new))
    changes = [
        *(f"{name!r} is gone" for name in before.keys() - now.keys()),
        *(f"{name!r} is new" for name in now.keys() - before.keys()),
        *(f"{name!r} differs" for name in before.keys() & now.keys() if before[name] != now[name]),
    ]
    if changes:
        logger.warning(
            "%s: its tools were others: %s; what is finished keeps the answers that it had, and "
            "what a trajectory asks otherwise than before is asked again",
            path,
            ", ".join(sorted(changes)),
        )


def _read_back(header: Header) -> list[dict[str, Any]]:
    """Its schemas as a journal gives them."""
    return msgspec.msgpack.decode(encoder.encode(header.schemas), type=list[dict[str, Any]])


def _lasting(dumped: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The configuration by paths, without what may change and without the model."""
    flat: dict[str, Any] = {}
    for key, value in dumped.items():
        here = f"{path}{key}"
        if here in _MAY_CHANGE or here in ("model", "observe"):
            continue
        if isinstance(value, dict) and not path:
            flat |= _lasting(value, f"{here}.")
        else:
            flat[here] = value
    return flat


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key in dict.fromkeys((*old, *new)):
        one, other = old.get(key), new.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differences(one, other, f"{path}{key}.")
        elif one != other:
            there, here = (f"{of[key]!r:.200}" if key in of else "nothing" for of in (old, new))
            yield f"{path}{key} = {there} there, {here} here"
