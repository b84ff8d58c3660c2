"""A chat model of LangChain's whose calls are the turns of a trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import PrivateAttr

from rollout.errors import LimitExceeded
from rollout.gateway.calls import GatewayError, check_forced
from rollout.integrations.langgraph.arguments import call_of
from rollout.integrations.langgraph.messages import given_messages, message_of
from rollout.tools.schemas import inline_references

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.runnables import Runnable
    from langchain_core.tools import BaseTool

    from rollout.gateway.calls import Completion
    from rollout.gateway.session import GatewaySession


class RolloutChatModel(BaseChatModel):
    """The model of one trajectory; made by `open_chat_model`, and of use while that is open.

    Each call's messages are matched with what was said before, as the gateway does: a conversation
    that continues extends its row with the sampled ids as they were, another one begins a segment
    (`docs/gateway.md`). Arguments of a call, as of ``bind``, are fields of `sampling`,
    ``max_tokens``, ``stop``, ``seed``, ``n``, ``tools``, ``tool_choice`` and
    ``parallel_tool_calls``, each checked as over HTTP; a call with another one, or with a value
    that cannot be, raises a `GatewayError` that names it, and the trajectory continues. Async only:
    ``ainvoke``, ``astream`` and what is built on them.
    """

    _session: GatewaySession = PrivateAttr()
    _unenforced: Literal["accept", "refuse"] = PrivateAttr()

    @classmethod
    def over(
        cls, session: GatewaySession, unenforced: Literal["accept", "refuse"]
    ) -> RolloutChatModel:
        """The model of the trajectory that is served by `session`; see `gateway.unenforced`."""
        model = cls()
        model._session, model._unenforced = session, unenforced
        return model

    @property
    def _llm_type(self) -> str:
        return "rollout"

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with these tools offered.

        Args:
            tools: Whatever LangChain takes as tools.
            tool_choice: "none" keeps the model from calling them; engines cannot force a call, so
                that all else means "auto", or is refused where `gateway.unenforced` is "refuse".
            kwargs: Further arguments of each call.
        """
        schemas = [_with_plain_parameters(convert_to_openai_tool(tool)) for tool in tools]
        if tool_choice is not None:
            kwargs["tool_choice"] = tool_choice
        return self.bind(tools=schemas, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        raise NotImplementedError("RolloutChatModel is async: use ainvoke, astream or abatch")

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: str | list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = call_of(given_messages(messages), {**kwargs, "stop": stop})
        check_forced(call, self._unenforced)
        try:
            completion: Completion = await self._session.complete(call)
        except GatewayError as error:
            if isinstance(error.__cause__, LimitExceeded):
                raise error.__cause__ from None
            raise
        answers = [message_of(answer, completion) for answer in completion.answers]
        return ChatResult(generations=[ChatGeneration(message=each) for each in answers])


def _with_plain_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """A tool's schema without references, which templates print as they are."""
    function = schema["function"]
    if "parameters" not in function:
        return schema
    return {
        **schema,
        "function": {**function, "parameters": inline_references(function["parameters"])},
    }
