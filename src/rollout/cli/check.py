"""What would keep a configuration from running here, found without starting anything."""

from __future__ import annotations

import importlib.util
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.agents import get_agent
from rollout.chat import tool_parser_names
from rollout.chat.template_loading import holds_tokenizer
from rollout.cli.gpus import gpu_faults
from rollout.cli.memory import batch_fault, memory_faults
from rollout.cli.sizing import context_tokens
from rollout.config.engines import SIMULATED_MODEL
from rollout.engine.model_files import model_path_fault
from rollout.engine.pool.opening import build_core_spec
from rollout.errors import AgentError, ConfigError, EngineError, SandboxError
from rollout.interactions import InteractionRegistry
from rollout.journal.log_file import find_path_fault
from rollout.observe.event_file import EVENTS
from rollout.runtime.opening import needs_sandbox
from rollout.sandbox.providers import open_provider
from rollout.scheduling.selection import find_accept
from rollout.tools.builtin import make_shipped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollout.config import ModelConfig, RolloutConfig
    from rollout.tools import Tool


def config_faults(
    config: RolloutConfig, interactions: Sequence[Any] = (), *, asks_for_gpus: bool = False
) -> list[str]:
    """What is missing or unknown here, each fault with its key and what was expected.

    Looks at files, names and installed packages; imports no engine and asks no network.

    Args:
        config: A configuration without faults of its own.
        interactions: The simulated users that will be given to `open_rollout`.
        asks_for_gpus: Have the engines' interpreter count them where there is a driver, which takes
            seconds.
    """
    faults = [
        *_model_faults(config),
        *_opening_faults(config),
        *_package_faults(config),
        *gpu_faults(config, asks=asks_for_gpus),
        *memory_faults(config, asks=asks_for_gpus),
        *_length_faults(config),
        *_name_faults(config, interactions),
        *_group_and_file_faults(config),
    ]
    return list(dict.fromkeys(faults))


def _model_faults(config: RolloutConfig) -> Iterator[str]:
    model, kind = config.model, config.engine.kind
    if model.path != SIMULATED_MODEL == config.engine.default_model:
        yield f"model.path = {model.path!r}: engine.kind = {kind!r} expects {SIMULATED_MODEL!r}"
    elif model.path != SIMULATED_MODEL:
        needs_weights = config.engine.loads_weights
        fault = model_path_fault(model.path, model.revision, needs_weights=needs_weights)
        if fault is not None:
            yield fault
        elif not needs_weights and _lacks_tokenizer(Path(model.path).expanduser()):
            yield f"model.path = {model.path!r}: the directory holds no tokenizer"
    yield from _template_faults(model)


def _lacks_tokenizer(folder: Path) -> bool:
    return os.path.isdir(folder) and not holds_tokenizer(folder)


def _template_faults(model: ModelConfig) -> Iterator[str]:
    if model.chat_template is None:
        return
    try:
        Path(model.chat_template).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        yield f"model.chat_template = {model.chat_template!r}: not UTF-8: {error.reason}"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or error
        yield f"model.chat_template = {model.chat_template!r}: {why}"


def _opening_faults(config: RolloutConfig) -> Iterator[str]:
    try:
        build_core_spec(config, 0)
    except (EngineError, ConfigError) as error:
        yield str(error)


def _package_faults(config: RolloutConfig) -> Iterator[str]:
    """Packages that are missing in the interpreter that runs the engines, where it is this one."""
    if config.placement.kind == "ray" and not is_importable("ray"):
        yield "placement.kind = 'ray' needs the package ray: pip install 'rollout-rl[ray]'"
    python = getattr(config.placement, "python", None)
    if python is not None:
        if config.placement.kind != "ray" and shutil.which(python) is None:
            yield f"placement.python = {python!r}: no such interpreter"
        return
    for package, fault in config.engine.needed_packages().items():
        if not is_importable(package):
            yield fault


def _length_faults(config: RolloutConfig) -> Iterator[str]:
    """A prompt that may be as long as the context would leave no room for an answer."""
    context, longest = context_tokens(config), config.lengths.prompt
    if context is not None and longest >= context:
        yield (
            f"lengths.prompt = {longest}: expected less than the engine's context of {context} "
            "tokens, which an answer must fit into as well"
        )
    if (fault := batch_fault(config)) is not None:
        yield fault


def _group_and_file_faults(config: RolloutConfig) -> Iterator[str]:
    try:
        find_accept(config.scheduling.groups.accept)
    except ConfigError as error:
        yield str(error)
    observe = config.observe.path
    events = None if observe is None else find_path_fault(Path(observe, EVENTS), "observe", observe)
    journal = None if config.journal.file is None else find_path_fault(config.journal.file)
    yield from filter(None, (events, journal))


def is_importable(name: str) -> bool:
    """Whether there is a module of this name; it is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a parent package is missing, or a module is half made
        return False


async def look_at_sandbox(config: RolloutConfig, tools: Sequence[Tool]) -> tuple[str, list[str]]:
    """Who makes sandboxes here, or why nobody does; and the faults of what needs one.

    Args:
        config: Names the provider.
        tools: Those that are given beside ``tools.builtin``.
    """
    try:
        async with open_provider(
            config.sandbox.provider, **config.sandbox.provider_options
        ) as provider:
            return provider.name, []
    except (SandboxError, ConfigError) as error:
        fault = str(error)
    builtin = make_shipped([name for name in config.tools.builtin if name != "search"])
    is_needed = config.sandbox.provider != "auto" or bool(config.sandbox.warm)
    with suppress(AgentError):  # there is no such agent, which is another fault
        is_needed = is_needed or needs_sandbox(config.agent.name, [*builtin, *tools])
    return ("none can be made here", [fault]) if is_needed else (fault, [])


def _name_faults(config: RolloutConfig, interactions: Sequence[Any]) -> Iterator[str]:
    agent = config.agent
    try:
        get_agent(agent.name)
    except AgentError as error:
        yield f"agent.name = {agent.name!r}: {error}"
    if agent.tool_format not in tool_parser_names():
        known = ", ".join(tool_parser_names())
        yield f"agent.tool_format = {agent.tool_format!r}: unknown; known: {known}"
    if agent.interaction is not None:
        try:
            InteractionRegistry(interactions).check(agent.interaction)
        except ConfigError as error:
            yield f"agent.interaction = {agent.interaction!r}: {error}"
