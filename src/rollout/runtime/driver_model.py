"""What the driver loads of a model: tokenizer, chat format, and what engines must agree with."""

from __future__ import annotations

import functools
import logging
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio
import attrs

from rollout.chat import ChatTemplate
from rollout.config.engines import SIMULATED_MODEL
from rollout.engine.channel.messages import ClientExpectations
from rollout.engine.model_files import end_ids, model_fingerprint, resolve_model
from rollout.engine.pool.model_template import load_model_template
from rollout.engine.pool.opening import fixed_fingerprint
from rollout.errors import TemplateError
from rollout.scopes import open_task_group
from rollout.worker_threads import may_leave_loop

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

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


@asynccontextmanager
async def loading_driver_model(
    config: RolloutConfig, threads: WorkerThreads
) -> AsyncIterator[Callable[[], Awaitable[DriverModel]]]:
    """Load the model of a configuration beside the block, which awaits it by what this yields.

    Raises:
        TemplateError, EngineError: Its tokenizer or chat format cannot be loaded.
    """
    async with open_task_group() as tasks:
        loading = tasks.start_soon(_load, config, threads)

        async def wait() -> DriverModel:
            await loading.wait()
            try:
                return loading.return_value
            except anyio.TaskFailed as error:  # as itself
                raise (error.__cause__ or error) from None

        yield wait


async def _load(config: RolloutConfig, threads: WorkerThreads) -> DriverModel:
    if config.model.path == SIMULATED_MODEL and not may_leave_loop():
        return _load_now(config)
    return await threads.run("tokenizer", _load_now, config)


def _load_now(config: RolloutConfig) -> DriverModel:
    template = load_model_template(config)
    model = DriverModel(template, _make_expectations(template, config))
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


def _make_expectations(template: ChatTemplate, config: RolloutConfig) -> ClientExpectations:
    """Whatever the engine, its vocabulary must hold the tokenizer's.

    Engines of ours read their end tokens and fingerprint off the same model; what others call
    themselves, and where they end, is their own affair.
    """
    engine, model = config.engine, config.model
    ends, fingerprint = set[int](), ""
    if engine.loads_weights:
        directory = resolve_model(model.path, model.revision)
        ends = set(end_ids(directory, model.revision))
        fingerprint = model_fingerprint(directory, model.revision)
    else:
        fingerprint = fixed_fingerprint(engine)
    if fingerprint and template.eos_token_id is not None:
        ends.add(template.eos_token_id)
    return ClientExpectations(
        vocab_size=template.vocab_size,
        eos_ids=tuple(sorted(ends)),
        fingerprint=fingerprint,
        remedy=(
            f"model.path = {model.path!r} is another model than the engine's; expected the "
            f"directory or hub name of that one ({SIMULATED_MODEL!r} for engine.kind = "
            "'simulated'), and the same files on the driver's machine and on the engine's"
        ),
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
