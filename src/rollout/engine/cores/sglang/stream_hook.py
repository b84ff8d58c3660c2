"""Has SGLang's scheduler hand tokens over by time, and name their weights; loaded by SGLang alone.

SGLang counts: a request's tokens leave when so many have been sampled, however long that takes,
and each chunk costs its parent process 43 µs. Here the scheduler's own steps are measured, and what
would wait too long for the end of the next one leaves now. Its partial answers also say which
weights sampled which token, as its final ones do.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from rollout.clocks import monotonic
from rollout.engine.cores.pacing import StreamPacer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: How tokens are gathered in engines of ours: how many at most, and for how many seconds.
STREAM_VARIABLE = "ROLLOUT_SGLANG_STREAM"
STREAMER = "sglang.srt.managers.scheduler_components.output_streamer"
#: On a request of SGLang's: when its tokens left last, and when they could have.
TIMES = "rollout_times"


def register() -> None:
    """In a scheduler's process of an engine of ours."""
    module = sys.modules.get(STREAMER)  # elsewhere it would be loaded for nothing
    asked = os.environ.get(STREAM_VARIABLE)
    if module is None or not asked:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    most, interval_s = asked.split()
    gather = Gatherer(int(most), float(interval_s)).stream_output
    HookRegistry.register(
        f"{STREAMER}.SchedulerOutputStreamer.stream_output", gather, HookType.AROUND
    )
    accumulator = module._GenerationStreamAccumulator
    if "weight_versions" in accumulator.__dataclass_fields__:  # from 0.5.20 on
        accept = f"{STREAMER}.{accumulator.__name__}.accept"
        HookRegistry.register(accept, name_versions, HookType.AROUND)


class Gatherer:
    """Says for each request whether its tokens leave at this step.

    Args:
        most: Tokens that are gathered at most.
        interval_s: How long a sampled token waits at most.
    """

    def __init__(self, most: int, interval_s: float) -> None:
        self._most = most
        self._pacer = StreamPacer(interval_s)

    def stream_output(
        self,
        stream_output: Callable[..., Any],
        streamer: Any,
        reqs: Sequence[Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        """Around SGLang's own: the end of a step of these requests."""
        if getattr(streamer, "is_generation", True):
            self._choose(reqs, monotonic())
        return stream_output(streamer, reqs, *args, **options)

    def _choose(self, reqs: Sequence[Any], now: float) -> None:
        before = next((getattr(req, TIMES) for req in reqs if hasattr(req, TIMES)), None)
        if before is not None:
            self._pacer.note_step(now - before[1])
        for req in reqs:
            left_at = getattr(req, TIMES, (None,))[0]
            is_due = left_at is None or self._pacer.is_due(now - left_at)
            req.sampling_params.stream_interval = 1 if is_due else self._most
            setattr(req, TIMES, (now if is_due else left_at, now))


def name_versions(accept: Callable[..., Any], accumulator: Any, *args: Any, **options: Any) -> Any:
    """Around SGLang's own, which takes up what a request has to say: also in a partial answer."""
    versions = accumulator.weight_versions
    count = len(versions)
    result = accept(accumulator, *args, **options)
    if len(versions) > count and versions[-1] is None:
        from sglang.srt.utils.weight_versions import compute_weight_version_spans

        req = args[0] if args else options["req"]
        versions[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=accumulator.current_weight_version,
            num_output_tokens=len(req.output_ids),
        )
    return result
