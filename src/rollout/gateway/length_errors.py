"""Which errors of an agent a refusal for a length made, and which are its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rollout.errors import AgentError

if TYPE_CHECKING:
    from rollout.errors import LimitExceeded

#: The code of the refusal in OpenAI's APIs; SDKs and frameworks put it into their errors.
LENGTH_CODE = "context_length_exceeded"
#: How programs print that they were refused for a length, in their own words or those of HTTP.
_IN_OUTPUT = re.compile(
    r"\b(\w*error|http|status|code)([\W_]|error|status|code)*400\b|\b400 bad request"
    "|context[ _-]?(length|window)|too long",
    re.IGNORECASE,
)


class LengthRefusals:
    """The refusals of one trajectory's calls for a length.

    A client gets them as HTTP 400, and its SDK makes an exception of that, which ends an agent that
    does not know how to go on. What the trajectory ends with depends on the exception, and never on
    which of several calls at once ended last.

    Args:
        path: Of the session; it stands in the URLs of its requests.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._by_message: dict[str, LimitExceeded] = {}

    def add(self, error: LimitExceeded) -> None:
        """A call was refused for a length."""
        self._by_message[str(error)] = error

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
        """The refusal behind an error: by its message, else by the 400 of an address of ours."""
        if not self._by_message:
            return None
        for each in _list_causes(error):
            if isinstance(each, BaseExceptionGroup):
                found = [self._find(inner) for inner in each.exceptions]
                return None if None in found else found[0]
            if isinstance(each, AgentError) and each.output is not None:
                words, is_refusal = each.output, _IN_OUTPUT.search(each.output) is not None
            else:
                reply = _read_reply(each)
                words = f"{each} {getattr(each, 'url', '')}"
                is_refusal = not reply and self._path in words and "400" in words
                words += reply
            for message, refusal in self._by_message.items():
                if message in words:
                    return refusal
            if is_refusal or LENGTH_CODE in words:
                return next(iter(self._by_message.values()))
        return None


def _read_reply(error: BaseException) -> str:
    """The body of the reply that an error of HTTP was made of; "" where it has none."""
    try:
        return str(getattr(getattr(error, "response", None), "text", None) or "")
    except Exception:  # of a reply that was not read, for example
        return ""


def _list_causes(error: BaseException) -> list[BaseException]:
    """It, what it was raised from, and so on."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and all(cause is not e for e in causes):
        causes.append(cause)
    return causes
