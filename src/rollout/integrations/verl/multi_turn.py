"""What a configuration of verl says about turns and tools, in our words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.errors import ConfigError
from rollout.integrations.verl.yaml_files import read_yaml, refuse_interpolation
from rollout.tools.results import SIDES_BY_VERL

if TYPE_CHECKING:
    from pathlib import Path

#: Where the section is: in a trainer's configuration, in a rollout's, or by itself.
_PLACES = ("actor_rollout_ref.rollout.multi_turn", "rollout.multi_turn", "multi_turn")
#: Keys of ours by those of verl whose values need no translation.
_SAME = {
    "max_assistant_turns": ("agent", "max_assistant_turns"),
    "max_user_turns": ("agent", "max_user_turns"),
    "max_parallel_calls": ("agent", "max_parallel_calls"),
    "max_tool_response_length": ("tools", "max_response_length"),
}


class VerlMultiTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The section ``multi_turn`` of a configuration of verl.

    Attributes:
        settings: Our sections ``agent`` and ``tools``, with what it says; for `config_from_dict`.
        tool_config_path: For `load_verl_tools`; None where there is none.
        function_tool_path: For `load_tools`.
        interaction_config_path: For `rollout.interactions.load_verl_interactions`.
    """

    settings: dict[str, dict[str, Any]]
    tool_config_path: str | None = None
    function_tool_path: str | None = None
    interaction_config_path: str | None = None


def load_verl_multi_turn(source: str | Path | Mapping[str, Any]) -> VerlMultiTurn:
    """What a configuration of verl says about turns, calls, their answers, and where tools are.

    verl names the sides of truncation after what is kept: its ``left`` becomes our ``right``, its
    ``right`` our ``left``; and formats of tool calls by names of its own. Keys that it lacks are
    left to our defaults; null is no limit. Keys that mean nothing here, such as ``enable``, are
    left out.

    Args:
        source: A YAML file, or what one holds (also an OmegaConf mapping): with
            ``actor_rollout_ref.rollout.multi_turn``, ``rollout.multi_turn`` or ``multi_turn``.

    Raises:
        ConfigError: It cannot be read, has no such section, or a value is not plain or unknown.
    """
    if isinstance(source, Mapping):
        label, config = "", source
    else:
        label, config = f"{source}: ", read_yaml(source, ConfigError)
    place, section = _section(config, label)
    found = {str(key): section[key] for key in section}
    paths = ("tool_config_path", "function_tool_path", "interaction_config_path")
    used = {key: found[key] for key in (*_SAME, *_TRANSLATED, *paths) if key in found}
    refuse_interpolation(used, f"{label}{place}", ConfigError)
    settings: dict[str, dict[str, Any]] = {}
    for key, (ours, name) in _SAME.items():
        if key in used:
            settings.setdefault(ours, {})[name] = used[key]
    for key, (ours, name, translate) in _TRANSLATED.items():
        if key in used:
            try:
                settings.setdefault(ours, {})[name] = translate(used[key])
            except ValueError as error:
                raise ConfigError(f"{label}{place}.{key} = {used[key]!r:.80}: {error}") from None
    return VerlMultiTurn(settings=settings, **{path: used.get(path) for path in paths})


def _section(config: Any, label: str) -> tuple[str, Mapping[str, Any]]:
    for place in _PLACES:
        value = config
        for key in place.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping):
            return place, value
    raise ConfigError(f"{label}no section {' or '.join(_PLACES)}; expected one of verl's")


def _side(value: Any) -> str:
    try:
        return SIDES_BY_VERL[value]
    except (LookupError, TypeError):
        raise ValueError("expected 'left', 'right' or 'middle'") from None


def _history(value: Any) -> str:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return "inference_template" if value else "append_only"


#: Our names of verl's formats, where these differ.
_FORMATS = {
    "gemma4": "gemma",
    "glm": "glm4",
    "gpt-oss": "gpt_oss",
    "kimi": "kimi_k2",
    "llama3_json": "llama3",
    "minimax": "minimax_m2",
    "seed": "seed_oss",
}


def _format(value: Any) -> Any:
    return _FORMATS.get(value, value) if isinstance(value, str) else value


_TRANSLATED = {
    "format": ("agent", "tool_format", _format),
    "tool_response_truncate_side": ("tools", "truncate_side", _side),
    "use_inference_chat_template": ("agent", "history", _history),
}
