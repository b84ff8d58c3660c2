"""Traces of trajectories: gathered as they run, built and handed over once they have ended."""

from __future__ import annotations

import importlib
import logging
import queue
import threading
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from rollout.errors import ConfigError
from rollout.observe import events as told
from rollout.observe.trace_spans import RunFacts, trace_of
from rollout.seeds import derive_seed
from rollout.types import Outcome

if TYPE_CHECKING:
    from rollout.chat.trajectory import Trajectory
    from rollout.config import ObserveConfig
    from rollout.observe.events import Event
    from rollout.observe.trace_spans import Decode, Span, Told

logger = logging.getLogger("rollout.observe")

#: Ended trajectories that may wait for a slow backend; further ones are dropped and counted.
MOST_WAITING = 4096
#: How long `close` waits for the backend.
CLOSE_S = 15.0

#: Adapters, each with the package that it needs; each has a class `Backend`.
BACKENDS = {
    "otel": ("rollout.observe.backends.otel", "opentelemetry"),
    "mlflow": ("rollout.observe.backends.mlflow", "mlflow"),
    "weave": ("rollout.observe.backends.weave", "weave"),
}
#: What the tree of a trajectory is made of.
_KEPT = frozenset(
    {
        told.TurnEnded,
        told.RequestEnded,
        told.ToolEnded,
        told.UserEnded,
        told.RewardEnded,
        told.SpanEnded,
    }
)


class TraceBackend(Protocol):
    """Takes finished traces, in a thread of its own."""

    def export(self, root: Span, /) -> None:
        """Take a trajectory's; what it raises is logged."""

    def close(self) -> None:
        """No more will come: let all of them arrive."""


class Tracer:
    """Builds the traces of the chosen trajectories; a `Reader`.

    On the loop it only gathers events; a thread builds spans and hands them over.

    Args:
        share: Of all trajectories; those that failed come anyway.
        has_texts: Adds decoded text, once `decode` is set.

    Attributes:
        decode: Ids to text; set when the tokenizer has been loaded.
    """

    def __init__(
        self,
        backend: TraceBackend,
        share: float,
        *,
        has_texts: bool = False,
    ) -> None:
        self.decode: Decode | None = None
        self._backend, self._share, self._has_texts = backend, share, has_texts
        self._happened: dict[int, list[Told]] = {}
        self._run = RunFacts(wall_s=0.0)
        self._ended: queue.Queue[_Ended | None] = queue.Queue(MOST_WAITING)
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name="rollout-traces", daemon=True)
        self._thread.start()

    def __call__(self, event: Event, subject: Any) -> None:
        kind = type(event)
        if kind in _KEPT:
            try:
                self._happened[event.trajectory].append((event, subject))  # type: ignore[attr-defined,arg-type]
            except KeyError:
                return  # of a request without a trajectory, or after its end
        elif kind is told.TrajectoryStarted:
            self._happened.setdefault(event.trajectory, [])  # type: ignore[attr-defined]
        elif kind is told.TrajectoryEnded:
            self._end(event, subject)  # type: ignore[arg-type]
        elif isinstance(event, told.RunStarted):
            self._run = RunFacts.of(event)

    def wants(self, step: int, uid: str, member: int, *, is_failed: bool) -> bool:
        """See `Wants`; the same ones in every run."""
        if is_failed or self._share >= 1:
            return True
        return derive_seed(0, "trace", step, uid, member) % 2**32 < self._share * 2**32

    def close(self) -> None:
        """Hand over what is left; bounded by `CLOSE_S`."""
        self._ended.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.error("traces: the backend does not take them; the last ones are lost")
        if self._dropped:
            logger.warning("traces: %d were dropped: the backend is too slow", self._dropped)

    def _end(self, event: told.TrajectoryEnded, trajectory: Trajectory | None) -> None:
        happened = self._happened.pop(event.trajectory, [])
        is_failed = event.outcome == Outcome.FAILED
        if not self.wants(event.step, event.uid, event.member, is_failed=is_failed):
            return
        try:
            self._ended.put_nowait(_Ended(event, happened, trajectory))
        except queue.Full:
            self._dropped += 1

    def _work(self) -> None:
        while (ended := self._ended.get()) is not None:
            try:
                run = self._run
                if self._has_texts and self.decode is not None:
                    run = attrs.evolve(run, decode=self.decode)
                self._backend.export(trace_of(ended.event, ended.happened, ended.trajectory, run))
            except Exception:
                logger.exception("a trace of %s is lost", ended.event.uid)
        try:
            self._backend.close()
        except Exception:
            logger.exception("traces: the backend did not close")


@attrs.frozen
class _Ended:
    event: told.TrajectoryEnded
    happened: list[Any]
    trajectory: Any


def open_tracer(observe: ObserveConfig) -> Tracer | None:
    """What traces as the configuration says; None: it does not.

    Raises:
        ConfigError: The backend's package is not installed, or it cannot be reached.
    """
    name = observe.trace_backend
    if name is None:
        return None
    module, package = BACKENDS[name]
    try:
        backend = importlib.import_module(module).Backend(observe.project)
    except ImportError as error:
        raise ConfigError(
            f"observe.trace_backend = {name!r} needs the package {error.name or package}: "
            f"pip install 'rollout-rl[{name}]'"
        ) from error
    return Tracer(backend, observe.trace_share, has_texts=observe.token2text)
