"""Traces: what OpenTelemetry's OTLP exporter sends of a run, and which trajectories have one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

import observed
import rollout
from observed import prompts
from rollout.config import ObserveConfig
from rollout.observe.event_stream import EventStream
from rollout.observe.events import TrajectoryEnded, TrajectoryStarted, TurnEnded
from rollout.observe.trace_spans import Span
from rollout.observe.traces import Tracer
from rollout.testing import Scenario, run_virtual, simulated_tokenizer, tool_call

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A receiver of OTLP over HTTP, as collectors have one: its address, and the spans so far."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def attributes(span: Any) -> dict[str, Any]:
    def value(each: Any) -> Any:
        kind = each.WhichOneof("value")
        if kind == "array_value":
            return [value(inner) for inner in each.array_value.values]
        return getattr(each, kind)

    return {each.key: value(each.value) for each in span.attributes}


def test_otel_spans_of_a_run_arrive_at_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (address, spans):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", address)
        batch, _ = observed.run(
            prompts("add please sum", "break please break"),
            ObserveConfig(trace_backend="otel", token2text=True),
        )
    roots = {attributes(each)["rollout.uid"]: each for each in spans if not each.parent_span_id}
    assert set(roots) == {"add", "break"}
    root = roots["add"]
    said = attributes(root)
    assert root.name == "invoke_agent tool_agent"
    assert said["gen_ai.operation.name"] == "invoke_agent"
    transcript = batch.trajectories[0].transcript
    read = simulated_tokenizer().decode(list(transcript.span_ids(transcript.spans[0])))
    assert said["rollout.input"] == read
    assert "add please sum" in read
    assert (said["rollout.step"], said["rollout.sample_index"]) == (7, 0)
    assert (said["rollout.rollout_n"], said["rollout.validate"]) == (0, False)
    assert said["gen_ai.usage.output_tokens"] == batch.trajectories[0].generated_length
    within = [each for each in spans if each.parent_span_id == root.span_id]
    within.sort(key=lambda each: each.start_time_unix_nano)
    names = [each.name for each in within]
    assert names == ["chat simulated", "execute_tool add", "chat simulated", "reward"]
    turn, call, *_ = within
    assert attributes(turn)["gen_ai.response.finish_reasons"] == ["stop"]
    assert attributes(turn)["rollout.replica"] == "engine-0"
    assert "tool_call" in attributes(turn)["gen_ai.output.messages"]
    assert attributes(call)["gen_ai.tool.call.arguments"] == '{"a":1,"b":2}'
    assert attributes(call)["gen_ai.tool.call.result"] == "3"
    seconds = (call.end_time_unix_nano - call.start_time_unix_nano) / 1e9
    assert seconds == pytest.approx(observed.TOOL_S)
    (outer,) = [each for each in spans if each.parent_span_id == call.span_id]
    assert outer.name == "slowly"
    failed = next(each for each in spans if each.name == "execute_tool broken")
    assert failed.status.message == "ValueError: no such number"
    assert failed.trace_id == roots["break"].trace_id != root.trace_id


HALF = "\ud800"


@rollout.function_tool
async def halve(topic: str) -> str:
    """Say half of a character.

    Args:
        topic: Of what.
    """
    return f"half {HALF}"


def test_half_of_a_character_in_a_result_loses_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(seed=1).reply("please", tool_call("halve", topic="x")).then("Oh.")

    async def body() -> None:
        config = scenario.config(observe=ObserveConfig(trace_backend="otel", token2text=True))
        async with rollout.open_rollout(config, [halve]) as runtime:
            await runtime.generate(prompts("good please"))

    with collector() as (address, spans):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", address)
        run_virtual(body)
    (call,) = [each for each in spans if each.name == "execute_tool halve"]
    assert attributes(call)["gen_ai.tool.call.result"] == "half \ufffd"


class Kept:
    """A backend that keeps what it gets."""

    def __init__(self) -> None:
        self.traces: list[Span] = []

    def export(self, root: Span) -> None:
        self.traces.append(root)

    def close(self) -> None:
        pass


def traced(share: float, outcomes: list[str]) -> list[Span]:
    """The traces of trajectories that ended so."""
    kept, events = Kept(), EventStream()
    tracer = Tracer(kept, share)
    events.attach(tracer, wants=tracer.wants)
    for number, outcome in enumerate(outcomes, 1):
        who: dict[str, Any] = {
            "trajectory": number,
            "batch": 0,
            "step": 0,
            "uid": f"p{number}",
            "group": number,
            "member": 0,
        }
        events.emit(TrajectoryStarted(at=1.0, **who))
        events.emit(TurnEnded(at=2.0, trajectory=number, turn=0, began=1.0, finish_reason="stop"))
        events.emit(TrajectoryEnded(at=3.0, began=1.0, outcome=outcome, **who))
    tracer.close()
    return kept.traces


def test_tracer_share_is_of_trajectories_and_those_that_failed_always_come() -> None:
    outcomes = ["completed"] * 1000 + ["failed"] * 10
    traces = traced(0.1, outcomes)
    failed = [each for each in traces if each.attributes["rollout.outcome"] == "failed"]
    assert len(failed) == 10
    assert all([child.kind for child in each.children] == ["chat"] for each in failed)
    assert 70 <= len(traces) - len(failed) <= 130
    again = [each.attributes["rollout.uid"] for each in traced(0.1, outcomes)]
    assert again == [each.attributes["rollout.uid"] for each in traces]
    assert traced(0.0, ["completed"] * 10) == []


def test_tracer_backend_that_raises_loses_no_other_trace(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()

    class Picky(Kept):
        def export(self, root: Span) -> None:
            if root.attributes["rollout.uid"] == "p1":
                raise ValueError("not that one")
            kept.export(root)

    tracer = Tracer(Picky(), 1.0)
    for number in (1, 2):
        who: dict[str, Any] = {"trajectory": number, "uid": f"p{number}", "group": 0, "member": 0}
        tracer(TrajectoryStarted(at=0.0, batch=0, step=0, **who), None)
        ended = TrajectoryEnded(at=1.0, began=0.0, batch=0, step=0, outcome="completed", **who)
        tracer(ended, None)
    tracer.close()
    assert [each.attributes["rollout.uid"] for each in kept.traces] == ["p2"]
    assert "a trace of p1 is lost" in caplog.text


def test_failed_trajectory_that_no_share_chose_is_traced_with_its_requests_and_tools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collector() as (address, spans):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", address)

        config = observed.SCENARIO.config(
            observe=ObserveConfig(trace_backend="otel", trace_share=0.0)
        )

        async def body() -> rollout.RolloutBatch:
            tools = [observed.add, observed.broken]
            async with rollout.open_rollout(config, tools, observed.reward) as runtime:
                return await runtime.generate(prompts("add please sum", "bad please sum"))

        batch = run_virtual(body)
    assert [str(each.outcome) for each in batch.trajectories] == ["completed", "failed"]
    (root,) = [each for each in spans if not each.parent_span_id]
    assert attributes(root)["rollout.uid"] == "bad"
    within = [each for each in spans if each.parent_span_id == root.span_id]
    within.sort(key=lambda each: each.start_time_unix_nano)
    names = [each.name for each in within]
    assert names == ["chat simulated", "execute_tool add", "chat simulated", "reward"]
    turn, call, *_, asked = within
    phases = {"rollout.queue_s", "rollout.prefill_s", "rollout.decode_s", "rollout.replica"}
    assert phases <= attributes(turn).keys()
    took_s = (turn.end_time_unix_nano - turn.start_time_unix_nano) / 1e9
    told_s = sum(attributes(turn)[name] for name in phases - {"rollout.replica"})
    assert told_s == pytest.approx(took_s)
    assert attributes(call)["gen_ai.tool.call.result"] == "3"
    assert asked.status.message == "RuntimeError: no reward for that"


class Data:
    """What a tool has beside its text."""


@rollout.function_tool
async def look_up(topic: str) -> rollout.ToolResult:
    """Look something up.

    Args:
        topic: Of what.
    """
    data = Data()
    made.append(weakref.ref(data))
    return rollout.ToolResult("found", data=data)


made: list[weakref.ref[Data]] = []


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_tracer_keeps_the_text_of_a_tools_answer_and_not_its_data(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    scenario = Scenario(seed=1).reply("please", tool_call("look_up", topic="x")).then("Oh.")
    config = scenario.config(observe=ObserveConfig(trace_backend="otel", trace_share=share))
    seen: list[bool] = []

    async def reward(trajectory: rollout.Trajectory) -> float:
        seen.append(made[-1]() is not None)
        return 1.0

    async def body() -> rollout.RolloutBatch:
        async with rollout.open_rollout(config, [look_up], reward) as runtime:
            return await runtime.generate(prompts("a please"))

    with collector() as (address, _):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", address)
        run_virtual(body)
    assert seen == [False]
