"""A simulated user who knows the answer, and lets the model try again."""

from __future__ import annotations

import inspect
import re
from decimal import Decimal
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rollout.chat.messages import template_messages
from rollout.errors import ConfigError
from rollout.interactions.interaction import Interaction, InteractionContext, InteractionTurn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from rollout.types import Message

    Check = Callable[[str, InteractionContext], bool | float | Awaitable[bool | float]]

#: A number as people write it; the second one of a range such as 3-5 has no sign.
_NUMBER = re.compile(r"(?:(?<!\d)[-+])?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][-+]?\d+)?")
_ANNOUNCED = re.compile(r"\banswer(?:\s+is|\s*:)", re.IGNORECASE)
#: Longest answer that is looked at, from its end.
_MAX_ANSWER = 10_000


def final_answer(text: str) -> str:
    """What a text puts forward as its answer.

    In this order: the last ``\\boxed{…}``; what follows the last ``####`` (GSM8K); the first number
    after the last "answer is" or "answer:", or all that follows it; the last number; all of it.
    """
    text = text[-_MAX_ANSWER:].strip()
    _, boxed, inside = text.rpartition("\\boxed{")
    depths = [*accumulate((letter == "{") - (letter == "}") for letter in inside)]
    if boxed and -1 in depths:
        return inside[: depths.index(-1)].strip()
    _, marker, rest = text.rpartition("####")
    if marker and rest.strip():
        return rest.strip()
    _, *announced = _ANNOUNCED.split(text)
    if announced:
        number = _NUMBER.search(announced[-1])
        return number.group() if number else announced[-1].strip()
    return str([text, *_NUMBER.findall(text)][-1])


def is_same_answer(answer: str, truth: object) -> bool:
    """Whether two answers are equal as numbers, or else as text without case and outer spaces."""
    ours, theirs = final_answer(answer), str(truth).strip()
    number, true_number = _read_number(ours), _read_number(theirs)
    if number is not None and true_number is not None:
        return number == true_number
    return ours.rstrip(".").casefold() == theirs.rstrip(".").casefold()


def _read_number(text: str) -> Decimal | None:
    match = _NUMBER.fullmatch(text.strip().strip("$%").rstrip("."))
    return Decimal(match.group().replace(",", "")) if match else None


class Verifier:
    """Makes users who check each answer and, where it is wrong, ask for another.

    Each answer's score joins `turn_scores`. The conversation ends at a right answer, and after
    `max_attempts` answers.

    Args:
        check: ``check(answer, context) -> bool | float``, async where it waits for something; 1 (or
            True) is right. None compares the answer's `final_answer` with the prompt's
            `ground_truth`.
        name: What prompts and ``agent.interaction`` call it.
        max_attempts: Answers that are checked.
        wrong: What the user says to a wrong one; ``{left}`` is the number of attempts left.
        right_at: The score from which an answer is right.

    Raises:
        ConfigError: `max_attempts` is below 1, or `wrong` has other fields.
    """

    def __init__(
        self,
        check: Check | None = None,
        *,
        name: str = "verifier",
        max_attempts: int = 3,
        wrong: str = "That is not right. Look at it again, and answer once more.",
        right_at: float = 1.0,
    ) -> None:
        if max_attempts < 1:
            text = f"max_attempts = {max_attempts}: expected at least 1"
            raise ConfigError(f"interaction {name!r}: {text}")
        try:
            wrong.format(left=1)
        except (LookupError, ValueError) as error:
            raise ConfigError(
                f"interaction {name!r}: wrong = {wrong!r}: expected no other field than {{left}} "
                f"({type(error).__name__}: {error})"
            ) from None
        self.name, self.max_attempts = name, max_attempts
        self.wrong, self.right_at = wrong, right_at
        self.check: Check = check or (lambda answer, who: is_same_answer(answer, who.ground_truth))

    def __call__(self) -> Interaction:
        """A user who has heard nothing yet."""
        return _CheckingUser(self)


class _CheckingUser(Interaction):
    def __init__(self, verifier: Verifier) -> None:
        self.name, self._verifier, self._left = verifier.name, verifier, verifier.max_attempts
        self._context: InteractionContext | None = None

    async def start(self, context: InteractionContext) -> None:
        self._context = context

    async def respond(self, messages: Sequence[Message | Mapping[str, Any]]) -> InteractionTurn:
        assert self._context is not None
        answer = template_messages(messages)[-1]["content"]
        result = self._verifier.check(answer, self._context)
        score = float(await result if inspect.isawaitable(result) else result)
        self._left -= 1
        if score >= self._verifier.right_at or self._left == 0:
            return InteractionTurn("", is_done=True, score=score)
        return InteractionTurn(self._verifier.wrong.format(left=self._left), score=score)
