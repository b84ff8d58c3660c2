"""The Prometheus endpoint, read over HTTP by the official client library's parser."""

from __future__ import annotations

import socket
import urllib.request
from typing import Any

import anyio
import pytest

import observed
import rollout
from rollout.config import ObserveConfig
from rollout.errors import ConfigError

pytest.importorskip("prometheus_client")
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

Read = dict[tuple[str, tuple[tuple[str, str], ...]], float]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def scraped(port: int) -> Read:
    """What both of the official parsers read, which must be the same."""
    text = samples_of(text_string_to_metric_families(asked(port, "text/plain")))
    other = samples_of(openmetrics_parser.text_string_to_metric_families(asked(port, OPENMETRICS)))
    mine = [name for name in text if name[0].startswith("rollout_")]
    assert all(name in other for name in mine if not name[0].endswith("_created"))
    return text


def asked(port: int, accepted: str) -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": accepted}
    )
    with urllib.request.urlopen(request) as answer:
        return str(answer.read().decode())


def samples_of(families: Any) -> Read:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_prometheus_endpoint_official_parser_reads_the_figures_of_a_run() -> None:
    port = free_port()
    config = observed.SCENARIO.config(observe=ObserveConfig(prometheus_port=port))
    read = {}

    async def main() -> rollout.RolloutBatch:
        async with rollout.open_rollout(config, [observed.add], observed.reward) as runtime:
            batch = await runtime.generate(
                observed.prompts("add please sum", "bad please sum"), samples=2
            )
            await anyio.sleep(1.5)  # of real time: the engines report once a second
            read.update(await anyio.to_thread.run_sync(scraped, port))
            return batch

    batch = anyio.run(main)
    completed = (("outcome", "completed"), ("reason", ""))
    assert read["rollout_trajectories_total", completed] == 2
    failed = (("outcome", "failed"), ("reason", "reward"))
    assert read["rollout_trajectories_total", failed] == 2
    tokens = read["rollout_tokens_total", (("kind", "generated"),)]
    assert tokens == batch.metrics["tokens/generated"]
    assert read["rollout_tool_seconds_count", (("tool", "add"),)] == 4
    assert read["rollout_tool_seconds_sum", (("tool", "add"),)] >= 4 * observed.TOOL_S
    assert read["rollout_rewards_total", (("bound", "1.0"),)] == 2
    ends = (("end", "stop"), ("replica", "engine-0"))
    assert read["rollout_requests_total", ends] == 8
    assert read["rollout_replica_serving", (("replica", "engine-0"),)] == 1
    for what in ("utilisation", "kv_used", "zombies", "queued"):
        assert ("rollout_replica", (("replica", "engine-0"), ("what", what))) in read
    assert read["rollout_runtime", (("what", "finished"),)] == 4
    assert ("rollout_loop_lag_seconds", ()) in read
    with pytest.raises(OSError, match="refused"):  # it is closed with the runtime
        scraped(port)


def test_prometheus_port_that_is_taken_is_refused_by_name() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = observed.SCENARIO.config(observe=ObserveConfig(prometheus_port=port))

        async def main() -> None:
            async with rollout.open_rollout(config):
                pass

        with pytest.raises(ConfigError, match=f"observe.prometheus_port = {port}"):
            anyio.run(main)
