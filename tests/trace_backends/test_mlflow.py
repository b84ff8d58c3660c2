"""A real file store of MLflow receives the traces of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

mlflow = pytest.importorskip("mlflow")

import observed  # noqa: E402
from rollout.config import ObserveConfig  # noqa: E402
from rollout.errors import ConfigError  # noqa: E402


def test_mlflow_file_store_has_each_trajectory_as_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    observe = ObserveConfig(trace_backend="mlflow", token2text=True, project="of-tests")
    observed.run(observed.prompts("add please sum", "break please break"), observe, samples=2)
    experiment = mlflow.get_experiment_by_name("of-tests")
    assert experiment is not None
    traces = mlflow.search_traces(locations=[experiment.experiment_id], return_type="list")
    found = {(t.info.tags["uid"], t.info.tags["rollout_n"]): t for t in traces}
    assert set(found) == {("add", "0"), ("add", "1"), ("break", "0"), ("break", "1")}
    trace = found["add", "1"]
    assert (trace.info.tags["step"], trace.info.tags["sample_index"]) == ("7", "0")
    assert trace.info.tags["validate"] == "False"
    spans = {each.name: each for each in trace.data.spans}
    call = spans["execute_tool add"]
    assert (call.span_type, call.inputs, call.outputs) == ("TOOL", {"a": 1, "b": 2}, "3")
    seconds = (call.end_time_ns - call.start_time_ns) / 1e9
    assert seconds == pytest.approx(observed.TOOL_S)
    assert spans["slowly"].parent_id == call.span_id
    assert observed.ANSWER in spans["chat simulated"].outputs
    failed = next(s for s in found["break", "0"].data.spans if s.name == "execute_tool broken")
    assert failed.status.status_code.value == "ERROR"


def test_mlflow_store_that_cannot_be_opened_is_refused_by_name(tmp_path: Path) -> None:
    mlflow.set_tracking_uri(f"nothing://{tmp_path}")
    observe = ObserveConfig(trace_backend="mlflow", project="of-tests")
    with pytest.raises(ConfigError, match=r"observe.trace_backend = 'mlflow' cannot be opened: .*"):
        observed.run(observed.prompts("add please sum"), observe)
