"""Weave's own client receives the traces of a run, and hands them to a transport of ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("weave")

from weave.trace.context import weave_client_context
from weave.trace.weave_client import WeaveClient

import observed
from rollout.config import ObserveConfig


class Server:
    """In place of the transport: answers everything, and keeps the calls."""

    def __init__(self) -> None:
        self.started: dict[str, Any] = {}
        self.ended: dict[str, Any] = {}

    def call_start(self, request: Any, *_: Any, **__: Any) -> Any:
        start = _plain(request)["start"]
        self.started[start["id"]] = start
        return SimpleNamespace(id=start["id"], trace_id=start["trace_id"])

    def call_end(self, request: Any, *_: Any, **__: Any) -> Any:
        end = _plain(request)["end"]
        self.ended[end["id"]] = end
        return SimpleNamespace()

    #: There are none: each call comes at once.
    call_processor = feedback_processor = None

    def get_call_processor(self) -> None:
        """None, as above."""

    def get_feedback_processor(self) -> None:
        """None, as above."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: SimpleNamespace(digest="d" * 43, res=[], objs=[])


def _plain(request: Any) -> Any:
    return request.model_dump() if hasattr(request, "model_dump") else request


@pytest.fixture
def server() -> Any:
    made = Server()
    client = WeaveClient("me", "project", made, ensure_project_exists=False)
    weave_client_context.set_weave_client_global(client)
    yield made
    weave_client_context.set_weave_client_global(None)


def test_weave_client_has_each_trajectory_as_a_call(server: Server) -> None:
    observe = ObserveConfig(trace_backend="weave", token2text=True)
    observed.run(observed.prompts("add please sum", "break please break"), observe)
    roots = {
        each["attributes"]["rollout.uid"]: each
        for each in server.started.values()
        if each["parent_id"] is None
    }
    assert set(roots) == {"add", "break"}
    said = roots["add"]["attributes"]
    assert (said["step"], said["sample_index"], said["rollout_n"]) == (7, 0, 0)
    assert said["validate"] is False
    within = [e for e in server.started.values() if e["parent_id"] == roots["add"]["id"]]
    assert [each["display_name"] for each in within] == [
        "chat simulated",
        "execute_tool add",
        "chat simulated",
        "reward",
    ]
    call = within[1]
    assert call["inputs"] == {"inputs": {"a": 1, "b": 2}}
    ended = server.ended[call["id"]]
    assert ended["output"] == "3"
    assert (ended["ended_at"] - call["started_at"]).total_seconds() == observed.TOOL_S
    broken = next(e for e in server.started.values() if e["display_name"] == "execute_tool broken")
    assert "no such number" in server.ended[broken["id"]]["exception"]
    assert server.started.keys() == server.ended.keys()
