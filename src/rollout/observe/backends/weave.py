"""Traces to Weave: to the client that the process has, or to one that is opened."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import weave

from rollout.observe.written_values import plain

if TYPE_CHECKING:
    from rollout.observe.trace_spans import Span

#: Attributes of the trajectory by which calls are found, under these names.
_FOUND_BY = ("step", "sample_index", "rollout_n", "validate")


class Backend:
    """Logs each trajectory as a call, with what happened in it as calls within."""

    def __init__(self, project: str) -> None:
        self._client: Any = weave.get_client() or weave.init(project)

    def export(self, root: Span) -> None:
        """See `TraceBackend`."""
        self._export(root, None)

    def close(self) -> None:
        """See `TraceBackend`; the client stays open."""
        self._client.flush()

    def _export(self, each: Span, parent: Any) -> None:
        found_by = {
            name: each.attributes[f"rollout.{name}"]
            for name in _FOUND_BY
            if f"rollout.{name}" in each.attributes
        }
        call = self._client.create_call(
            each.name.partition(" ")[0],
            {} if each.inputs is None else {"inputs": plain(each.inputs)},
            parent,
            attributes={**each.attributes, **found_by},
            display_name=each.name,
            use_stack=False,
            started_at=datetime.fromtimestamp(each.began, UTC),
        )
        for child in each.children:
            self._export(child, call)
        self._client.finish_call(
            call,
            plain(each.outputs),
            exception=RuntimeError(each.error) if each.error else None,
            ended_at=datetime.fromtimestamp(each.ended, UTC),
        )
