"""What callers give beside their prompts, checked before any work, and the calls made of it."""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral
from typing import TYPE_CHECKING, Any

from rollout.chat.trajectory import Group
from rollout.config import GroupPolicy
from rollout.errors import PromptError
from rollout.limits import NEVER, Deadline
from rollout.scheduling.calls import Call
from rollout.scheduling.groups import Groups, Staleness, Wanted
from rollout.scheduling.selection import find_accept
from rollout.tensor_layout import layout_faults
from rollout.types import Prompt
from rollout.utf8 import is_name

if TYPE_CHECKING:
    from rollout.scheduling.scheduler import Scheduler

#: The largest step, and number of groups: what trainers and engines keep numbers in.
MAX_STEP = 2**63 - 1


def check_call(
    step: Any, validate: Any, samples: Any, layout: Any = "padded", trim: Any = False
) -> tuple[int | None, int | None]:
    """Check the arguments of `generate` and `stream`; a `PromptError` names all faults.

    Returns:
        Step and samples; None: as calls and configuration say.
    """
    faults = []
    if step is not None and not (_is_natural(step) and int(step) <= MAX_STEP):
        faults.append(f"step = {step!r:.80}: expected an integer from 0 to {MAX_STEP}, or None")
    if not isinstance(validate, bool):
        faults.append(f"validate = {validate!r:.80}: expected True or False")
    if samples is not None and not (_is_natural(samples) and int(samples)):
        faults.append(f"samples = {samples!r:.80}: expected an integer ≥ 1, or None")
    _raise(faults + layout_faults(layout, trim))
    return None if step is None else int(step), None if samples is None else int(samples)


def check_source(source: Any) -> None:
    """Check that an argument is a source, without pulling; else raise a `PromptError`."""
    is_iterable = isinstance(source, AsyncIterable | Iterable)
    if not is_iterable:
        with suppress(TypeError):
            iter(source)  # asks for nothing, where it has its items by number
            is_iterable = True
    if isinstance(source, Prompt | str | bytes | Mapping) or not is_iterable:
        raise PromptError(
            f"source: expected an iterable or async iterable of Prompt, got {type(source).__name__}"
        )


def check_group_call(policy: Any, groups: Any, max_staleness: Any, groups_per_step: Any) -> None:
    """Check the arguments of `collect` and `stream_groups`; a `PromptError` names all faults."""
    faults = []
    if not isinstance(policy, GroupPolicy | None):
        faults.append(f"policy = {policy!r:.80}: expected a GroupPolicy, or None")
    steps = 1 if groups_per_step is None else groups_per_step
    for name, value in (("groups", groups), ("groups_per_step", steps)):
        if not (_is_natural(value) and 0 < int(value) <= MAX_STEP):
            faults.append(f"{name} = {value!r:.80}: expected an integer ≥ 1 and at most {MAX_STEP}")
    if max_staleness is not None and not _is_natural(max_staleness):
        faults.append(f"max_staleness = {max_staleness!r:.80}: expected an integer ≥ 0, or None")
    if (max_staleness is None) != (groups_per_step is None):
        faults.append(
            f"max_staleness = {max_staleness!r:.80}, groups_per_step = {groups_per_step!r:.80}: "
            "expected both, or neither"
        )
    _raise(faults)


def make_group_call(
    scheduler: Scheduler,
    source: Any,
    policy: Any,
    step: int,
    *,
    groups: Any = 1,
    is_stream: bool = False,
    max_staleness: Any = None,
    groups_per_step: Any = None,
) -> Call:
    """Make a call of `collect`, or of `stream_groups`, which has as many groups as it takes.

    Raises:
        PromptError: An argument is wrong; nothing has been started.
        ConfigError: What the policy names cannot be imported.
    """
    config, engines = scheduler.config, scheduler.engines
    check_source(source)
    check_group_call(policy, groups, max_staleness, groups_per_step)
    policy = config.scheduling.groups if policy is None else policy.over(config.scheduling.groups)
    samples = config.scheduling.samples_per_prompt
    if policy.members is not None and policy.members > samples:
        raise PromptError(
            f"policy.members = {policy.members}: expected at most "
            f"scheduling.samples_per_prompt = {samples}"
        )
    accept, staleness, deadline = find_accept(policy.accept), None, NEVER
    if max_staleness is not None and groups_per_step is not None:
        most, per_step = int(max_staleness), int(groups_per_step)  # NumPy's could overflow
        staleness = Staleness(most=most, per_step=per_step, start=engines.weight_version)
    if not is_stream:
        deadline = Deadline.after(config.limits.batch_s, "limits.batch_s")
    wanted = Wanted(
        groups=None if is_stream else int(groups),
        members=policy.members or samples,
        oversample=policy.oversample,
        max_refused=policy.max_refused,
        surplus=policy.surplus,
        on_group_deadline=policy.on_group_deadline,
        refills=config.scheduling.max_retries if policy.refill_failed else 0,
        staleness=staleness,
    )
    before = scheduler.log.take_call(step)
    found = Groups(wanted, lambda: engines.weight_version)
    found.counts["dropped"] = before.missing or 0
    return Call(
        scheduler,
        found,
        name="stream_groups" if is_stream else "collect",
        step=step,
        deadline=deadline,
        source=scheduler.queue.find_source(source),
        accept=accept,
        group_s=policy.group_s,
        before=before,
    )


def check_groups(groups: Any, layout: Any, trim: Any) -> None:
    """Check the arguments of `make_batch`; a `PromptError` names all faults."""
    faults = layout_faults(layout, trim)
    if not isinstance(groups, Sequence) or isinstance(groups, str | bytes):
        faults.append(f"groups = {groups!r:.80}: expected a list of the groups that a stream gave")
    else:
        faults += [
            f"groups[{at}] = {each!r:.80}: expected a Group"
            for at, each in enumerate(groups)
            if not isinstance(each, Group)
        ]
    _raise(faults)


def check_target(uid: Any, member: Any, reason: Any) -> None:
    """Check the arguments of `cancel`; a `PromptError` names all faults."""
    faults = []
    if not isinstance(uid, str | None):
        faults.append(f"uid = {uid!r:.80}: expected a string, or None for every prompt")
    if member is not None and not _is_natural(member):
        faults.append(f"member = {member!r:.80}: expected an integer ≥ 0, or None for every one")
    if not is_name(reason):
        faults.append(f"reason = {reason!r:.80}: expected a non-empty string in UTF-8")
    _raise(faults)


def _is_natural(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _raise(faults: list[str]) -> None:
    if faults:
        raise PromptError("\n".join(faults))
