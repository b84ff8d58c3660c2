"""The process of `rewards.processes`: calls one reward function after another for the driver."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout.chat.group import Group
from rollout.chat.reward_values import BadRewardError, check_group_values, check_reward_value
from rollout.child_serving import MAX_REPLY, outcome_of, serve
from rollout.function_refs import function_at
from rollout.import_watch import noting_imports
from rollout.scheduling.rewards.encoding import NotPlainError, encoded
from rollout.scheduling.rewards.messages import Ask, Load, Reply, Request
from rollout.types import Cause


def main() -> None:
    """Answer requests until standard input closes."""
    serve(_answer)


def _answer(body: bytearray) -> bytes:
    try:
        reply = _reply(msgspec.msgpack.decode(body, type=Request))
        if len(reply) > MAX_REPLY:
            raise BadRewardError(f"the reward takes {len(reply)} bytes; at most {MAX_REPLY}")
    except BaseException as error:
        return encoded(Reply(failure=Cause.of(error)))
    return reply


def _reply(request: Request) -> bytes:
    if isinstance(request, Load):
        with noting_imports(request.file, request.every_s):
            for function in request.functions:
                function_at(function)
        return encoded(Reply())
    subject = request.subject()
    value = _called(request, subject)
    checked = (
        check_group_values(value, subject)
        if isinstance(subject, Group)
        else [check_reward_value(value, subject)]
    )
    try:
        return encoded(Reply.of(checked))
    except NotPlainError as error:
        raise BadRewardError(f"the reward function returned {error}") from None


def _called(request: Ask, subject: Any) -> Any:
    function = function_at(request.function)
    keywords = request.keywords
    return outcome_of(function(subject) if keywords is None else function(**keywords))
