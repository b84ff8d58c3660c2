"""Fixtures that most tests share."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollout.worker_threads import WorkerThreads

# Engine children import `fake_core` from here, and find nothing to download anywhere.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Tests look for what is left in the directory of temporary files: each process has its own.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="rollout-tests-")
    atexit.register(shutil.rmtree, tempfile.tempdir, ignore_errors=True)

# A busy machine makes no example wrong.
settings.register_profile("rollout", deadline=None)
settings.load_profile("rollout")

# Shells start background jobs with Ctrl-C ignored, which the processes of tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Virtual time, repeatable schedules and a check for leaks, as users of the library have them.
pytest_plugins = ["rollout.testing.plugin"]


@pytest.fixture
def threads() -> Iterator[WorkerThreads]:
    """Where sync tools run."""
    from rollout.worker_threads import WorkerThreads

    pool = WorkerThreads(max_threads=4, max_abandoned=2)
    yield pool
    pool.close()


#: Files whose tests start a Ray cluster, or measure time: beside themselves, or each other, they
#: would be slow or wrong.
ALONE = {
    "test_ray_placement.py": "ray",
    "test_engine_pairs.py": "ray",
    "test_loop_lag.py": "timing",
}
#: Files with tests that start processes; `make test-virtual` leaves them out.
WITH_PROCESSES = (
    "attacks",
    "blocked_loop",
    "blocking",
    "bridge",
    "chat_template",
    "check_template",
    "cli",
    "collate",
    "config_loading",
    "driver_death",
    "engine_pairs",
    "examples",
    "faults",
    "foreign_tools",
    "full_disk",
    "hidden_tests",
    "journal_kills",
    "gateway",
    "gateway_clients",
    "gateway_rows",
    "gateway_streaming",
    "gateway_hostile",
    "harbor_runs",
    "imports",
    "isolated_tools",
    "journal_processes",
    "length_and_exceptions",
    "live_weights",
    "local_process",
    "long_text_attacks",
    "loop_lag",
    "main_guard",
    "mcp",
    "mcp_servers",
    "media_refusals",
    "media_trajectories",
    "model_files",
    "program_agent",
    "program_prompts",
    "ray_placement",
    "readme",
    "real_processes",
    "remote_sandboxes",
    "replay",
    "reward_processes",
    "router",
    "bubblewrap",
    "sandbox_protocol",
    "sandlock",
    "serve_gateway",
    "simulated_engine",
    "soak",
    "sync_clients",
    "task_directory",
    "testing_plugin",
    "tls",
    "tools_in_sandbox",
    "transformers_core",
    "typed_programs",
    "unauthenticated",
    "vision_rows",
    "wrapping",
    "memory_check",
    "slow_imports",
    "engine_interpreters",
)


#: Directories of tests that need environments of their own, or a browser: those start processes.
OWN_PACKAGES = ("sglang", "clients", "trainers", "trace_backends", "pages")
#: Files whose tests take seconds each: they start processes, clusters and models, or try many
#: examples. One test in eight is run by `make test`, as the seed says; all by `make test-full`.
SHARED = frozenset(
    (  # noqa: SIM905  (a line for each would fill a page)
        "attacks beside_loop blocked_loop blocking bridge bubblewrap call_counts cli collate "
        "containment "
        "driver_death driver_http driver_ray driver_shared_memory "
        "engine_pairs examples fast_tokenizer faults foreign_tools full_disk "
        "function_agent gateway gateway_clients gateway_hostile "
        "gateway_matching gateway_races gateway_rows gateway_sessions gateway_streaming "
        "group_choices group_rewards growing_text harbor_runs harmony_reference http_answers "
        "http_core http_liveness idle_memory imports isolated_tools journal_epochs "
        "journal_groups kept_messages langgraph_model length_and_exceptions listening "
        "live_weights local_process long_text_attacks long_texts loop_lag main_guard mcp "
        "mcp_servers media_batches media_refusals media_trajectories mistral_reference "
        "parser_floods parser_fuzz planted_bugs program_agent program_prompts "
        "ray_placement readme real_processes recorder replay report report_steps "
        "reward_processes router_benchmark sampling sandbox_protocol "
        "segments selection serve_gateway soak template_properties testing_plugin "
        "tool_executor tools_in_sandbox trajectory_sandboxes transformers_core typed_programs "
        "unencodable_calls vision_core vision_rows "
        "waiting_places wake_ups word_ids wrapping"
    ).split()
)
_SHARE = 8
#: `make test-virtual`, which people run again and again, has one in forty of those, and of these
#: too, which `make test` has all.
SHARED_IF_VIRTUAL = frozenset(
    (  # noqa: SIM905
        "builtin_tools carry_over chat_formats config_roundtrip conservation "
        "environment_agent frame_fuzz group_reward_calls groups journal journal_damage "
        "journal_plain_data media_exactness observe_page prometheus races report_segments "
        "sleeping traces trainer_rows transcript truncate wrong_sampling"
    ).split()
)
_SHARE_IF_VIRTUAL = 40
# Workers inherit it: all collect the same tests.
_SEED = os.environ.setdefault("ROLLOUT_TEST_SEED", "0")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--virtual",
        action="store_true",
        help="Files whose tests start no process, and a share of what takes long there.",
    )


def pytest_report_header(config: pytest.Config) -> str:
    """How to run the same share again."""
    share = _share(config)
    return f"one in {share} of the tests that take long; the same ones: ROLLOUT_TEST_SEED={_SEED}"


def _share(config: pytest.Config) -> int:
    return _SHARE_IF_VIRTUAL if _is_virtual(config) else _SHARE


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--virtual` what starts processes is not even imported."""
    return True if _is_virtual(config) and _may_start_processes(collection_path) else None


def _is_virtual(config: pytest.Config) -> bool:
    return bool(config.getoption("virtual"))


def _may_start_processes(path: Path) -> bool:
    if path.name in OWN_PACKAGES or path.parent.name in OWN_PACKAGES:
        return True
    return path.stem.removeprefix("test_") in WITH_PROCESSES


def is_left_to_full_counts(item: pytest.Item) -> bool:
    """Whether this run has no part in a test that takes long."""
    name = item.path.stem.removeprefix("test_")
    if name not in SHARED and not (_is_virtual(item.config) and name in SHARED_IF_VIRTUAL):
        return False
    return zlib.crc32(f"{_SEED} {item.nodeid}".encode()) % _share(item.config) != 0


@pytest.hookimpl(tryfirst=True)  # pytest-xdist's own reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Tests that share a fixture of their file, or what `ALONE` says, run in one process."""
    is_parallel = config.pluginmanager.hasplugin("xdist")  # the engines' environment has none
    for item in items:
        defs = getattr(item, "_fixtureinfo", None)
        scopes = {each[-1].scope for each in defs.name2fixturedefs.values()} if defs else set()
        group = ALONE.get(item.path.name)
        if group is None and scopes & {"module", "class"}:
            group = item.path.name
        if group is not None and is_parallel:
            item.add_marker(pytest.mark.xdist_group(name=group))
        if is_left_to_full_counts(item):
            item.add_marker("full")


@pytest.fixture
def own_temporary_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """What others on this machine leave in theirs is not seen."""
    tmp_path_factory.getbasetemp()  # not in there
    with tempfile.TemporaryDirectory(prefix="own-") as place:
        monkeypatch.setenv("TMPDIR", place)
        monkeypatch.setattr(tempfile, "tempdir", place)
        yield


_started: list[str] = []


def _note_processes(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec"):
        _started.append(f"{event}{arguments[:1]}")


sys.addaudithook(_note_processes)


@pytest.fixture(autouse=True)
def only_marked_files_start_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """`WITH_PROCESSES` is true: a test of another file that starts one fails."""
    _started.clear()
    yield
    if not _may_start_processes(request.node.path):
        assert not _started, f"{request.node.path.name} starts processes: see WITH_PROCESSES"
