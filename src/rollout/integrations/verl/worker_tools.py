"""The tools that verl's worker has loaded, as tools of ours: the same objects and functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.integrations.verl.function_tools import wrap_function
from rollout.integrations.verl.tools import VerlTool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.tools import Tool


def tools_of(worker: Any) -> list[Tool]:
    """verl's tools, their schemas whole.

    verl's own models of a schema drop what they have no field for (``items``, nested
    ``properties``, …): what a file or a function says is kept, in the order in which verl has it.
    """
    from verl.tools.function_tool import FunctionTool as VerlFunction

    written = _written(worker.rollout_config.multi_turn.tool_config_path)
    tools: list[Tool] = []
    for at, tool in enumerate(worker.tools):
        known = tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
        if isinstance(tool, VerlFunction):
            schema = _whole_schema(known, _inferred(tool))
            tools.append(wrap_function(tool.fn, tool.name, schema))
        else:
            given = written[at] if at < len(written) else None
            tools.append(VerlTool(tool, schema=_whole_schema(known, given or {})))
    return tools


def _written(path: str | None) -> Sequence[Mapping[str, Any] | None]:
    """The schemas in a tool configuration, one for each of its tools."""
    if not path:
        return ()
    from omegaconf import OmegaConf
    from verl.utils.import_utils import resolve_config_path

    data: Any = OmegaConf.to_container(OmegaConf.load(resolve_config_path(path)), resolve=True)
    return [entry.get("tool_schema") for entry in data["tools"]]


def _inferred(tool: Any) -> dict[str, Any]:
    """What a function says of itself; empty where its schema was given."""
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(tool.fn)
    except Exception:  # transformers asks for more than a function with a schema must have
        return {}
    schema["function"]["name"] = tool.name
    own = schema["function"]["parameters"].get("properties", {}).keys()
    shown = tool.tool_schema.function.parameters.properties.keys()
    return schema if own == shown else {}


def _whole_schema(known: dict[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """A schema as verl knows it, its parameters as they were said."""
    function = known["function"]
    parameters = (said.get("function") or {}).get("parameters") or {}
    whole = {**function, "parameters": _whole(function.get("parameters", {}), parameters)}
    return {**known, "function": whole}


def _whole(known: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """`known`, with what is beside it in `said` at any depth."""
    whole: dict[str, Any] = {}
    for name, value in known.items():
        beside = said.get(name)
        if isinstance(value, dict) and isinstance(beside, dict):
            whole[name] = _whole(value, beside)
        else:
            whole[name] = value
    return {**whole, **{name: value for name, value in said.items() if name not in known}}
