"""Keeps SGLang's account of weight versions right over a change in place; loaded by SGLang alone.

SGLang's scheduler computes one step while it reads the results of the one before. Its pause in
place leaves the last step unread, and SGLang then takes the tokens of that step for the new
weights' own, although the old ones sampled them. Seen in 0.5.23.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCHEDULER = "sglang.srt.managers.scheduler"
METHOD = "record_weight_version_change"


def register() -> None:
    """In a scheduler's process of a version that keeps such an account."""
    module = sys.modules.get(SCHEDULER)  # elsewhere it would be loaded for nothing
    if module is None or not hasattr(module.Scheduler, METHOD):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{SCHEDULER}.Scheduler.{METHOD}", count_unread, HookType.AROUND)


def count_unread(record: Callable[..., Any], scheduler: Any, *args: Any, **options: Any) -> Any:
    """Record a change, with the tokens that are sampled and not read yet on the old side."""
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    serving = sys.modules[SCHEDULER].get_serving
    unread = [(request, len(request.weight_version_events)) for request in _sampled(scheduler)]
    old = serving().weight_version
    result = record(scheduler, *args, **options)
    if serving().weight_version == old:
        return result
    for request, count in unread:
        events = request.weight_version_events
        if len(events) > count:
            tokens = events[-1].num_output_tokens + 1
            events[-1] = dataclasses.replace(events[-1], num_output_tokens=tokens)
        else:  # its first token
            events.append(WeightVersionEvent(old_version=old, num_output_tokens=1))
    return result


def _sampled(scheduler: Any) -> Iterator[Any]:
    """Requests of steps whose results are unread, but for prompts that are only half in."""
    for batch, _ in getattr(scheduler, "result_queue", ()):
        for request in batch.reqs:
            if not (batch.forward_mode.is_extend() and request.inflight_middle_chunks > 0):
                yield request
