"""verl's agent loops in our runtime: what stands in the place of verl's client for them.

A loop runs on asyncio; its trajectory may live on trio. Each generation that it asks for crosses to
the runtime's loop, becomes a turn of the trajectory there, and its tokens cross back.
"""

from __future__ import annotations

import math
from array import array
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import attrs

from rollout.bridge import loop_poster, wait_future
from rollout.chat.trajectory import COMPACTION, SUBAGENT
from rollout.errors import AgentError, LimitExceeded
from rollout.integrations.verl.sessions import Asked
from rollout.scopes import open_task_group
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from anyio.abc import TaskGroup
    from anyio.streams.memory import MemoryObjectReceiveStream

    from rollout.agents import AgentContext
    from rollout.agents.turn import SampledTokens
    from rollout.config import LengthsConfig
    from rollout.integrations.verl.sessions import Sessions

#: Keys of verl's sampling parameters, by the keys of `sampling` that say the same.
_SAME = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "stop_token_ids": "stop_token_ids",
    "max_tokens": "max_new_tokens",
    "max_new_tokens": "max_new_tokens",
}
#: Keys that ask for what is there in any case.
_ALWAYS = ("logprobs",)


@attrs.define(eq=False)
class _Request:
    prompt_ids: array[int]
    asked: Asked
    future: Future[Any] = attrs.field(factory=Future)
    scope: anyio.CancelScope | None = None
    is_cancelled: bool = False

    def cancel(self) -> None:
        """On the runtime's loop."""
        self.is_cancelled = True
        if self.scope is not None:
            self.scope.cancel()


class HostedClient:
    """What a loop of verl's has as ``server_manager``; its other attributes are verl's client's.

    Args:
        context: The loop's trajectory.
        client: verl's own.
        sessions: None where engines of ours generate, which take tokens and sampling only.
        log_probs: Whether verl is told log-probs.
    """

    def __init__(
        self,
        context: AgentContext,
        client: Any,
        sessions: Sessions | None,
        *,
        log_probs: bool,
    ) -> None:
        self._context, self._client = context, client
        self._sessions = sessions
        self._log_probs = log_probs
        self._opened: list[AgentContext] = []
        self._busy: set[AgentContext] = set()
        self._post = loop_poster()
        self._inbox, self._requests = anyio.create_memory_object_stream[_Request](math.inf)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(
        self,
        request_id: Any,
        *,
        prompt_ids: Any,
        sampling_params: Mapping[str, Any],
        **options: Any,
    ) -> Any:
        """See verl's ``LLMServerClient.generate``; awaited on asyncio, by the loop.

        Tokens that do not continue what the trajectory has open begin a segment of their own.
        Where a length leaves no room for a token, the answer is empty.
        """
        asked = Asked(request_id=str(request_id), sampling_params=sampling_params, options=options)
        request = _Request(array("i", prompt_ids), asked)
        self._post(lambda: self._accept(request))
        try:
            return await wait_future(request.future)
        except BaseException:
            self._post(request.cancel)
            raise

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Answer the loop's requests in this block, on the runtime's loop."""
        async with open_task_group() as tasks, self._inbox:
            tasks.start_soon(self._serve, self._requests, tasks)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    def _accept(self, request: _Request) -> None:
        """On the runtime's loop, but in no task of it."""
        try:
            self._inbox.send_nowait(request)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            request.future.set_exception(AgentError("the trajectory has ended"))

    async def _serve(self, requests: MemoryObjectReceiveStream[_Request], tasks: TaskGroup) -> None:
        async with requests:
            async for request in requests:
                tasks.start_soon(self._answer, request)

    async def _answer(self, request: _Request) -> None:
        try:
            with anyio.CancelScope() as request.scope:
                if not request.is_cancelled:
                    request.future.set_result(await self._generate(request))
        except Exception as error:
            request.future.set_exception(error)
        finally:
            if not request.future.done():
                request.future.set_exception(AgentError("the generation was cancelled"))

    async def _generate(self, request: _Request) -> Any:
        asked = request.asked
        try:
            conversation = await self._conversation_of(request.prompt_ids)
            if self._sessions is not None:
                self._sessions.ask(conversation.session_id, asked)
            self._busy.add(conversation)
            try:
                sampled = await conversation.generate_ids(
                    request.prompt_ids, self._sampling(asked.sampling_params or {})
                )
            finally:
                self._busy.discard(conversation)
        except LimitExceeded as error:
            if error.outcome is not Outcome.LENGTH:
                raise
            return self._output(None, None)
        answer = None
        if self._sessions is not None:
            answer = self._sessions.answer(conversation.session_id)
        return self._output(sampled, answer)

    async def _conversation_of(self, ids: array[int]) -> AgentContext:
        """The conversation that these ids continue: the longest one that is idle, or a new one."""
        main = self._context
        if not main.transcript:
            await self._context.begin(ids=ids)
            return main
        packed = ids.tobytes()
        known = [main, *self._opened]
        fitting = [
            each
            for each in known
            if each not in self._busy and packed.startswith(each.transcript.ids_bytes())
        ]
        if fitting:
            return max(fitting, key=lambda each: len(each.transcript))
        shared = packed.startswith(main.transcript.ids_bytes()[: 4 * main.transcript.prompt_length])
        opened = await main.subagent(ids=ids, purpose=COMPACTION if shared else SUBAGENT)
        self._opened.append(opened)
        return opened

    def _sampling(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Sampling in our words; what these lack reaches verl's servers, and no other engine."""
        unknown = [name for name in params if name not in _SAME and name not in _ALWAYS]
        if unknown and self._sessions is None:
            raise AgentError(
                f"sampling_params[{unknown[0]!r}]: engines of rollout have no such key; known: "
                f"{', '.join(_SAME)}"
            )
        given = {_SAME[name]: value for name, value in params.items() if name in _SAME}
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("top_k") == 0:  # transformers' word for all of the vocabulary
            given["top_k"] = -1
        return given

    def _output(self, sampled: SampledTokens | None, answer: Any) -> Any:
        """In verl's words; of verl's own servers with all that they said."""
        from verl.workers.rollout.replica import TokenOutput

        if sampled is None:
            return TokenOutput(token_ids=[], log_probs=None, stop_reason="length")
        log_probs = list(sampled.log_probs) if self._log_probs else None
        if answer is not None:
            return answer.model_copy(
                update={"token_ids": list(sampled.ids), "log_probs": log_probs}
            )
        versions: list[int | None] = [version for version, _ in sampled.versions] or [None]
        fields = {
            "global_steps": versions[-1],
            "min_global_steps": versions[0],
            "max_global_steps": versions[-1],
        }
        return TokenOutput(
            token_ids=list(sampled.ids),
            log_probs=log_probs,
            stop_reason="completed",
            extra_fields=fields,
        )


async def run_loop(
    context: AgentContext,
    hosted: HostedClient,
    run: Callable[[HostedClient], Awaitable[Any]],
    *,
    name: str,
    lengths: LengthsConfig,
) -> Any:
    """What a loop of verl's returns.

    Args:
        run: Makes the loop and runs it, on asyncio.
        name: Of the loop, for messages.
        lengths: The widths of verl's tensors.

    Raises:
        AgentError: It returned something else than one ``AgentLoopOutput``, or one that is too long
            or contradicts itself.
    """
    async with hosted.serving():
        output = await context.services.threads.run_asyncio(f"agent loop {name}", run, hosted)
    _check(name, output, lengths)
    return output


def _check(name: str, output: Any, lengths: LengthsConfig) -> None:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    where = f"agent loop {name!r}"
    if not isinstance(output, AgentLoopOutput):
        raise AgentError(
            f"{where} returned {type(output).__name__}; expected one AgentLoopOutput, since verl's "
            "batch has one row for each of a prompt's"
        )
    counts = [len(output.response_ids), len(output.response_mask)]
    if output.response_logprobs is not None:
        counts.append(len(output.response_logprobs))
    if len(set(counts)) > 1:
        raise AgentError(
            f"{where} returned response_ids, response_mask and response_logprobs of lengths "
            f"{counts}; expected the same"
        )
    for what, ids, most in (
        ("prompt", output.prompt_ids, lengths.prompt),
        ("response", output.response_ids, lengths.response),
    ):
        if len(ids) > most:
            raise AgentError(
                f"{where} returned {len(ids)} {what}_ids; expected at most "
                f"actor_rollout_ref.rollout.{what}_length = {most}"
            )
