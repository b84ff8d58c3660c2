"""What happens to a trajectory."""

from __future__ import annotations

from rollout.observe.event_base import TrajectoryEvent


class TrajectoryStarted(TrajectoryEvent, frozen=True, kw_only=True):
    """An attempt at it has a place and begins.

    Attributes:
        batch: The call that admitted it.
        step, uid, group, member, validate: As in `Identity`.
        attempt: From 1; a later one starts over.
    """

    batch: int
    step: int
    uid: str
    group: int
    member: int
    validate: bool = False
    attempt: int = 1


class TrajectoryEnded(TrajectoryEvent, frozen=True, kw_only=True):
    """It has its outcome, and its reward. One that never got a place ends without having started.

    Attributes:
        began: When its first attempt got its place; `at`, where it got none.
        outcome, reason, limit_source, trainable: As in `Trajectory`.
        reward: Of its own; what `collect` and `stream_groups` learn of a group's reward function is
            in `GroupEnded`.
        cause: What was raised, "Type: message"; empty where nothing was.
        turns: Turns of the model.
        num_turns: As in `Trajectory`.
        rows: Rows of training data.
        prompt_tokens, generated_tokens, observation_tokens: Over all of its rows.
        generation_s, tool_s, tool_calls, tool_errors: As in `Trajectory.metrics`.
        discarded_tokens: Sampled and dropped, as after the loss of a replica.
        resumes, restarts: Requests that resumed elsewhere, or restarted.
        drift: How its text and its tokens differ, where they were compared ("none": they do not).
        versions: The oldest and the newest weight version that sampled it; empty without tokens.
    """

    batch: int
    step: int
    uid: str
    group: int
    member: int
    began: float
    outcome: str
    reason: str = ""
    validate: bool = False
    limit_source: str = ""
    cause: str = ""
    trainable: bool = False
    reward: float | None = None
    turns: int = 0
    num_turns: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    observation_tokens: int = 0
    generation_s: float = 0.0
    tool_s: float = 0.0
    tool_calls: int = 0
    tool_errors: int = 0
    discarded_tokens: int = 0
    resumes: int = 0
    restarts: int = 0
    drift: str = ""
    versions: tuple[int, ...] = ()


class TurnStarted(TrajectoryEvent, frozen=True, kw_only=True):
    """The model is asked for a turn.

    Attributes:
        turn: Its number in its conversation, from 0.
        path: The conversation: "" is the main one; see `Identity`.
    """

    turn: int
    path: str = ""


class TurnEnded(TrajectoryEvent, frozen=True, kw_only=True):
    """The model's turn is there, or was cut short.

    Attributes:
        began: When it was asked for.
        requests: Ids of the requests that were made for it, in order; none where it got no place.
        prompt_tokens: That stood before it.
        cached_tokens: Those of them that the engine did not compute.
        generated_tokens: Sampled.
        held_s: Seconds of it in which the trajectory waited to be carried to another call.
        finish_reason: "stop", "length", "abort", "error", …; empty where there was no answer.
        cut_by: What ended it before the model did; see `AssistantTurn`.
    """

    turn: int
    began: float
    path: str = ""
    requests: tuple[str, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    held_s: float = 0.0
    finish_reason: str = ""
    cut_by: str = ""


class RequestPlaced(TrajectoryEvent, frozen=True, kw_only=True):
    """A request was sent to a replica.

    Attributes:
        trajectory: 0 for a request that belongs to none.
        session: The conversation that asks, as the engines know it: ``step/uid/member#path``.
        request: Its id.
        replica: Which one.
        queue_s: For how long it had waited for that.
    """

    session: str
    request: str
    replica: str
    queue_s: float


class RequestEnded(TrajectoryEvent, frozen=True, kw_only=True):
    """A request has its last answer, or nobody waits for it any more.

    Its time is ``at - began = queue_s + prefill_s + decode_s``.

    Attributes:
        session, request, replica, queue_s: As in `RequestPlaced`.
        began: When a place was asked for.
        prefill_s: From the place to its first token; to its end, where none came.
        decode_s: From its first token to its end.
        prompt_tokens, cached_tokens, tokens: Of the prompt; not computed of that; sampled.
        finish_reason: As the engine said; "lost" with its replica, "cancelled" where the wait ended
            before.
    """

    session: str
    request: str
    replica: str
    began: float
    queue_s: float
    prefill_s: float
    decode_s: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    finish_reason: str = ""


class ToolStarted(TrajectoryEvent, frozen=True, kw_only=True):
    """A call begins: it may still have to wait for its tool's place.

    Attributes:
        tool: Its name; empty where the call could not be parsed.
        turn, path: Of the turn that asked for it.
        position: Among the calls of that turn, from 0.
    """

    tool: str
    turn: int
    position: int = 0
    path: str = ""


class ToolEnded(TrajectoryEvent, frozen=True, kw_only=True):
    """A call has its result.

    Attributes:
        tool, turn, position, path: As in `ToolStarted`.
        began: When it did.
        call_id: That the model's format gave it.
        is_refused: It was answered without having started: the tool is unknown, the arguments do
            not fit, or there were too many.
        is_error: Whether the result is an error.
        error: The beginning of its text then.
        characters: Of the result, before it is truncated.
    """

    tool: str
    turn: int
    began: float
    position: int = 0
    path: str = ""
    call_id: str = ""
    is_refused: bool = False
    is_error: bool = False
    error: str = ""
    characters: int = 0


class UserEnded(TrajectoryEvent, frozen=True, kw_only=True):
    """A simulated user has answered.

    Attributes:
        began: When it was asked.
    """

    began: float


class RewardEnded(TrajectoryEvent, frozen=True, kw_only=True):
    """A reward function has answered, or failed.

    Attributes:
        trajectory: Whose reward it is; 0 for one of a whole group.
        batch, group: Where it belongs.
        began: When it was asked.
        reward: None where it is not known, and for a group.
        error: What went wrong; empty where nothing did.
    """

    batch: int
    group: int
    began: float
    reward: float | None = None
    error: str = ""


class SpanEnded(TrajectoryEvent, frozen=True, kw_only=True):
    """A function of the user's with `rollout.trace` has returned, or raised.

    Attributes:
        name: Given to the decorator, or the function's.
        span: Its number in the trajectory, from 1.
        parent: That of the traced function that called it; 0 for none.
        began: When it was called.
        error: What it raised; empty where it returned.
    """

    name: str
    span: int
    began: float
    parent: int = 0
    error: str = ""
