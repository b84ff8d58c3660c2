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
#: How programs print that they were refused for a length, in their own words or those of HTTP.
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

    def note_answer(self, begun_after: int) -> None:
        """A call was answered that began when there were so many refusals."""
        self._answered_after = max(self._answered_after, begun_after)

    def raise_refusal(self, error: BaseException) -> None:
        """Raise the refusal that made an agent raise this; nothing where the error is another one.

        Of a group, it raises the exceptions that no refusal made, where there are some.
        """
        refusal = self._find(error)
        if refusal is not None and refusal is not error:
            raise refusal from error
        if isinstance(error, BaseExceptionGroup):
            own = error.split(lambda each: self._find(each) is not None)[1]
            raise (own or error) from error.__cause__

    def _find(self, error: BaseException) -> LimitExceeded | None:
        """The refusal behind an error: its message or the 400 of an address of the session."""
        if not self._by_message:
            return None
        for each in _list_causes(error):
            if isinstance(each, BaseExceptionGroup):
                found = [self._find(inner) for inner in each.exceptions]
                return None if None in found else found[0]
            text = str(each)
            if isinstance(each, AgentError) and each.output is not None:
                text = each.output
            for message, refusal in self._by_message.items():
                if message in text:
                    return refusal
            if CODE in text or self._is_bad_request(each, text) or self._is_of_program(each):
                return next(iter(self._by_message.values()))
        return None

    def _is_bad_request(self, error: BaseException, text: str) -> bool:
        """Whether it is an HTTP error of the session's without another message in its reply."""
        response: Any = getattr(error, "response", None)
        names = ("status_code", "status", "code")
        statuses = [getattr(each, name, None) for each in (error, response) for name in names]
        urls = [text, *(str(getattr(each, "url", "")) for each in (error, response))]
        if 400 not in statuses or not any(self._path in url for url in urls):
            return False
        try:
            words = str(getattr(response, "text", None) or "")
        except Exception:  # of a reply that was not read, for example
            words = ""
        return not words or any(message in words for message in self._by_message)

    def _is_of_program(self, error: BaseException) -> bool:
        """A program that fails without a word is taken at its last call."""
        if not isinstance(error, AgentError) or error.output is None:
            return False
        if error.output.strip():
            return _IN_OUTPUT.search(error.output) is not None
        return self._answered_after < self.count


def _list_causes(error: BaseException) -> Iterator[BaseException]:
    """It, what it was raised from, and so on."""
    seen = set[int]()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__
