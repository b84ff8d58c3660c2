"""Functions as agents: ``@rollout.agent``, for code that speaks HTTP with the gateway."""

from __future__ import annotations

import base64
import functools
import inspect
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

import msgspec

from rollout.agents.agent_loop import AgentLoop, find_call_fault, register_agent
from rollout.agents.ending import RejectedPrompt
from rollout.chat.messages import as_messages, template_messages, with_arguments_as_text
from rollout.chat.result_order import order_messages
from rollout.chat.reward_values import as_reward
from rollout.errors import AgentError, MediaError, TemplateError
from rollout.media import Media
from rollout.medium import FRAMES_MIME
from rollout.sandbox.trajectory_sandbox import TrajectorySandbox
from rollout.types import Prompt
from rollout.worker_threads import is_async

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.agents.context import AgentContext
    from rollout.agents.services import GatewayAddress

Backend = Literal["asyncio", "native"]
Function = TypeVar("Function", bound="Callable[..., Any]")

#: The share of `limits.cleanup_s` that a cancelled sync function has to return: its next request
#: gets a final error. Then its thread is abandoned, before the trajectory itself would be.
_PATIENCE = 0.5
#: What the watchdog says to an author whose agent blocks the loop that it runs on.
_REMEDY = "use AsyncOpenAI, or another async client, or make the agent a plain def"


class AgentTask(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory, as a function or a program that speaks HTTP is told of it.

    Attributes:
        base_url: Of the trajectory's own endpoint; ends in ``/v1``, as OpenAI's clients want it.
        root_url: The same without ``/v1``, as Anthropic's want it.
        api_key: The trajectory's own.
        model: Name of the model there.
        prompt: What the trajectory starts from. The model is told nothing of it by itself.
        messages: The prompt's as dicts of the OpenAI chat format, for ``messages=``.
        extra: Becomes the trajectory's `extra`; starts as the prompt's. Rewards see it.
        uid: The prompt's uid.
        member: Position within the group.
        sandbox: The trajectory's; see `AgentContext.sandbox`.
    """

    base_url: str
    root_url: str
    api_key: str
    model: str
    prompt: Prompt
    messages: list[dict[str, Any]]
    extra: dict[str, Any]
    uid: str
    member: int
    sandbox: TrajectorySandbox = msgspec.field(default_factory=TrajectorySandbox)

    if not TYPE_CHECKING:  # for type checkers it has no other attributes

        def __getattr__(self, name: str) -> Any:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in ("generate", "call_tools", "observe", "transcript", "tools"):
                text += (
                    ": a function of @rollout.agent speaks HTTP with the model, at task.base_url; "
                    f"context.{name} is for a class, `class Mine(rollout.AgentLoop)` with "
                    "`async def run(self, context)`"
                )
            raise AttributeError(text)

    @classmethod
    async def of(cls, context: AgentContext, address: GatewayAddress) -> AgentTask:
        """The task of a trajectory that is served at `address`.

        Raises:
            RejectedPrompt: The prompt's messages are malformed.
        """
        messages = await openai_messages(context)
        return cls(
            base_url=address.base_url,
            **msgspec.structs.asdict(address),
            prompt=context.prompt,
            messages=messages,
            extra=context.extra,
            uid=context.identity.uid,
            member=context.identity.member,
            sandbox=context.sandbox,
        )


class FunctionAgent(AgentLoop):
    """Runs a function against the trajectory's own endpoint of the gateway; see `agent`.

    Attributes:
        name: Of the agent.
        function: ``(task) -> float | None``.
        backend: Where an async one runs.
    """

    needs_gateway = True
    is_shared = True

    def __init__(self, name: str, function: Callable[..., Any], backend: Backend) -> None:
        self.name, self.function, self.backend = name, function, backend
        functools.update_wrapper(cast("Any", self), function, updated=())

    async def run(self, context: AgentContext) -> None:
        """Serve the trajectory while the function runs; what it returns is its reward."""
        async with context.gateway.open(context) as address:
            value = await self._call(context, await AgentTask.of(context, address))
        if value is not None:
            context.reward = as_reward(value, f"the agent {self.name!r}")

    async def _call(self, context: AgentContext, task: AgentTask) -> Any:
        threads, cleanup_s = context.services.threads, context.services.config.limits.cleanup_s
        what, value = f"agent {self.name!r}", None
        remedy = _REMEDY  # noqa: F841  (see observe.blocking_code)
        if not is_async(self.function):
            patience_s = cleanup_s * _PATIENCE
            value = await threads.run_beside(what, self.function, task, patience_s=patience_s)
            if not inspect.isawaitable(value):
                return value  # else it wraps an async function

        async def call() -> Any:
            return await (self.function(task) if value is None else value)

        if self.backend == "native":
            return await call()

        async def job() -> Any:
            # What the watchdog says of the code that blocks this loop, which is not the runtime's.
            activity, remedy = f"{what} of {context.identity}", _REMEDY  # noqa: F841
            return await call()

        return await threads.run_asyncio(what, job, is_apart=True)


def agent(name: str, *, backend: Backend = "asyncio") -> Callable[[Function], Function]:
    """Decorator: prompts with ``agent_name=name``, or ``agent.name``, run this function.

    It takes an `AgentTask` and returns the trajectory's reward or None; a reward function of
    `open_rollout` decides in its place. What it raises fails its trajectory alone. It needs a
    gateway: see `rollout.open_gateway`.

    Args:
        name: Of the agent.
        backend: Where an async function runs: "asyncio" in the runtime's asyncio thread, beside the
            runtime's loop, where one that blocks holds up other such agents only; "native" on the
            runtime's loop itself. A sync function runs in a worker thread.

    Raises:
        AgentError: The name is taken, the backend unknown, or it is no function of one argument.
    """
    if backend not in get_args(Backend):
        known = " or ".join(map(repr, get_args(Backend)))
        raise AgentError(f"agent({name!r}): backend = {backend!r}; expected {known}")

    def register(function: Function) -> Function:
        _check(name, function)
        register_agent(name)(FunctionAgent(name, function, backend))
        return function

    return register


def _check(name: str, function: Any) -> None:
    expected = "expected a function of one argument, the task"
    if not callable(function) or isinstance(function, type):
        raise AgentError(f"agent({name!r}): {function!r:.80}; {expected}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise AgentError(f"agent({name!r}): {function!r:.80} is a generator; {expected}")
    fault = find_call_fault(function, None)
    if fault:
        raise AgentError(f"agent({name!r}): {fault}; {expected}")


async def openai_messages(context: AgentContext) -> list[dict[str, Any]]:
    """Those of the trajectory's prompt; images and videos in them as data URLs.

    Raises:
        RejectedPrompt: They are malformed, or a medium in them cannot be taken.
    """
    media = context.services.media
    try:
        given = await media.prepare(context.prompt.messages, is_shared=True)
        messages = with_arguments_as_text(template_messages(order_messages(as_messages(given))))
        return [
            {**each, "content": await media.run(list, map(_part, each["content"]))}
            if isinstance(each["content"], list)
            else each
            for each in messages
        ]
    except TemplateError as error:
        raise RejectedPrompt("bad_message", str(error)) from error


def _part(part: dict[str, Any]) -> dict[str, Any]:
    medium = part.get(part["type"])
    if not isinstance(medium, Media):
        return part
    if medium.mime == FRAMES_MIME:
        raise MediaError("frames have no form in OpenAI's API: give a video file")
    url = f"data:{medium.mime};base64,{base64.b64encode(medium.content).decode()}"
    kind = f"{medium.kind}_url"
    return {"type": kind, kind: {"url": url}}
