"""Opens a runtime: tools, templates and engines, put together and taken apart in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from typing import TYPE_CHECKING, Any, NoReturn

import anyio

from rollout.agents import AgentLoop, get_agent
from rollout.agents.agent_loop import find_class
from rollout.agents.media_intake import MediaFetcher, MediaIntake
from rollout.agents.prompt_sampling import make_sampling
from rollout.agents.services import Services
from rollout.chat import get_tool_parser, tool_parser_names
from rollout.config import RolloutConfig
from rollout.containment import open_containment
from rollout.engine.cores.checks import find_sampling_fault
from rollout.engine.pool.opening import open_engines
from rollout.engine.pool.pool import EnginePool, ExpectationsGiver
from rollout.errors import AgentError, ConfigError, RolloutError
from rollout.interactions import InteractionRegistry
from rollout.journal.journal import choose_run_seed, open_journal
from rollout.observe.event_stream import EventStream
from rollout.observe.loop_lag import LoopLag
from rollout.observe.tally import Tally
from rollout.runtime.collector import collecting_seldom
from rollout.runtime.driver_model import loading_driver_model, warn_of_end_token
from rollout.runtime.gateway_opening import serve_gateway
from rollout.runtime.observing import open_observers
from rollout.runtime.runtime import RolloutRuntime
from rollout.scheduling.rewards.functions import GivenRewards, load_rewards
from rollout.scheduling.rewards.processes import open_reward_processes
from rollout.scheduling.selection import find_accept
from rollout.scheduling.tokenization import TokenizationCheck
from rollout.scheduling.trajectory import TrajectoryRunner
from rollout.tools import Tool, ToolExecutor
from rollout.tools.builtin import make_shipped
from rollout.tools.tool import open_tools
from rollout.user_code import refuse_while_imported
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rollout.chat import ChatTemplate, ToolParser
    from rollout.engine.channel.messages import ClientExpectations
    from rollout.engine.core import EngineInfo
    from rollout.scheduling.rewards.functions import GroupRewardFunction, RewardFunction


EngineOpener = Callable[
    [RolloutConfig, ExpectationsGiver, EventStream], AbstractAsyncContextManager[EnginePool]
]


def open_rollout(
    config: RolloutConfig,
    tools: Sequence[Any] = (),
    reward: RewardFunction | str | None = None,
    interactions: Sequence[Any] = (),
    *,
    group_reward: GroupRewardFunction | str | None = None,
    media_fetcher: MediaFetcher | None = None,
    resume: bool = False,
) -> AbstractAsyncContextManager[RolloutRuntime]:
    """A runtime with its engines serving; nothing of it is left when the block has been left.

    Args:
        config: See `rollout.config`.
        tools: Tools offered to the model beside those of ``tools.builtin``: `Tool` objects,
            functions, which become one, or async context managers that have a list of tools, such
            as `connect_mcp`, opened and closed with the runtime.
        reward: ``reward(trajectory) -> float | Reward``, or verl's ``compute_score(data_source,
            solution_str, ground_truth, extra_info)``, told by its parameters' names; sync (runs in
            a thread) or async. A mapping with a ``score`` is a reward too. Or its name,
            ``"package.module:name"``. `rewards` of the configuration says where it is called.
        interactions: Factories of simulated users, found by their names.
        group_reward: ``group_reward(group)`` with a `Group` whose members have all ended, after
            `reward`; it returns one ``float | Reward | None`` for each, in their order. As
            `reward` otherwise.
        media_fetcher: ``media_fetcher(url) -> bytes``, sync (runs in a thread) or async: gets what
            parts of messages name by http(s). None: nothing is fetched, and such parts are refused.
        resume: Continue the run of `journal.path`, where there is one: what it has finished is
            returned as it was, and what it has not resumes from there; see ``docs/journal.md``.

    Raises:
        ConfigError: The journal is of another model, configuration or prompt file, or is there and
            not to be resumed, or cannot be written; or there is no `scheduling.groups.accept`.
        ConfigError: The agent, the tool format or an interaction of the configuration is unknown,
            a reward function cannot be called like that, or not in `rewards.processes`, or the
            engines cannot do what `sampling` asks of them.
        ToolError: A tool is defined wrongly or cannot run here, or two share a name.
        SandboxUnavailable: The agent, a tool or the reward needs a sandbox, or `sandbox` names a
            provider or warm ones, and there can be none here.
        EngineError: An engine did not start, or refused to serve with this tokenizer.
    """
    refuse_while_imported("open_rollout")
    rewards = GivenRewards(reward, group_reward)
    return _Opening(
        open_rollout_on(
            open_engines,
            config,
            tools,
            rewards,
            interactions,
            media_fetcher=media_fetcher,
            resume=resume,
        )
    )


#: What those read who use a runtime before it is open.
HOW_TO_OPEN = "write `async with rollout.open_rollout(...) as runtime:`"


class NotEnteredError(RolloutError, AttributeError):
    """A runtime is used otherwise than in the block of a `with` statement."""


class _Opening(AbstractAsyncContextManager[RolloutRuntime]):
    """Opens a runtime for ``async with``; used otherwise, it says how it is entered."""

    def __init__(self, manager: AbstractAsyncContextManager[RolloutRuntime]) -> None:
        self._manager, self._task = manager, 0

    async def __aenter__(self) -> RolloutRuntime:
        self._task = anyio.get_current_task().id
        return await self._manager.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:
        if anyio.get_current_task().id != self._task:  # of a tool, which closing would wait for
            raise RolloutError(
                f"open_rollout is left by a task that has not entered it; {HOW_TO_OPEN}"
            )
        return await self._manager.__aexit__(*error)

    def __enter__(self) -> NoReturn:
        raise NotEnteredError(f"open_rollout is entered by `with`; {HOW_TO_OPEN}")

    def __exit__(self, *_error: object) -> None:
        pass

    def _refuse_await(self) -> NoReturn:
        raise NotEnteredError(f"open_rollout is awaited; {HOW_TO_OPEN}")

    __await__ = _refuse_await

    def __getattr__(self, name: str) -> NoReturn:
        raise NotEnteredError(f"open_rollout(...).{name}: it must be entered first; {HOW_TO_OPEN}")


@asynccontextmanager
async def open_rollout_on(
    open_engines: EngineOpener,
    config: RolloutConfig,
    tools: Sequence[Any],
    rewards: GivenRewards,
    interactions: Sequence[Any],
    *,
    media_fetcher: MediaFetcher | None = None,
    resume: bool = False,
) -> AsyncIterator[RolloutRuntime]:
    """`open_rollout` on the engines that `open_engines` opens."""
    # What can be refused before anything starts.
    check_arguments(config, tools, interactions)
    loaded = load_rewards(rewards, config.rewards.processes)
    find_accept(config.scheduling.groups.accept)
    registry = InteractionRegistry(interactions)
    parser = find_parser(config, registry)
    async with AsyncExitStack() as stack:
        open_now = stack.enter_async_context
        journal = await open_now(open_journal(config, resume=resume))
        run_seed = choose_run_seed(config, journal)
        freeze = stack.enter_context(collecting_seldom(is_wanted=config.scheduling.freeze_heap))
        shipped = make_shipped(
            config.tools.builtin,
            search_url=config.tools.search_url or "",
            max_pictures=config.tools.max_pictures,
        )
        opened = await open_now(open_tools([*shipped, *tools]))

        # Where the code of users runs.
        tally, events = Tally(), EventStream()
        threads = WorkerThreads(
            max_threads=config.tools.max_threads,
            max_abandoned=config.tools.max_abandoned_threads,
            # Code that is contained is given up before that, and told where it waits.
            cleanup_s=2 * config.limits.cleanup_s,
            watch=LoopLag().watch,
        )
        stack.callback(threads.close)
        executor = make_executor(config, opened, threads, tally)
        stack.push_async_callback(executor.close)
        single, group = await open_now(open_reward_processes(config, loaded, threads))
        await executor.prepare()
        await check_agent(config.agent.name)

        # The model is loaded while the engines start, which compare its facts with theirs.
        tracer = await open_now(open_observers(config, events, run_seed))
        load_model = await open_now(loading_driver_model(config, threads))

        async def expect() -> ClientExpectations:
            return (await load_model()).facts

        engines = await open_now(open_engines(config, expect, events))
        containment = await open_now(open_containment(config.limits.cleanup_s))
        model = await load_model()
        template = model.template
        if tracer is not None:
            tracer.decode = template.decode
        warn_of_end_token(template, engines.info)
        check_abilities(config, engines.info)

        # What trajectories share, and what runs them.
        intake = MediaIntake(config.media, template.processor, media_fetcher, engines.media_fault)
        services = Services(
            config=config,
            engines=engines,
            template=template,
            parser=parser,
            stop_token_ids=list_stop_tokens(template, parser),
            tools=executor,
            interactions=registry,
            tally=tally,
            threads=threads,
            containment=containment,
            events=events,
            texts=WorkerThreads(),  # where no text waits for a tool
            media=stack.enter_context(closing(intake)),
        )
        runner = TrajectoryRunner(
            services=services,
            tokens=TokenizationCheck(
                config.agent.tokenization_check, config.agent.tokenization_ignore
            ),
            reward=single,
            group_reward=group,
        )
        if journal is not None:
            await open_now(journal.writing(services, model.facts.fingerprint, run_seed))
        runtime = RolloutRuntime(runner, run_seed, journal)
        is_needed = single is not None and single.takes_sandbox
        is_needed = is_needed or needs_sandbox(config.agent.name, opened)
        await open_now(services.sandboxes.serving(is_needed=is_needed))
        await open_now(serve_gateway(services))
        await open_now(runtime.serving())
        freeze()
        yield runtime


def check_arguments(config: Any, tools: Any, interactions: Any) -> None:
    """Check the types of what is given to `open_rollout`.

    Raises:
        ConfigError: One has another.
    """
    if not isinstance(config, RolloutConfig):
        how: dict[type, str] = {
            str: "rollout.load_config(path)",
            dict: "rollout.config_from_dict(values)",
        }
        hint = f"; {how[type(config)]} makes one" if type(config) in how else ""
        raise ConfigError(f"config: expected a RolloutConfig, got {type(config).__name__}{hint}")
    for name, value in (("tools", tools), ("interactions", interactions)):
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ConfigError(
                f"{name} = {value!r:.200}: expected a sequence, such as [one], () where there are "
                "none"
            )


def find_parser(config: RolloutConfig, registry: InteractionRegistry) -> ToolParser:
    """Return the parser that the configuration names, once its other names are known to be good.

    Raises:
        ConfigError: The agent, the interaction or the tool format is unknown.
    """
    name, interaction = config.agent.name, config.agent.interaction
    try:
        get_agent(name)
    except AgentError as error:
        raise ConfigError(f"agent.name = {name!r}: {error}") from None
    if interaction is not None and interaction not in registry.names:
        known = ", ".join(registry.names) or "none"
        raise ConfigError(
            f"agent.interaction = {interaction!r}: not among the interactions given to "
            f"open_rollout ({known})"
        )
    if config.agent.tool_format not in tool_parser_names():
        known = ", ".join(tool_parser_names())
        raise ConfigError(
            f"agent.tool_format = {config.agent.tool_format!r}: unknown; known: {known}"
        )
    return get_tool_parser(config.agent.tool_format)


async def check_agent(name: str) -> None:
    """Check that the agent of prompts that name none can run here.

    Raises:
        ConfigError: It says that it cannot.
    """
    agent = get_agent(name)
    if isinstance(agent, AgentLoop):  # else it has no settings to look at yet
        try:
            await agent.check()
        except AgentError as error:
            raise ConfigError(f"agent.name = {name!r}: {error}") from error


def check_abilities(config: RolloutConfig, info: EngineInfo) -> None:
    """Check that the engines can do what the configuration asks of every generation.

    Raises:
        ConfigError: They cannot.
    """
    for name in ("sampling", "validation_sampling"):
        sampling = make_sampling(config, validate=name != "sampling")
        fault = find_sampling_fault(sampling, info)
        if fault:
            raise ConfigError(fault.replace("sampling", name, 1))


def needs_sandbox(agent: str, tools: Sequence[Any]) -> bool:
    """Whether the agent of this name, or one of these tools, acts in the trajectory's sandbox."""
    return find_class(get_agent(agent)).needs_sandbox or any(
        isinstance(tool, Tool) and tool.needs_sandbox for tool in tools
    )


def make_executor(
    config: RolloutConfig,
    tools: Sequence[Any],
    threads: WorkerThreads,
    tally: Tally | None = None,
) -> ToolExecutor:
    """Check the tools, and return what opens their sessions.

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
        tally=tally,
    )


def list_stop_tokens(template: ChatTemplate, parser: ToolParser) -> tuple[int, ...]:
    """The ids that end a turn, in the template or in the tool-call format."""
    of_format = template.token_ids(getattr(parser, "stop_tokens", ()))
    return tuple(sorted({*template.stop_token_ids, *of_format}))
