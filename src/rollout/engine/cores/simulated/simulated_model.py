"""What the simulated model says.

Everything it samples is a function of the request: the ids come out the same alone, in a full
batch, after a preemption, or when the prompt brings the first half of the answer along.

Loaded in engine processes: imports msgspec and the standard library only.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from rollout.engine.cores.simulated.options import Lognormal, ReplyRule, ScenarioOptions
from rollout.engine.cores.simulated.stable import (
    filler_text,
    stable_key,
    stable_lognormal,
    stable_share,
)
from rollout.engine.cores.simulated.vocabulary import (
    ASSISTANT_HEADER,
    EOS_ID,
    decode_ids,
    encode_text,
    open_turn_start,
)

if TYPE_CHECKING:
    from rollout.engine.core import SamplingParams

#: The answer where no rule matches.
UNSCRIPTED = ReplyRule(filler=64)


class SimulatedModel:
    """Plans the whole answer to a prompt.

    The *context* of a prompt is what stands before the assistant's open turn, header included;
    rules see the context only. What the open turn already says is taken as the beginning of the
    answer where it is one, and the answer continues after it; otherwise the whole answer follows.
    A prompt without an open turn, or whose last turn was ended, is all context.

    Made-up words are keyed by (scenario seed, request seed, temperature, absolute position); a
    request without a seed, or with the temperature 0, is keyed by its context instead.
    """

    def __init__(self, options: ScenarioOptions) -> None:
        self._seed = options.seed
        self._rules = options.rules

    def plan(self, prompt: bytes, sampling: SamplingParams, room: int) -> array[int]:
        """The ids to come, at least one and at most `room` or `max_new_tokens`."""
        count, turn_start = len(prompt) // 4, open_turn_start(prompt)
        start = count if turn_start is None else turn_start
        stop = count + min(room, sampling.max_new_tokens)
        context, begun = prompt[: 4 * start], prompt[4 * start :]
        key = stable_key(self._seed, *_randomness(sampling, context))
        rule, reply = self._choose(context, key)
        is_endless = rule.finish == "length" or sampling.ignore_eos
        answer = _answer(rule, reply, key, start, stop if is_endless else start)
        if answer[: count - start].tobytes() == begun:
            del answer[: count - start]
        else:
            answer = _answer(rule, reply, key, count, stop if is_endless else count)
        return _cut(answer, stop - count, sampling)

    def _choose(self, context: bytes, key: bytes) -> tuple[ReplyRule, str]:
        text = decode_ids(context) if self._rules else ""
        turn = max(1, text.count(ASSISTANT_HEADER))
        for rule in self._rules:
            at = text.find(rule.when)
            if at < 0 or rule.turn not in (None, turn):
                continue
            if not rule.replies:
                return rule, ""
            turns_since = max(1, text.count(ASSISTANT_HEADER, at))
            choices = rule.replies[min(turns_since, len(rule.replies)) - 1]
            return rule, choices[int(stable_share("choice", key) * len(choices))]
        return UNSCRIPTED, ""


def _randomness(sampling: SamplingParams, context: bytes) -> tuple[bytes | int | str, ...]:
    """What the choices of a request depend on beside the scenario."""
    seed, temperature = sampling.seed, float(sampling.temperature)
    if seed is None or temperature == 0:
        return (context,)
    return (seed,) if temperature == 1 else (seed, str(temperature))


def end_ids(sampling: SamplingParams) -> set[int]:
    """Ids that end the generation."""
    ids = set(sampling.stop_token_ids)
    return ids if sampling.ignore_eos else ids | {EOS_ID}


def _answer(rule: ReplyRule, reply: str, key: bytes, start: int, stop: int) -> array[int]:
    """The scripted answer from absolute position `start`, with filler after it up to `stop`."""
    answer = array("i")
    answer.extend(filler_text(key, start, start + _filler_tokens(rule, key)))
    answer.extend(encode_text(reply))
    if rule.finish == "stop":
        answer.append(EOS_ID)
    answer.extend(filler_text(key, start + len(answer), stop))
    return answer


def _filler_tokens(rule: ReplyRule, key: bytes) -> int:
    filler = rule.filler
    if not isinstance(filler, Lognormal):
        return filler
    drawn = max(1, round(stable_lognormal(filler.median, filler.sigma, key)))
    return drawn if filler.max is None else min(drawn, filler.max)


def _cut(answer: array[int], allowed: int, sampling: SamplingParams) -> array[int]:
    """The answer up to its first end id, and no longer than allowed."""
    ends = [answer.index(end) + 1 for end in end_ids(sampling) if end in answer]
    return answer[: min([allowed, *ends])]
