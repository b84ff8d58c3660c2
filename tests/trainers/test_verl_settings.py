"""verl's configuration in our words: translated, or refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from verl_side import ScriptedServers, make_config, save_model

from rollout.config import CustomEngine, InProcessPlacement, SimulatedEngine
from rollout.errors import ConfigError
from rollout.integrations.row_policy import RowPolicy
from rollout.integrations.verl import AgentLoopManager
from rollout.integrations.verl.rollout_section import Settings

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

ROLLOUT = "actor_rollout_ref.rollout"
CUSTOM = f"+{ROLLOUT}.custom.rollout"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def settings(model: Path, *overrides: str) -> Settings:
    manager = AgentLoopManager.create(make_config(model, *overrides), ScriptedServers({}))
    manager.close()
    return manager.settings


def test_rollout_section_becomes_a_configuration(model: Path) -> None:
    found = settings(
        model,
        f"{ROLLOUT}.temperature=0.5",
        f"{ROLLOUT}.top_p=0.9",
        f"{ROLLOUT}.top_k=0",
        f"{ROLLOUT}.val_kwargs.temperature=0.2",
        f"{ROLLOUT}.val_kwargs.top_k=7",
        f"{ROLLOUT}.max_model_len=2000",
        f"{ROLLOUT}.seed=11",
        f"{ROLLOUT}.multi_turn.format=gpt-oss",
        f"{ROLLOUT}.multi_turn.max_assistant_turns=5",
        f"{ROLLOUT}.multi_turn.max_tool_response_length=99",
        f"{ROLLOUT}.multi_turn.tool_response_truncate_side=left",
    )
    config = found.config
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k) == (
        0.5,
        0.9,
        -1,
    )
    validation = config.validation_sampling
    assert (validation.temperature, validation.top_p, validation.top_k) == (0.2, 1.0, 7)
    assert (config.lengths.prompt, config.lengths.response) == (1500, 260)
    assert config.lengths.overlong_prompts == "cut"
    assert (config.agent.tool_format, config.agent.max_assistant_turns) == ("gpt_oss", 5)
    assert (config.agent.max_user_turns, config.agent.max_tool_calls) == (None, None)
    assert (config.tools.max_response_length, config.tools.truncate_side) == (99, "right")
    assert config.seed == 11
    assert isinstance(config.engine, CustomEngine)
    assert isinstance(config.placement, InProcessPlacement)
    assert config.engine.options["context_length"] == 2000
    assert config.engine.options["eos_ids"] == [258]
    assert not found.has_own_engines
    assert found.options.backend == "asyncio"
    assert found.options.rows == RowPolicy(segments="last")


def test_own_section_stands_over_what_is_translated(model: Path) -> None:
    custom = (
        "{backend: trio, agent_loops: verl, rows: {unrewarded: zero}, "
        "limits: {generation_s: 60.0}, scheduling: {max_in_flight: 3}}"
    )
    found = settings(model, f"{CUSTOM}={custom}")
    assert (found.options.backend, found.options.agent_loops) == ("trio", "verl")
    assert found.options.rows == RowPolicy(segments="last", unrewarded="zero")
    assert found.config.limits.generation_s == 60
    assert (found.config.limits.tool_s, found.config.limits.turn_s) == (600, 4500)
    assert found.config.scheduling.max_in_flight == 3


def test_engines_of_ours_take_the_place_of_verls(model: Path) -> None:
    custom = "{engine: {kind: simulated}, placement: {kind: in_process}, model: {path: simulated}}"
    found = settings(model, f"{CUSTOM}={custom}")
    assert isinstance(found.config.engine, SimulatedEngine)
    assert found.has_own_engines


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["transfer_queue.enable=true"], "transfer_queue.enable = True: expected false"),
        (
            [f"{ROLLOUT}.multi_turn.num_repeat_rollouts=2"],
            f"{ROLLOUT}.multi_turn.num_repeat_rollouts = 2: expected null",
        ),
        (
            [f"{ROLLOUT}.trace.backend=weave"],
            f"{ROLLOUT}.trace.backend = 'weave': expected null, or",
        ),
        (
            [f"{ROLLOUT}.multi_turn.format=morse"],
            "agent.tool_format = 'morse': unknown; known: deepseek_v3",
        ),
        ([f"{CUSTOM}.loops=3"], f"{ROLLOUT}.custom.rollout.loops: unknown key; known: backend, "),
        ([f"{CUSTOM}.backend=curio"], f"{ROLLOUT}.custom.rollout.backend = 'curio': expected"),
        ([f"{CUSTOM}.rows.segments=rows"], f"{ROLLOUT}.custom.rollout.rows.segments = 'rows'"),
        ([f"{CUSTOM}.rows.empty=no"], f"{ROLLOUT}.custom.rollout.rows: "),
        ([f"{ROLLOUT}.top_p=1.5"], "sampling.top_p = 1.5"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    model: Path, overrides: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "verl.utils.rollout_trace.RolloutTraceConfig.init", lambda *args, **options: None
    )
    config = make_config(model, *overrides)
    with pytest.raises(ConfigError) as caught:
        AgentLoopManager.create(config, ScriptedServers({}))
    assert said in str(caught.value)


def test_rows_that_nobody_can_run_are_refused_before_any_work(model: Path) -> None:
    from verl_side import batch_of

    from rollout.errors import PromptError

    servers = ScriptedServers({"hi": ["Hello."]})
    manager = AgentLoopManager.create(make_config(model), servers)
    try:
        batch: Any = batch_of(["hi", "hi"], agent="nobody")
        with pytest.raises(PromptError, match="agent_name = 'nobody': neither verl nor rollout"):
            manager.generate_sequences(batch)
        batch = batch_of(["hi"])
        del batch.non_tensor_batch["raw_prompt"]
        with pytest.raises(PromptError, match="row 0 has no 'raw_prompt'"):
            manager.generate_sequences(batch)
    finally:
        manager.close()
    assert servers.calls == []


def test_checkpoint_engine_of_the_docs_is_composed(model: Path) -> None:
    config = make_config(
        model,
        f"+{ROLLOUT}.checkpoint_engine={{backend: rollout_disk, custom_backend_module: "
        "rollout.integrations.verl.weights_backend, engine_kwargs: {rollout_disk: "
        "{directory: /dev/shm/weights}}}",
    )
    found = config.actor_rollout_ref.rollout.checkpoint_engine
    assert found.engine_kwargs.rollout_disk.directory == "/dev/shm/weights"
    assert found.update_weights_bucket_megabytes == 2048


def test_readers_of_verls_files_do_not_import_verl() -> None:
    script = (
        "import sys, rollout.integrations.verl as v; v.load_verl_tools; v.load_verl_multi_turn; "
        "loaded = {name.partition('.')[0] for name in sys.modules}; "
        "print({'verl', 'ray', 'hydra', 'torch'} & loaded)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
