"""Whether each request was sampled as its caller asked.

What was asked is worked out here from the configuration, the prompt and the place of the turn, by
the rules in the documentation and not by the code that is checked. Then it is compared with what
the engine was given, and for simulated engines with what they said.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rollout.engine.cores.simulated.options import parse_scenario
from rollout.engine.cores.simulated.simulated_model import SimulatedModel
from rollout.seeds import session_name, split_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from harness.call_records import CallRecord, GenerationRecord
    from harness.transcript_checks import Facts
    from harness.watched_core import WatchedCore
    from rollout.config import RolloutConfig
    from rollout.engine.core import SamplingParams
    from rollout.engine.routing import Dispatch
    from rollout.types import Prompt

#: Agents that do not assign `context.sampling`.
OUR_AGENTS = ("single_turn", "tool_agent")
#: Compared field by field; the budget and the ids that end a turn have rules of their own.
PLAIN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "seed",
    "top_log_probs",
)
#: As it is when this module is imported: the bugs that it is to find come later.
_plan = SimulatedModel.plan


class _Turn(NamedTuple):
    """One generation, and which one of its trajectory it is.

    Attributes:
        number: Counted from 0 in its attempt.
        prompt_length: Tokens of the prompt that the attempt began with.
    """

    record: GenerationRecord
    number: int
    prompt_length: int


def sampling_anomalies(
    call: CallRecord, cores: Sequence[WatchedCore], facts: Facts, run_seed: int
) -> Iterator[str]:
    """What was sampled otherwise than it was asked in one call, in words."""
    sent = {rid: sent.request.sampling for core in cores for rid, sent in core.requests.items()}
    model = _model_of(facts)
    prompts = _prompts_by_session(call)
    for session, several in call.generations.items():
        trajectory, path = split_session(session)
        if trajectory not in prompts:
            yield f"{session}: a generation for a trajectory that {call.kind} was not asked for"
            continue
        uid, member, prompt = prompts[trajectory]
        seed_of_turn = partial(seed_of, run_seed, call.step, uid, member, path=path)
        for turn in _turns(several, seed_of_turn):
            seed = turn.record.sampling.seed  # where its caller gave one
            if not turn.record.generation.is_seeded:
                seed = seed_of_turn(turn.number)
            expected = _expected(turn, prompt, call.is_validation, seed, facts)
            where = f"{session}: generation {turn.number}"
            for part in turn.record.generation.parts:
                if part.request_id in sent:
                    found = sent[part.request_id]
                    yield from _differences(where, found, expected, part)
            if model is not None and not _is_said(model, turn, expected, facts):
                yield (
                    f"{where} is not what the simulated model says for the sampling and the seed "
                    "that were asked for"
                )


def seed_of(run_seed: int, step: int, uid: str, member: int, turn: int, path: str = "") -> int:
    """The seed that a turn must have, as `docs/architecture.md` says it.

    Args:
        path: Of a conversation that was opened beside the main one.
    """
    place = (path, turn) if path else (turn,)
    parts = "\x1f".join(str(part) for part in (run_seed, step, uid, member, *place))
    digest = hashlib.blake2b(parts.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") // 2


def _prompts_by_session(call: CallRecord) -> Mapping[str, tuple[str, int, Prompt]]:
    uids = [p.uid or f"prompt-{group}" for group, p in enumerate(call.prompts)]
    return {
        session_name(call.step, uid, member): (uid, member, prompt)
        for uid, prompt in zip(uids, call.prompts, strict=True)
        for member in range(call.samples)
    }


def _turns(
    several: Sequence[GenerationRecord], seed_of_turn: Callable[[int], int]
) -> Iterator[_Turn]:
    """The generations of a trajectory; one that begins as the first did begins an attempt.

    Or its agent asks once more after an answer without a token: then its seed is the next one.
    """
    number, was_empty = 0, False
    for record in several:
        if record.prompt_ids == several[0].prompt_ids:
            is_next = was_empty and record.sampling.seed == seed_of_turn(number)
            number = number if is_next else 0
        was_empty = not record.generation.ids
        yield _Turn(record, number, len(several[0].prompt_ids) // 4)
        number += record.has_output


def _expected(
    turn: _Turn, prompt: Prompt, is_validation: bool, seed: int | None, facts: Facts
) -> dict[str, Any]:
    """The fields that are known; an agent of the user's may have set most of them."""
    known: dict[str, Any] = {"seed": seed}
    config = facts.config
    if (prompt.agent_name or config.agent.name) not in OUR_AGENTS:
        return known
    wanted = _settings(config, prompt.sampling or {}, is_validation)
    if wanted.pop("greedy"):
        wanted["temperature"] = 0.0
    stops, most = set(wanted.pop("stop_token_ids")), wanted.pop("max_new_tokens")
    known |= wanted | {"ignore_eos": False, "stop_token_ids": stops}
    if config.agent.history == "append_only":
        length = len(turn.record.prompt_ids) // 4
        room = config.lengths.response - (length - turn.prompt_length)
        bounds = (room, facts.context_length - length, config.lengths.turn, most)
        known["max_new_tokens"] = min(bound for bound in bounds if bound is not None)
    return known


def _settings(
    config: RolloutConfig, overrides: Mapping[str, Any], is_validation: bool
) -> dict[str, Any]:
    """The section that holds, with what the prompt says in its place: a temperature samples."""
    import attrs

    section = config.validation_sampling if is_validation else config.sampling
    samples = {"greedy": False} if "temperature" in overrides else {}
    return attrs.asdict(section) | samples | dict(overrides)


def _differences(
    where: str, found: SamplingParams, expected: Mapping[str, Any], part: Dispatch
) -> Iterator[str]:
    for name in PLAIN:
        value = getattr(found, name)
        if name in expected and value != expected[name]:
            yield f"{where}: its engine was given {name} = {value}; expected {expected[name]}"
    missing = expected.get("stop_token_ids", set()) - set(found.stop_token_ids)
    if missing:
        yield f"{where}: its engine was not given the stop_token_ids {sorted(missing)}"
    if "max_new_tokens" in expected:
        left = expected["max_new_tokens"] - part.start
        if found.max_new_tokens != left:
            yield (
                f"{where}: its engine was given max_new_tokens = {found.max_new_tokens}; "
                f"expected {left}"
            )


def _model_of(facts: Facts) -> SimulatedModel | None:
    from rollout.config import SimulatedEngine

    engine = facts.config.engine
    if not facts.is_simulated or not isinstance(engine, SimulatedEngine):
        return None
    return SimulatedModel(parse_scenario(engine.scenario))


def _is_said(model: SimulatedModel, turn: _Turn, expected: Mapping[str, Any], facts: Facts) -> bool:
    """Whether simulated engines said what they must, request by request, as far as it came."""
    record, ids = turn.record, turn.record.generation.ids
    known = {name: value for name, value in expected.items() if name in PLAIN}
    for part in record.generation.parts:
        said = ids[part.start : part.start + part.count]
        if part.is_discarded or not said:
            continue
        prompt = record.prompt_ids + ids[: part.start].tobytes()
        left = record.sampling.max_new_tokens - part.start
        sampling = msgspec.structs.replace(record.sampling, **(known | {"max_new_tokens": left}))
        room = facts.context_length - len(prompt) // 4
        if _plan(model, prompt, sampling, room)[: len(said)] != said:
            return False
    return True
