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
#: On a request of SGLang's: since when its tokens wait, and when they could have left.
TIMES = "rollout_times"
#: Of the longest wait: requests that have waited for this share less leave with it, in one message.
TOGETHER = 0.5


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
        self._is_measured = False

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
        """Those that wait longest say when tokens leave; most others leave with them."""
        times = [getattr(req, TIMES, None) for req in reqs]
        before = next((each for each in times if each is not None), None)
        if before is not None:
            self._pacer.note_step(now - before[1])
            self._is_measured = True
        since = [now if each is None else each[0] for each in times]
        longest = now - min(since, default=now)
        # How long the next step may take is not known before one was measured.
        is_due = not self._is_measured or self._pacer.is_due(longest)
        for req, waits_since in zip(reqs, since, strict=True):
            leaves = is_due and now - waits_since >= TOGETHER * longest
            req.sampling_params.stream_interval = 1 if leaves else self._most
            setattr(req, TIMES, (now if leaves else waits_since, now))


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
