"""The metrics of a run for Prometheus, on a port of this machine; needs the extra `prometheus`."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from rollout.errors import ConfigError
from rollout.lazy import import_extra
from rollout.observe import events as told

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.observe.events import Event

logger = logging.getLogger("rollout.observe")

#: Seconds that buckets of histograms end at: tools answer in milliseconds, tails take minutes.
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
#: What rewards are counted by; most are from 0 to 1.
REWARD_BOUNDS = (-1.0, 0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, math.inf)
HOST = "127.0.0.1"


class PrometheusEndpoint:
    """Serves what the events of a run add up to, from a thread; a `Reader`.

    Args:
        port: 0 takes a free one.

    Attributes:
        port: The one that it listens on, at `HOST`.

    Raises:
        ConfigError: The client library is not installed, or the port is taken.
    """

    def __init__(self, port: int) -> None:
        user = f"observe.prometheus_port = {port}"
        client = import_extra("prometheus_client", "prometheus", user, ConfigError)
        registry = client.CollectorRegistry()
        self._take = _Figures(client, registry).takers
        try:
            self._server, self._thread = client.start_http_server(port, HOST, registry)
        except OSError as error:
            raise ConfigError(
                f"observe.prometheus_port = {port}: {HOST} cannot be listened on: {error.strerror}"
            ) from error
        self.port = int(self._server.server_port)
        logger.info("Prometheus finds the metrics at http://%s:%d/metrics", HOST, self.port)

    def __call__(self, event: Event, subject: Any) -> None:
        take = self._take.get(type(event))
        if take is not None:
            take(event)

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Labelled(dict[Any, Any]):
    """A metric's children by their labels, which the client library looks up slowly."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self._metric = metric

    def __missing__(self, labels: Any) -> Any:
        child = self._metric.labels(*(labels if isinstance(labels, tuple) else (labels,)))
        self[labels] = child
        return child


class _Figures:
    """The metrics, and what each kind of event does to them."""

    def __init__(self, client: Any, registry: Any) -> None:
        def counter(name: str, text: str, *labels: str) -> Any:
            made = client.Counter(f"rollout_{name}", text, labels, registry=registry)
            return _Labelled(made) if labels else made

        def gauge(name: str, text: str, *labels: str) -> Any:
            made = client.Gauge(f"rollout_{name}", text, labels, registry=registry)
            return _Labelled(made) if labels else made

        def histogram(name: str, text: str, *labels: str) -> Any:
            made = client.Histogram(
                f"rollout_{name}", text, labels, registry=registry, buckets=BUCKETS
            )
            return _Labelled(made) if labels else made

        self._outcomes = counter(
            "trajectories", "Trajectories that have ended", "outcome", "reason"
        )
        self._trajectory_s = histogram("trajectory_seconds", "From a place to the outcome")
        # No histogram, whose sum may not fall.
        self._rewards = counter("rewards", "Rewards, by the next bound", "bound")
        self._reward_sum = gauge("reward_sum", "Of all rewards")
        self._tokens = counter("tokens", "Tokens of trajectories that have ended", "kind")
        self._staleness = gauge(
            "staleness", "By how many versions the weights are newer than a trajectory's oldest"
        )
        self._requests = counter("requests", "Requests that are over", "replica", "end")
        self._phase_s = histogram("request_seconds", "Of requests, by phase", "phase")
        self._prompt = counter("prompt_tokens", "Of requests that are over", "replica")
        self._cached = counter("prefix_hit_tokens", "Those of them not computed again", "replica")
        self._tool_s = histogram("tool_seconds", "Of calls", "tool")
        self._tool_errors = counter("tool_errors", "Results that are errors", "tool")
        self._refused = counter("tool_refusals", "Calls that could not be run as asked")
        self._replica = gauge("replica", "What a replica says that it does", "replica", "what")
        self._serving = gauge("replica_serving", "1 while it serves", "replica")
        self._version = gauge("weight_version", "Of the last update")
        self._runtime = gauge("runtime", "Counts of the runtime", "what")
        self._lag = gauge("loop_lag_seconds", "Longest delay of the event loop in the last second")
        self._blocked = counter("loop_blocked_seconds", "In which the event loop was blocked")
        self._newest = 0

    @property
    def takers(self) -> dict[type, Callable[[Any], None]]:
        """By kind of event."""
        return {
            told.TrajectoryEnded: self._trajectory_ended,
            told.RequestEnded: self._request_ended,
            told.ToolEnded: self._tool_ended,
            told.ReplicaSampled: self._replica_sampled,
            told.ReplicaChanged: self._replica_changed,
            told.WeightsUpdated: self._weights_updated,
            told.RuntimeSampled: self._runtime_sampled,
            told.LoopBlocked: self._loop_blocked,
        }

    def _trajectory_ended(self, event: told.TrajectoryEnded) -> None:
        self._outcomes[event.outcome, event.reason].inc()
        self._trajectory_s.observe(event.at - event.began)
        if event.reward is not None:
            bound = next(each for each in REWARD_BOUNDS if event.reward <= each)
            self._rewards[str(bound)].inc()
            self._reward_sum.inc(event.reward)
        self._tokens["prompt"].inc(event.prompt_tokens)
        self._tokens["generated"].inc(event.generated_tokens)
        self._tokens["observation"].inc(event.observation_tokens)
        self._tokens["discarded"].inc(event.discarded_tokens)
        if event.versions:
            self._newest = max(self._newest, event.versions[-1])
            self._staleness.set(self._newest - event.versions[0])

    def _request_ended(self, event: told.RequestEnded) -> None:
        self._requests[event.replica, event.finish_reason].inc()
        self._phase_s["queue"].observe(event.queue_s)
        self._phase_s["prefill"].observe(event.prefill_s)
        self._phase_s["decode"].observe(event.decode_s)
        self._prompt[event.replica].inc(event.prompt_tokens)
        self._cached[event.replica].inc(event.cached_tokens)

    def _tool_ended(self, event: told.ToolEnded) -> None:
        if event.is_refused:  # whatever name the model made up
            self._refused.inc()
            return
        self._tool_s[event.tool].observe(event.at - event.began)
        if event.is_error:
            self._tool_errors[event.tool].inc()

    def _replica_sampled(self, event: told.ReplicaSampled) -> None:
        shares = {
            "running": event.running,
            "queued": event.queued,
            "in_flight": event.in_flight,
            "zombies": event.zombies,
            "kv_used": event.kv_used,
            "tokens_per_s": event.tokens_per_s,
            "utilisation": event.running / event.capacity if event.capacity else 0.0,
        }
        for what, value in shares.items():
            self._replica[event.replica, what].set(value)

    def _replica_changed(self, event: told.ReplicaChanged) -> None:
        self._serving[event.replica].set(event.state == "serving")

    def _weights_updated(self, event: told.WeightsUpdated) -> None:
        if not event.error:
            self._newest = max(self._newest, event.version)
            self._version.set(event.version)

    def _runtime_sampled(self, event: told.RuntimeSampled) -> None:
        self._lag.set(event.lag_s)
        for what in ("admitted", "running", "carried", "finished", "waiting_requests"):
            self._runtime[what].set(getattr(event, what))

    def _loop_blocked(self, event: told.LoopBlocked) -> None:
        self._blocked.inc(event.seconds)
