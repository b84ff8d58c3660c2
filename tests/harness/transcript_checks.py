"""Whether a trajectory is what its engines said, and its outcome what the rules allow."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.chat.trajectory import BRANCH, COMPACTION
from rollout.chat.transcript import NO_EXPERT, NO_VERSION
from rollout.config import SimulatedEngine
from rollout.engine.cores.simulated.options import parse_scenario
from rollout.engine.cores.simulated.vocabulary import choose_expert, compute_log_probs, compute_top
from rollout.seeds import split_session
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import numpy.typing as npt

    from harness.call_records import CallRecord, GenerationRecord
    from rollout.chat.trajectory import Trajectory
    from rollout.chat.transcript import Span, Transcript
    from rollout.config import RolloutConfig
    from rollout.engine.pool.generation import Generation

_choose_expert = np.frompyfunc(choose_expert, 5, 1)

#: Outcomes of which no reward can be known.
REWARDLESS = (Outcome.FAILED, Outcome.REJECTED, Outcome.CANCELLED)
#: Agents that set no cancel scopes of their own.
OUR_AGENTS = ("single_turn", "tool_agent")
#: Outcomes of a trajectory that was cancelled while its engine generated.
CUT_OUTCOMES = (Outcome.CANCELLED, Outcome.DEADLINE)
#: Clocks are compared with this tolerance.
EPSILON_S = 1e-6
#: Reason of those that are cancelled because too many failed.
BUDGET = "failure_budget"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a check must know beside the trajectory.

    Attributes:
        config: Of the runtime.
        context_length: Of its engines.
        is_simulated: Whether log-probs are those of the simulated model.
        reasons: With which trajectories were cancelled.
        has_reward: Whether there is a reward function.
    """

    config: RolloutConfig
    context_length: int
    is_simulated: bool
    reasons: Collection[str]
    has_reward: bool


class Row:
    """What the tensors must say of one segment, made from what its engines said.

    Shapes: T tokens of prompt and response up to the last generated one.

    Attributes:
        ids: (T,) int32.
        mask: (T,) bool.
        log_probs: (T,) float32.
        weight_versions: (T,) int32.
        routed_experts: (T, layers, top_k) int16, checked by itself; None where none are known.
        prompt_length: Tokens of the prompt.
    """

    def __init__(self, transcript: Transcript, records: Sequence[GenerationRecord]) -> None:
        self.prompt_length = transcript.prompt_length
        size = len(transcript)
        self.ids: npt.NDArray[np.int32] = np.frombuffer(transcript.ids_bytes(), dtype=np.int32)
        self.mask = np.zeros(size, dtype=np.bool_)
        self.log_probs = np.zeros(size, dtype=np.float32)
        self.weight_versions = np.full(size, NO_VERSION, dtype=np.int32)
        self.routed_experts = transcript.routed_experts()
        stop = self.prompt_length
        for span, said in zip(transcript.generated_spans(), records, strict=True):
            kept = said.generation.kept_part()
            if len(span) == len(kept.ids):
                self._fill(span, kept)
            stop = span.stop if len(span) else stop
        self.stop = stop

    def _fill(self, span: Span, said: Generation) -> None:
        self.mask[span.start : span.stop] = True
        self.log_probs[span.start : span.stop] = said.log_probs
        at = span.start
        for version, count in said.versions:
            self.weight_versions[at : at + count] = version
            at += count


class Answers:
    """Which answers of engines are in which segment of a trajectory.

    Attributes:
        records: All that was asked for it.
        by_segment: For each segment those that its generated spans hold, as far as there are any.
        earlier: Those of attempts before its last.
    """

    def __init__(self, trajectory: Trajectory, call: CallRecord) -> None:
        main = call.session_of(trajectory)
        sessions = [session for session in call.generations if is_session_of(session, main)]
        self.records = [each for session in sessions for each in call.generations[session]]
        self.earlier: list[GenerationRecord] = []
        left: dict[str, list[GenerationRecord]] = {}
        spans: Counter[str] = Counter()
        for segment in trajectory.segments:
            spans[segment.session_id or main] += _spans(segment.transcript)
        for session in sessions:
            spoken = [each for each in call.generations[session] if each.has_output]
            cut = max(0, len(spoken) - spans[session])
            self.earlier += spoken[:cut]
            left[session] = spoken[cut:]
        self.by_segment = []
        for segment in trajectory.segments:
            answers, count = left.get(segment.session_id or main, []), _spans(segment.transcript)
            self.by_segment.append(answers[:count])
            del answers[:count]


def is_session_of(session: str, main: str) -> bool:
    """Whether a session is that of a trajectory, or of a conversation that it opened."""
    return split_session(session)[0] == main


def _spans(transcript: Transcript) -> int:
    return sum(1 for _ in transcript.generated_spans())


def trajectory_anomalies(trajectory: Trajectory, call: CallRecord, facts: Facts) -> Iterator[str]:
    """What is wrong with one delivered trajectory, in words without its name."""
    answers = Answers(trajectory, call)
    yield from _attempt_anomalies(trajectory, answers, facts.config)
    yield from _outcome_anomalies(trajectory, facts)
    main = call.generations.get(call.session_of(trajectory), [])
    yield from _cut_anomalies(trajectory, main, facts.config)
    yield from _time_anomalies(trajectory, call, facts.config)
    for at, segment in enumerate(trajectory.segments):
        where = f"segment {at}: " if len(trajectory.segments) > 1 else ""
        for text in _segment_anomalies(trajectory, at, answers.by_segment[at], facts):
            yield where + text
        if len(segment.seeds) != len(answers.by_segment[at]) and segment.session_id:
            yield f"{where}{len(segment.seeds)} seeds; its engines answered so often: " + str(
                len(answers.by_segment[at])
            )


def _segment_anomalies(
    trajectory: Trajectory, at: int, answers: Sequence[GenerationRecord], facts: Facts
) -> Iterator[str]:
    segment = trajectory.segments[at]
    yield from _span_anomalies(segment.transcript, answers, facts)
    yield from _length_anomalies(segment.transcript, facts)
    if facts.is_simulated:
        yield from _expert_anomalies(segment.transcript, facts.config)
    yield from _parent_anomalies(trajectory, at)
    asked_with = [answer.sampling.seed for answer in answers]
    if segment.session_id and segment.seeds != asked_with[: len(segment.seeds)]:
        yield f"its seeds are {segment.seeds}; its engines were asked with {asked_with}"


def _parent_anomalies(trajectory: Trajectory, at: int) -> Iterator[str]:
    """A branch and a history rendered again begin as their parent does, and train none of it."""
    segment = trajectory.segments[at]
    if segment.parent is None or segment.purpose not in (BRANCH, COMPACTION):
        if (segment.parent is None) != (at == 0):
            yield f"its parent is {segment.parent}"
        return
    index, position = segment.parent
    parent = trajectory.segments[index].transcript
    if segment.transcript.ids_bytes()[: 4 * position] != parent.ids_bytes()[: 4 * position]:
        yield f"it does not begin with the {position} tokens of its parent"
    if segment.transcript.mask()[:position].any():
        yield f"it trains on tokens of its parent, before {position}"


def _attempt_anomalies(
    trajectory: Trajectory, answers: Answers, config: RolloutConfig
) -> Iterator[str]:
    records, earlier = answers.records, answers.earlier
    spans = sum(map(_spans, trajectory.transcripts))
    final = sum(map(len, answers.by_segment))
    if spans > final:
        yield f"{spans} generated spans, but its engines answered {final} times"
    attempts = int(trajectory.metrics.get("attempts", 1))
    failures = sum(each.is_engine_failure for each in records)
    may_fail = config.scheduling.max_retries  # lost sandboxes, of which engines know nothing
    if "sandboxes" not in trajectory.metrics:
        may_fail = min(failures, may_fail)
    if attempts - 1 > may_fail:
        yield f"{attempts} attempts after {failures} failures of engines"
    if attempts == 1 and earlier:
        yield f"{len(earlier)} answers of engines are not in its transcript"
    discarded = sum(len(each.generation.ids) for each in earlier)
    expected = {
        "discarded_tokens": discarded + sum(each.generation.discarded_tokens for each in records),
        "resumes": sum(each.generation.resumes for each in records),
        "restarts": sum(len(each.generation.restarts) for each in records),
    }
    for name, number in expected.items() if "attempts" in trajectory.metrics else ():
        if trajectory.metrics[name] != number:
            yield f"{name} = {trajectory.metrics[name]:g}; expected {number}"


def _span_anomalies(
    transcript: Transcript, answers: Sequence[GenerationRecord], facts: Facts
) -> Iterator[str]:
    at = 0
    for index, span in enumerate(transcript.spans):
        if span.start != at or (span.kind == "prompt") != (index == 0):
            yield f"span {index} ({span.kind}) begins at {span.start}; expected {at}"
        at = span.stop
    if at != len(transcript):
        yield f"its spans end at {at}; it has {len(transcript)} tokens"
    spans = list(transcript.generated_spans())
    if len(spans) != len(answers):
        return  # told already
    for span, answer in zip(spans, answers, strict=True):
        yield from _answer_anomalies(transcript, span, answer, facts)
    row = Row(transcript, answers)
    for name in ("mask", "log_probs", "weight_versions"):
        found, expected = getattr(transcript, name)(), getattr(row, name)
        if not np.array_equal(found, expected):
            where = int(np.flatnonzero(found != expected)[0])
            yield f"{name} at {where} is {found[where]}; expected {expected[where]}"


def _answer_anomalies(
    transcript: Transcript, span: Span, answer: GenerationRecord, facts: Facts
) -> Iterator[str]:
    generation = answer.generation.kept_part()
    where = f"the generated span at {span.start}"
    ids = transcript.span_ids(span)
    if ids != generation.ids:
        yield f"{where} has {len(ids)} ids that are not the {len(generation.ids)} of its engine"
    if answer.prompt_ids != transcript.ids_bytes()[: 4 * span.start]:
        yield f"{where}: its engine was asked about something else than what is before it"
    ends = generation.finish_reason or "abort"
    if generation.kept is not None:
        ends = "stop"  # by its caller, who has found the end in the text
    if span.finish_reason != ends and (span.finish_reason, ends) != ("deadline", "abort"):
        yield f"{where} ends with {span.finish_reason}; its engine said {generation.finish_reason}"
    if facts.is_simulated and generation.log_probs != compute_log_probs(generation.ids, span.start):
        yield f"{where}: its log-probs are not those of the simulated model at these positions"
    if len(span) == len(generation.ids):
        for text in _top_anomalies(transcript, span, generation, is_simulated=facts.is_simulated):
            yield f"{where}: {text}"


def _length_anomalies(transcript: Transcript, facts: Facts) -> Iterator[str]:
    lengths = facts.config.lengths
    room = min(lengths.response, facts.context_length - transcript.prompt_length)
    if transcript.prompt_length > lengths.prompt:
        yield f"a prompt of {transcript.prompt_length} tokens; lengths.prompt = {lengths.prompt}"
    if transcript.response_length > room:
        yield f"a response of {transcript.response_length} tokens; there was room for {room}"
    for span in transcript.spans:
        if span.kind == "observation" and span.stop - transcript.prompt_length >= room:
            yield f"the observation at {span.start} leaves no room for one more token"
        if span.kind == "generated" and len(span) > (lengths.turn or room):
            yield f"{len(span)} tokens in one turn; lengths.turn = {lengths.turn}"


def _outcome_anomalies(trajectory: Trajectory, facts: Facts) -> Iterator[str]:
    outcome, policy = trajectory.outcome, facts.config.scheduling.trainable
    told = f"outcome {outcome}"
    if trajectory.reward is not None and (outcome in REWARDLESS or outcome not in policy):
        yield f"{told} with the reward {trajectory.reward}; expected None"
    if trajectory.trainable and outcome not in policy:
        yield f"{told} is trainable; scheduling.trainable = {', '.join(policy)}"
    if trajectory.trainable and not trajectory.generated_length:
        yield f"{told} is trainable without a generated token"
    if trajectory.trainable and facts.has_reward and trajectory.reward is None:
        yield f"{told} is trainable without a reward"
    if outcome in (Outcome.FAILED, Outcome.REJECTED) and trajectory.cause is None:
        yield f"{told} without a cause"
    if outcome is Outcome.DEADLINE and not (trajectory.limit_source or "").startswith("limits."):
        yield f"{told} with the source {trajectory.limit_source}; expected one of limits.*"
    if outcome is Outcome.CANCELLED and trajectory.reason not in {BUDGET, *facts.reasons}:
        yield f"{told} for the reason {trajectory.reason!r}, which nobody gave"
    spans = _spans(trajectory.transcript)
    if trajectory.num_turns < 1 + spans:
        yield f"num_turns = {trajectory.num_turns} with {spans} generated spans"


def _cut_anomalies(
    trajectory: Trajectory, records: Sequence[GenerationRecord], config: RolloutConfig
) -> Iterator[str]:
    """A cancelled generation ends its trajectory, unless its agent has scopes of its own."""
    prompt = trajectory.prompt
    agent = (prompt.agent_name if prompt is not None else None) or config.agent.name
    is_cut = bool(records) and records[-1].failure == "Cancelled"
    is_reward_unknown = trajectory.reason in (
        "reward",
        "group_reward",
    )  # what it was before is not known any more
    is_ended = trajectory.outcome in CUT_OUTCOMES or is_reward_unknown
    if agent in OUR_AGENTS and is_cut and not is_ended:
        yield f"outcome {trajectory.outcome}, though its last generation was cancelled"


def _time_anomalies(
    trajectory: Trajectory, call: CallRecord, config: RolloutConfig
) -> Iterator[str]:
    metrics, limits = trajectory.metrics, config.limits
    slack = EPSILON_S
    if "total_s" not in metrics or limits.trajectory_s is None:
        return
    took = metrics["total_s"] - metrics.get("reward_s", 0.0)
    # Tools and users are closed one after the other; an attempt after the limit is closed at once.
    cleanups = 2 * min(2, metrics.get("attempts", 1))
    if took > limits.trajectory_s + cleanups * limits.cleanup_s + slack:
        yield f"it took {took:g} s; limits.trajectory_s = {limits.trajectory_s:g}"


def _top_anomalies(
    transcript: Transcript, span: Span, said: Generation, *, is_simulated: bool
) -> Iterator[str]:
    """What is wrong with the most likely ids of a generated span, in words without its name.

    Args:
        said: What its engine told.
        is_simulated: Whether that has to be what the simulated model says.
    """
    count = said.top_count
    top = said.top()
    if top is None or not len(span):
        return
    if is_simulated:
        ids, log_probs = compute_top(said.ids, span.start, count)
        made_up = np.array(ids, np.int32), np.array(log_probs, np.float32)
        top = made_up[0].reshape(-1, count), made_up[1].reshape(-1, count)
    for name, expected in zip(("top_ids", "top_log_probs"), top, strict=True):
        found = getattr(transcript, name)()[span.start : span.stop, :count]
        if not np.array_equal(found, expected):
            yield f"its {name} are not those of its engine"


def _expert_anomalies(transcript: Transcript, config: RolloutConfig) -> Iterator[str]:
    """What is wrong with the routed experts of a transcript, where a simulated engine told them.

    They must be known of each token before the last sampled one; of that nothing was computed.
    """
    count = _experts_of(config)
    stop = max((span.stop for span in transcript.generated_spans() if len(span)), default=0)
    if not (count and stop):
        return
    found = transcript.routed_experts()
    if found is None or transcript.routed_length < stop - 1:
        known = 0 if found is None else transcript.routed_length
        yield f"the routed experts of {known} tokens are known; expected {stop - 1}"
        return
    expected = _made_up(transcript, found.shape, count)
    expected[transcript.routed_length :] = NO_EXPERT
    if not np.array_equal(found, expected):
        at = int(np.nonzero(found != expected)[0][0])
        yield f"the routed experts at {at} are {found[at].tolist()}; expected " + str(
            expected[at].tolist()
        )


def _experts_of(config: RolloutConfig) -> int:
    """How many experts a simulated engine has; 0 where it tells of none."""
    engine = config.engine
    if not isinstance(engine, SimulatedEngine) or not engine.routed_experts:
        return 0
    return parse_scenario(engine.scenario).experts.count


def _made_up(transcript: Transcript, shape: tuple[int, ...], count: int) -> npt.NDArray[np.int16]:
    """(T, layers, top_k) of all tokens, as the simulated model routes them."""
    tokens, layers, ranks = np.indices(shape)
    ids = transcript.ids()[tokens]
    values: Any = _choose_expert(ids, tokens, layers, ranks, count)
    routed: npt.NDArray[np.int16] = values.astype(np.int16)
    return routed
