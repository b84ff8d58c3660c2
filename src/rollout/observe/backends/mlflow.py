"""Traces to MLflow: its server or store, as ``MLFLOW_TRACKING_URI`` or the process says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlflow
from mlflow.entities import SpanType
from mlflow.tracking import MlflowClient

from rollout.observe.trace_spans import AGENT, CHAT, TOOL
from rollout.observe.written_values import plain

if TYPE_CHECKING:
    from rollout.observe.trace_spans import Span

_TYPES = {AGENT: SpanType.AGENT, CHAT: SpanType.CHAT_MODEL, TOOL: SpanType.TOOL}
#: Attributes of the trajectory by which traces are found, as tags.
_TAGS = ("step", "sample_index", "rollout_n", "validate", "uid", "outcome")


class Backend:
    """Logs each trajectory as a trace of one experiment, named as the project."""

    def __init__(self, project: str) -> None:
        client = MlflowClient()
        experiment = client.get_experiment_by_name(project)
        self._experiment: str = (
            client.create_experiment(project)
            if experiment is None
            else str(experiment.experiment_id)
        )

    def export(self, root: Span) -> None:
        """See `TraceBackend`."""
        names = {name: f"rollout.{name}" for name in _TAGS}
        tags = {
            name: str(root.attributes[each])
            for name, each in names.items()
            if each in root.attributes
        }
        self._export(root, None, tags=tags, experiment_id=self._experiment)

    def close(self) -> None:
        """See `TraceBackend`."""
        mlflow.flush_trace_async_logging()

    def _export(self, each: Span, parent: Any, **of_root: Any) -> None:
        span = mlflow.start_span_no_context(
            each.name,
            _TYPES.get(each.kind, SpanType.UNKNOWN),
            parent_span=parent,
            inputs=plain(each.inputs),
            attributes=each.attributes,
            start_time_ns=int(each.began * 1e9),
            **of_root,
        )
        for child in each.children:
            self._export(child, span)
        outputs = plain(each.outputs)
        if each.error and outputs is None:
            outputs = {"error": each.error}
        span.end(
            outputs=outputs,
            status="ERROR" if each.error else "OK",
            end_time_ns=int(each.ended * 1e9),
        )
