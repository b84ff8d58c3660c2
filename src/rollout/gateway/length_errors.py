"""Which errors of an agent a refusal for a length made, and which are its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rollout.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollout.errors import LimitExceeded

#: The code of the refusal in OpenAI's APIs; SDKs and frameworks put it into their errors.
CODE = "context_length_exceeded"
#: How programs tell that they were refused for a length, in their own words or those of HTTP.
_IN_OUTPUT = re.compile(r"\b400\b|context[ _-]?(length|window)|too long", re.IGNORECASE)


class LengthRefusals:
    """The refusals of one trajectory's calls for a length.

    A client gets them as HTTP 400, and its SDK makes an exception of that, which ends an agent that
    does not know how to go on. What the trajectory ends with depends on the exception, and never on
    which of several calls at once ended last.

    Args:
        path: Of the session; it stands in the URLs of its requests.

    Attributes:
        count: How many there are.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._by_message: dict[str, LimitExceeded] = {}
        self.count = 0
        self._answered_after = -1

    def add(self, error: LimitExceeded) -> None:
        """A call was refused for a length."""
        self.count += 1
        self._by_message[str(error)] = error

    def answered(self, begun_after: int) -> None:
        """A call was answered that began when there were so many refusals."""
        self._answered_after = max(self._answered_after, begun_after)

    def behind(self, error: BaseException) -> LimitExceeded | None:
        """The refusal that made an agent raise this; None where the error is another one.

        It or what it was raised from tells the refusal: in its words, or as HTTP's 400 of an
        address of the session. Of a group, each exception does. A program that fails tells it in
        what it prints; one that prints nothing is taken at its last call.
        """
        if not self._by_message:
            return None
        return self._of_group(error) if isinstance(error, BaseExceptionGroup) else self._of(error)

    def _of_group(self, group: BaseExceptionGroup[BaseException]) -> LimitExceeded | None:
        found = [self.behind(each) for each in group.exceptions]
        lengths = [each for each in found if each is not None]
        return min(lengths, key=str) if len(lengths) == len(found) else None

    def _of(self, error: BaseException) -> LimitExceeded | None:
        for each in _causes(error):
            if isinstance(each, BaseExceptionGroup):
                return self._of_group(each)
            text = _text(each)
            if isinstance(each, AgentError) and each.output is not None:
                text = each.output
            for message, length in self._by_message.items():
                if message in text:
                    return length
            if CODE in text or self._is_bad_request(each, text) or self._is_of_program(each):
                return min(self._by_message.values(), key=str)
        return None

    def _is_bad_request(self, error: BaseException, text: str) -> bool:
        """Whether it is an HTTP error of the session's that does not tell the reply's words."""
        response: Any = _attribute(error, "response")
        statuses = [
            *(_attribute(error, name) for name in ("status_code", "status", "code")),
            *(_attribute(response, name) for name in ("status_code", "status")),
        ]
        urls = [text, *(str(_attribute(each, "url")) for each in (error, response))]
        if 400 not in statuses or not any(self._path in url for url in urls):
            return False
        words = _attribute(response, "text")
        told = words if isinstance(words, str) else ""
        return not told or any(message in told for message in self._by_message)

    def _is_of_program(self, error: BaseException) -> bool:
        if not isinstance(error, AgentError) or error.output is None:
            return False
        if error.output.strip():
            return _IN_OUTPUT.search(error.output) is not None
        return self._answered_after < self.count


def _causes(error: BaseException) -> Iterator[BaseException]:
    """It, what it was raised from, and so on."""
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and not any(each is other for other in seen):
        seen.append(each)
        yield each
        each = each.__cause__


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a foreign exception's
        return ""


def _attribute(value: object, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # of a reply that was not read, for example
        return None
