"""Traces of trajectories: gathered as they run, built and handed over once they have ended."""

from __future__ import annotations

import importlib
import logging
import threading
from collections import deque
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

from rollout.errors import ConfigError
from rollout.observe import events as told
from rollout.observe.trace_spans import RunFacts, trace_of
from rollout.seeds import session_name
from rollout.types import Outcome

if TYPE_CHECKING:
    from collections.abc import Collection

    from rollout.chat.trajectory import Trajectory
    from rollout.config import ObserveConfig
    from rollout.observe.events import Event
    from rollout.observe.trace_spans import Decode, Span

logger = logging.getLogger("rollout.observe")

#: Ended trajectories that may wait for a slow backend; further ones are dropped and counted.
MOST_WAITING = 4096
#: How long an ended trajectory waits for others before it is handed over: a thread that is woken
#: for each takes the interpreter from the loop each time.
EXPORT_EVERY_S = 0.25
#: How long `close` waits for the backend.
CLOSE_S = 15.0

#: Adapters, each with the package that it needs; each has a class `Backend`.
BACKENDS = {
    "otel": ("rollout.observe.backends.otel", "opentelemetry"),
    "mlflow": ("rollout.observe.backends.mlflow", "mlflow"),
    "weave": ("rollout.observe.backends.weave", "weave"),
}
#: What the tree of a trajectory is made of.
_KEPT: frozenset[type[Event]] = frozenset(
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

    #: The events that it reads.
    kinds: ClassVar[Collection[type[Event]]] = (
        *_KEPT,
        told.RunStarted,
        told.TrajectoryStarted,
        told.TrajectoryEnded,
    )

    def __init__(
        self,
        backend: TraceBackend,
        share: float,
        *,
        has_texts: bool = False,
    ) -> None:
        self.decode: Decode | None = None
        self._backend, self._share, self._has_texts = backend, share, has_texts
        # Of each trajectory its events in turn with what they happened to: pairs would be as many
        # containers, which Python's collector would look at.
        self._happened: dict[int, list[Any]] = {}
        self._run = RunFacts(wall_s=0.0)
        self._waiting: deque[tuple[told.TrajectoryEnded, list[Any], Trajectory | None]] = deque()
        self._dropped = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="rollout-traces", daemon=True)
        self._thread.start()

    def __call__(self, event: Event, subject: Any) -> None:
        kind = type(event)
        if kind in _KEPT:
            happened = self._happened.get(event.trajectory)  # type: ignore[attr-defined]
            if happened is not None:  # else without a trajectory, or after its end
                happened += event, subject
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
        who = blake2b(session_name(step, uid, member).encode(), digest_size=4).digest()
        return int.from_bytes(who) < self._share * 2**32

    def close(self) -> None:
        """Hand over what is left; bounded by `CLOSE_S`."""
        self._stop.set()
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
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append((event, happened, trajectory))
        else:
            self._dropped += 1

    def _work(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._stop.wait(EXPORT_EVERY_S)
            while self._waiting:
                self._export(*self._waiting.popleft())
        try:
            self._backend.close()
        except Exception:
            logger.exception("traces: the backend did not close")

    def _export(
        self, event: told.TrajectoryEnded, happened: list[Any], trajectory: Trajectory | None
    ) -> None:
        run = self._run
        if self._has_texts and self.decode is not None:
            run = attrs.evolve(run, decode=self.decode)
        try:
            self._backend.export(trace_of(event, happened, trajectory, run))
        except Exception:
            logger.exception("a trace of %s is lost", event.uid)


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
    except Exception as error:  # of whatever package that is
        raise ConfigError(
            f"observe.trace_backend = {name!r} cannot be opened: {type(error).__name__}: {error}"
        ) from error
    return Tracer(backend, observe.trace_share, has_texts=observe.token2text)
