"""What `describe_config` says of a configuration."""

from __future__ import annotations

import pytest

from rollout.config import (
    HttpEngine,
    InProcessPlacement,
    JournalConfig,
    LengthsConfig,
    ModelConfig,
    RayPlacement,
    RolloutConfig,
    SamplingConfig,
    SchedulingConfig,
    SGLangEngine,
    describe_config,
)
from rollout.config.explain import row_bytes


def described(config: RolloutConfig) -> dict[str, str]:
    return {line[:12].strip(): line[12:] for line in describe_config(config)}


def test_config_explained_says_what_runs_where_and_how_long() -> None:
    assert describe_config(RolloutConfig()) == [
        "model       embedded:smollm2-135m-instruct",
        "generates   transformers, auto on cpu, 1 thread; 32 requests at once, 1024 queued",
        "lives in    local_process, a child process each, by the driver's interpreter",
        "replicas    1, by estimated_seconds, move margin 0.5 s",
        "sampling    temperature 1",
        "validation  greedy",
        "lengths     prompt 1,024, response 4,096 tokens",
        "a row       5,120 tokens wide, 229,389 bytes of tensors",
        "limits      generation 600 s, tool 60 s, turn 900 s, trajectory 3600 s, batch 7200 s; "
        "reward 300 s, cleanup 5 s",
        "agent       tool_agent, at most 32 assistant turns, at most 32 user turns",
        "tools       hermes calls, 8 at once in a turn; answers cut to 4,096 characters "
        "(middle); 32 threads",
        "rewards     in threads, async ones on the event loop",
        "samples     1 for each prompt, 1 in validation",
        "in flight   at most 1,024 trajectories",
        "journal     none: a run that dies is not resumed (`rollout run` writes one into --out)",
        "seed        none: every run samples afresh",
        "not set     seed, model.revision, model.chat_template, engine.min_replicas, "
        "engine.context_length, "
        "placement.python, channel.tls_certificate, channel.tls_key, channel.tls_authority, "
        "sampling.max_new_tokens, validation_sampling.max_new_tokens, lengths.turn, "
        "agent.interaction, tools.search_url, sandbox.image, sandbox.workdir, sandbox.setup, "
        "sandbox.user, "
        "sandbox.cpus, sandbox.memory_mb, sandbox.disk_mb, sandbox.max_processes, "
        "sandbox.max_open, sandbox.max_creating, sandbox.creations_per_min, gateway.public_url, "
        "journal.path, journal.prompts, observe.path, "
        "observe.trace_backend, observe.prometheus_port",
    ]


def test_config_explained_row_holds_the_bytes_of_the_layout() -> None:
    prompt, response = 7, 11
    int64, four, boolean = 8, 4, 1
    expected = (
        prompt * int64  # prompts
        + 2 * response * int64  # responses, response_mask
        + 3 * (prompt + response) * int64  # input_ids, attention_mask, position_ids
        + 2 * response * four  # rollout_log_probs, weight_versions
        + boolean
        + four
        + int64  # trainable, rewards, groups
    )
    assert row_bytes(LengthsConfig(prompt=prompt, response=response)) == expected


@pytest.mark.parametrize(
    ("config", "lines"),
    [
        (
            RolloutConfig(
                model=ModelConfig(path="a/b", revision="r", trust_remote_code=True),
                engine=SGLangEngine(replicas=8, tensor_parallel=2),
                placement=RayPlacement(gpus_per_replica=2, python="/env/python", address="auto"),
                seed=3,
            ),
            {
                "model": "a/b, revision r, its own code may run",
                "generates": "sglang, auto, 2 GPUs a replica, 85% of GPU memory; "
                "256 requests at once",
                "lives in": "ray, an actor each with 2 GPU and 1 CPU, in auto, by /env/python",
                "replicas": "8, by estimated_seconds, move margin 0.5 s",
                "seed": "3: runs can be repeated",
            },
        ),
        (
            RolloutConfig(
                model=ModelConfig(chat_template="t.jinja"),
                engine=HttpEngine(urls=("http://a", "http://b")),
                placement=InProcessPlacement(),
                sampling=SamplingConfig(temperature=0.7, top_k=20, stop_token_ids=(2,)),
                scheduling=SchedulingConfig(samples_per_prompt=4, max_in_flight=1),
                journal=JournalConfig(path="run.journal"),
            ),
            {
                "model": "embedded:smollm2-135m-instruct, chat template t.jinja",
                "generates": "http, http://a, http://b",
                "lives in": "in_process, on the driver's own event loop",
                "replicas": "2, by estimated_seconds, move margin 0.5 s",
                "sampling": "temperature 0.7, top_k 20, stop_token_ids (2,)",
                "samples": "4 for each prompt, 1 in validation",
                "in flight": "at most 1 trajectory",
                "journal": "run.journal, fsync never; where it cannot be written: wait",
            },
        ),
    ],
)
def test_config_explained_names_each_kind(config: RolloutConfig, lines: dict[str, str]) -> None:
    assert lines.items() <= described(config).items()
