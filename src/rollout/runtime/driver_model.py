"""What the driver loads of a model: tokenizer, chat format, and what engines must agree with."""

from __future__ import annotations

import functools
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs

from rollout.chat import ChatTemplate
from rollout.config import CustomEngine, SimulatedEngine
from rollout.config.sections import SIMULATED_MODEL
from rollout.engine.channel.messages import ClientExpectations
from rollout.engine.cores.simulated.vocabulary import FINGERPRINT
from rollout.engine.model_files import resolve_model
from rollout.engine.model_identity import end_ids, model_fingerprint
from rollout.engine.pool.model_template import load_model_template
from rollout.errors import TemplateError
from rollout.worker_threads import may_leave_loop

if TYPE_CHECKING:
    from rollout.config import RolloutConfig
    from rollout.engine.core import EngineInfo
    from rollout.worker_threads import WorkerThreads

logger = logging.getLogger("rollout")


@attrs.frozen
class DriverModel:
    """The model as the driver knows it.

    Attributes:
        template: Its tokenizer and chat format.
        facts: What engines refuse the driver for, where they know better.
    """

    template: ChatTemplate
    facts: ClientExpectations


async def load_driver_model(config: RolloutConfig, threads: WorkerThreads) -> DriverModel:
    """The model of a configuration.

    Raises:
        TemplateError, EngineError: Its tokenizer or chat format cannot be loaded.
    """
    if config.model.path == SIMULATED_MODEL and not may_leave_loop():
        return _load(config)
    return await threads.run("tokenizer", _load, config)


def _load(config: RolloutConfig) -> DriverModel:
    template = load_model_template(config)
    model = DriverModel(template, _facts(template, config))
    _prepare(template)
    if config.journal.path is not None:
        template.fingerprint  # noqa: B018  # takes a while with a large vocabulary, and is kept
    import rollout.batch  # noqa: F401  # torch, here and last: engines need what comes before

    return model


def _prepare(template: ChatTemplate) -> None:
    """Have the template find out what the first conversations would wait for, on the loop.

    Text with room for one token only makes it look at how few tokens a text can have.
    """
    question = [{"role": "user", "content": "a question"}]
    result = [{"role": "tool", "content": "a result", "tool_call_id": "call_0"}]
    for prepare in (
        functools.partial(template.prompt_ids, question, max_tokens=1),
        functools.partial(template.prompt_ids, question),
        functools.partial(template.observation_ids, question, after=None),
        functools.partial(template.observation_ids, result, after=None),
    ):
        with suppress(TemplateError):  # it takes other conversations
            prepare()


def _facts(template: ChatTemplate, config: RolloutConfig) -> ClientExpectations:
    """Whatever the engine, its vocabulary must hold the tokenizer's.

    Engines of ours read their end tokens and fingerprint off the same model; what others call
    themselves, and where they end, is their own affair.
    """
    engine, model = config.engine, config.model
    path = repr(model.path)
    ends: set[int] = set()
    fingerprint = ""
    if engine.loads_weights:
        directory = resolve_model(model.path, model.revision)
        ends = set(end_ids(directory, model.revision))
        fingerprint = model_fingerprint(directory, model.revision)
        remedy = (
            f"expected model.path = {path} to hold tokenizer and weights of one model, and "
            "the same files on the driver's machine and on the engine's"
        )
    elif isinstance(engine, SimulatedEngine):
        fingerprint = FINGERPRINT
        remedy = (
            f"model.path = {path} is another model than that of engine.kind = 'simulated'; "
            f"expected {SIMULATED_MODEL!r}, or leave it out"
        )
    else:
        served = "the servers of engine.urls serve"
        if isinstance(engine, CustomEngine):
            served = f"engine.core = {engine.core!r} serves"
        remedy = (
            f"model.path = {path} is another model than {served}; set it to the directory or hub "
            "name of that one"
        )
    has_ends = engine.loads_weights or isinstance(engine, SimulatedEngine)
    if has_ends and template.eos_token_id is not None:
        ends = {*ends, template.eos_token_id}
    return ClientExpectations(
        vocab_size=template.vocab_size,
        eos_ids=tuple(sorted(ends)),
        fingerprint=fingerprint,
        remedy=remedy,
    )


def warn_of_end_token(template: ChatTemplate, info: EngineInfo) -> None:
    """Say so where the model's turns end with another token than its tokenizer's."""
    if template.eos_token_id is not None and template.eos_token_id not in info.eos_ids:
        logger.warning(
            "the tokenizer's end token %s is not among the engine's %s; it is sent as a stop "
            "token with each request",
            template.eos_token_id,
            info.eos_ids,
        )
