"""What becomes of a member: its trajectory, made of what its agent left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.agents.identity import Ending, RejectedPrompt
from rollout.agents.places import segments_of
from rollout.chat.trajectory import Trajectory
from rollout.chat.transcript import Transcript
from rollout.types import Cause, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.limits import Deadline
    from rollout.scheduling.agent_run import AgentRun
    from rollout.scheduling.prompts import Member


def exclude(trajectory: Trajectory) -> None:
    """Nothing of it is trained on, and no reward of it is known."""
    trajectory.trainable, trajectory.reward = False, None
    for segment in trajectory.segments:
        segment.reward = segment.token_rewards = None


def end_without_reward(
    trajectory: Trajectory, outcome: Outcome, reason: str, source: str | None, cause: Cause | None
) -> None:
    """A trajectory whose reward is unknown keeps its tokens, and is not trained on."""
    trajectory.outcome, trajectory.reason = outcome, reason
    trajectory.limit_source, trajectory.cause = source, cause
    exclude(trajectory)


class _Metrics:
    """Gives its `__dict__`: the keys of such dicts are stored once, in place of in each."""

    def __init__(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def finished(run: AgentRun, ending: Ending, cause: Cause | None) -> Trajectory:
    """The trajectory of a member whose last attempt has ended."""
    identity, context = run.member.identity, run.context
    run.member.prompt = context.prompt  # as the agent saw it
    restarts = [*run.before.restarts, *context.restarts]
    if restarts:
        context.extra["restarts"] = restarts
    return Trajectory(
        uid=identity.uid,
        group=identity.group,
        member=identity.member,
        transcript=context.transcript,
        outcome=ending.outcome,
        reason=ending.reason,
        limit_source=ending.limit_source,
        cause=cause,
        turn_scores=context.turn_scores,
        tool_rewards=context.tool_rewards,
        num_turns=context.user_turns + context.assistant_turns + 1,
        metrics=vars(_Metrics(_metrics_of(run, len(restarts)))),
        extra=context.extra,
        prompt=run.member.prompt,
        messages=context.messages,
        history=context.main.history,
        segments=segments_of(context.main.all()),
    )


def summed(sums: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    """What attempts say of their calls, ``tool/TOOL/…``, of both together."""
    found = dict(sums)
    for name, value in more.items():
        known = found.get(name, 0.0)
        found[name] = max(known, value) if name.endswith("/seconds_max") else known + value
    return found


def calls_of(run: AgentRun) -> dict[str, float]:
    """The calls of this attempt and of those before it."""
    tools = run.context.tools
    tools.abandon()  # those of code that was given up, which will not end
    own = {"tool_calls": tools.calls, "tool_errors": tools.errors, **tools.counts}
    return summed(run.before.calls, own) if run.before.calls else own


def _metrics_of(run: AgentRun, restarts: int) -> dict[str, float]:
    context, tools = run.context, run.context.tools
    cut, shown = context.cut_prompt_tokens, context.sampled_placeholders
    truncated = context.truncated_tokens
    return {
        "generation_s": context.generation_s,
        "tool_s": tools.seconds,
        **calls_of(run),
        "cached_tokens": context.cached_tokens,
        **({"cut_prompt_tokens": cut} if cut else {}),
        **({"sampled_placeholders": shown} if shown else {}),
        **({"truncated_tokens": truncated} if truncated else {}),
        **tools.metrics,
        "attempts": run.attempt,
        "discarded_tokens": run.before.discarded + context.discarded_tokens,
        "resumes": run.before.resumes + context.resumes,
        "restarts": restarts,
    }


def rejected(member: Member, error: RejectedPrompt) -> Trajectory:
    """The trajectory of a member whose prompt cannot be run."""
    return ended_before_start(
        member, Ending(outcome=Outcome.REJECTED, reason=error.reason), Cause.of(error)
    )


def ended_before_start(member: Member, ending: Ending, cause: Cause | None = None) -> Trajectory:
    """The trajectory of a member whose agent never ran: an outcome and no tokens."""
    return Trajectory(
        uid=member.identity.uid,
        group=member.identity.group,
        member=member.identity.member,
        transcript=Transcript(),
        outcome=ending.outcome,
        reason=ending.reason,
        limit_source=ending.limit_source,
        cause=cause,
        trainable=False,
        extra=dict(member.prompt.extra),
        prompt=member.named_prompt,
    )


def unstarted(member: Member, deadline: Deadline) -> Trajectory:
    """The trajectory of a member that was cancelled, or whose time was over, while it waited."""
    if member.cancel_reason is not None:
        return ended_before_start(
            member, Ending(outcome=Outcome.CANCELLED, reason=member.cancel_reason)
        )
    over = deadline.error()
    return ended_before_start(
        member, Ending(outcome=over.outcome, reason=over.reason, limit_source=over.source)
    )
