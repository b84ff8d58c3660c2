"""The parts of a runtime, made from its configuration."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from rollout.agents import get_agent
from rollout.chat import ChatTemplate, get_tool_parser, load_chat_template, tool_parser_names
from rollout.chat.loading import with_template
from rollout.engine.model_files import resolve_model
from rollout.errors import AgentError, ConfigError, EngineError
from rollout.lazy import importing
from rollout.tools import ToolExecutor
from rollout.tools.shipped import shipped_tools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.bridge import WorkerThreads
    from rollout.chat import ToolParser
    from rollout.config import ModelConfig, RolloutConfig, ToolsConfig
    from rollout.engine.driver.pool import EnginePool
    from rollout.interactions import InteractionRegistry
    from rollout.tools import Tool

logger = logging.getLogger("rollout")

#: Path of the model that `rollout.testing` simulates: a byte-level tokenizer, no files.
SIMULATED_MODEL = "simulated"


def tool_executor(
    config: RolloutConfig, tools: Sequence[Any], threads: WorkerThreads
) -> ToolExecutor:
    """The tools, checked and ready to open sessions.

    Raises:
        ToolError: One is defined wrongly, or two share a name.
    """
    return ToolExecutor(
        tools,
        threads=threads,
        max_parallel_calls=config.agent.max_parallel_calls,
        max_response_length=config.tools.max_response_length,
        truncate_side=config.tools.truncate_side,
        tool_s=config.limits.tool_s,
        cleanup_s=config.limits.cleanup_s,
        max_processes=config.tools.max_processes,
    )


async def builtin_tools(tools: ToolsConfig) -> list[Tool]:
    """The shipped tools that a configuration names; a corpus is read in a thread.

    Raises:
        ToolError: It cannot be read.
    """
    make = functools.partial(
        shipped_tools, tools.builtin, isolation=tools.isolation, corpus=tools.search_corpus
    )
    if not tools.search_corpus:
        return make()
    return await anyio.to_thread.run_sync(make, abandon_on_cancel=True)


def tool_parser(config: RolloutConfig, registry: InteractionRegistry) -> ToolParser:
    """The parser that the configuration names, once its other names are known to be good.

    Raises:
        ConfigError: The agent, the interaction or the tool format is unknown.
    """
    try:
        get_agent(config.agent.name)
    except AgentError as error:
        raise ConfigError(f"agent.name = {config.agent.name!r}: {error}") from None
    if config.agent.interaction is not None and config.agent.interaction not in registry.names:
        known = ", ".join(registry.names) or "none"
        raise ConfigError(
            f"agent.interaction = {config.agent.interaction!r}: not among the interactions "
            f"given to open_rollout ({known})"
        )
    if config.agent.tool_format not in tool_parser_names():
        known = ", ".join(tool_parser_names())
        raise ConfigError(
            f"agent.tool_format = {config.agent.tool_format!r}: unknown; known: {known}"
        )
    return get_tool_parser(config.agent.tool_format)


async def load_template(config: RolloutConfig, threads: WorkerThreads) -> ChatTemplate:
    """The tokenizer and chat format of the configuration's model.

    Raises:
        TemplateError, EngineError: They cannot be loaded.
    """
    model = config.model
    if model.path == SIMULATED_MODEL:  # inline: a thread would let virtual time run away from it
        _import_tensors()
        if model.chat_template is None and not model.chat_template_kwargs:
            return _simulated_template()
        return _other_simulated_template(model)
    return await threads.run("tokenizer", _load_tokenizer, model)


@functools.cache
def _simulated_template() -> ChatTemplate:
    """One for all runtimes: harnesses open thousands of them."""
    from rollout.engine.cores.simulated.tokenizer import simulated_tokenizer

    return ChatTemplate(simulated_tokenizer())


def _other_simulated_template(model: ModelConfig) -> ChatTemplate:
    from rollout.engine.cores.simulated.tokenizer import simulated_tokenizer

    return with_template(
        simulated_tokenizer(),
        chat_template_path=model.chat_template,
        chat_template_kwargs=model.chat_template_kwargs,
    )


def _import_tensors() -> None:
    """Import what `generate` needs in the end: torch, which would block the loop there."""
    with importing:
        import rollout.batch  # noqa: F401


def _load_tokenizer(model: ModelConfig) -> ChatTemplate:
    _import_tensors()
    return load_chat_template(
        resolve_model(model.path, model.revision),
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        chat_template_path=model.chat_template,
        chat_template_kwargs=model.chat_template_kwargs,
    )


def check_fit(template: ChatTemplate, engines: EnginePool) -> None:
    """An engine of another model would answer with ids that mean something else.

    Raises:
        EngineError: The tokenizer has ids that the engine does not know.
    """
    if template.vocab_size > engines.info.vocab_size:
        raise EngineError(
            f"the tokenizer knows {template.vocab_size} ids, the engine's model "
            f"{engines.info.vocab_size}: they do not belong together"
        )
    if template.eos_token_id not in engines.info.eos_ids:
        logger.warning(
            "the tokenizer's end token %s is not among the engine's %s; it is sent as a stop "
            "token with each request",
            template.eos_token_id,
            engines.info.eos_ids,
        )
