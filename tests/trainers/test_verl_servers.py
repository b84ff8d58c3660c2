"""verl's own client of its servers, behind our pool, with verl's own load balancer."""

from __future__ import annotations

import asyncio  # noqa: TID251  (verl's servers run on it)
import inspect
import os
import threading
import time  # noqa: TID251
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from verl_server import END, Server
from verl_side import CUSTOM, batch_of, config_of, opened, save_files

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

pytestmark = pytest.mark.filterwarnings("ignore")
PATIENCE_S = 60


class Done:
    """A value that can be awaited, as references of Ray can."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Iterator[Any]:
        return self._value
        yield


class Local:
    """An actor's handle, without Ray."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.actor, name)

        class Method:
            @staticmethod
            def remote(*args: Any, **kwargs: Any) -> Any:
                value = method(*args, **kwargs)
                return value if inspect.iscoroutine(value) else Done(value)

        return Method


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_files(tmp_path_factory.mktemp("model"))


def client_of(kind: Any, config: Any) -> tuple[Any, list[Server]]:
    """verl's client of two servers, and these."""
    servers = [Server(), Server()]
    handles = {f"server-{number}": Local(each) for number, each in enumerate(servers)}
    return kind(config, Local(GlobalRequestLoadBalancer(servers=handles))), servers


def wait_until(condition: Any) -> None:
    """Real time: a runtime on another thread."""
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.parametrize("kind", [LLMServerClient, FullyAsyncLLMServerClient])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_clients_of_verl_generate_with_versions_and_log_probs(
    files: Path, backend: str, kind: Any
) -> None:
    config, pairs = config_of(files, f"{CUSTOM}.backend={backend}"), asyncio.Barrier(2)
    client, servers = client_of(kind, config)
    for each in servers:
        each.together = pairs
    with opened(config, client) as manager:
        ours = manager.generate_sequences(batch_of(["go", "on"], n=4))
    check_answers(ours)
    asked = [each.asked for each in servers]
    assert sum(map(len, asked)) == 8
    assert all(asked)


def check_answers(ours: Any) -> None:
    assert ours.batch["responses"][:, :3].tolist() == [[104, 105, END]] * 8
    assert ours.batch["rollout_log_probs"][0, :3].tolist() == pytest.approx([-0.1, -0.2, -0.3])
    assert ours.non_tensor_batch["min_global_steps"].tolist() == [4] * 8
    assert ours.non_tensor_batch["num_cached_tokens"].tolist() == [3] * 8


@pytest.mark.parametrize("loops", ["rollout", "verl"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_cancelled_request_is_ended_on_its_server(files: Path, backend: str, loops: str) -> None:
    config = config_of(files, f"{CUSTOM}={{backend: {backend}, agent_loops: {loops}}}")
    client, servers = client_of(LLMServerClient, config)
    with opened(config, client) as manager:
        answered: list[Any] = []
        batch = batch_of(["wait", "go"], n=2)
        if loops == "verl":  # whose loop reads more of an answer than a namespace has
            batch = batch_of(["wait", "wait"])
        worker = threading.Thread(target=lambda: answered.append(manager.generate_sequences(batch)))
        worker.start()
        wait_until(lambda: sum(len(each.ended) for each in servers) == 2)
        if loops == "rollout":
            wait_until(lambda: manager.rollout.statistics().finished == 2)
        assert manager.rollout.cancel(reason="enough") == 2
        worker.join()
        again = manager.generate_sequences(batch_of(["go"])) if loops == "rollout" else [0]
    aborted = [each for server in servers for each in server.aborted]
    assert sorted(name for name, _ in aborted) == sorted(
        name for server in servers for name in server.ended
    )
    assert not any(resets for _, resets in aborted)
    wanted = [0, 0, 3, 3] if loops == "rollout" else [0, 0]
    assert answered[0].batch["response_mask"].sum(dim=1).tolist() == wanted
    assert len(again) == 1


@pytest.mark.slow
def test_clients_of_verl_generate_through_actors_of_ray(files: Path) -> None:
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
    )
    try:
        remote = ray.remote(num_cpus=0, max_concurrency=64)(Server)
        servers = {f"server-{number}": remote.remote() for number in range(2)}
        balancer = ray.remote(num_cpus=0)(GlobalRequestLoadBalancer).remote(servers=servers)
        config = config_of(files)
        with opened(config, LLMServerClient(config, balancer)) as manager:
            ours = manager.generate_sequences(batch_of(["go", "on"], n=4))
        check_answers(ours)
        asked = [ray.get(each.seen.remote())[0] for each in servers.values()]
        assert sum(map(len, asked)) == 8
    finally:
        ray.shutdown()
