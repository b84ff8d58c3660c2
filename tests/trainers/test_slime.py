"""slime itself takes our samples."""

from __future__ import annotations

import json
import warnings
from argparse import Namespace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest

import every_outcome as given
from recorded_server import recorded_server
from rollout.errors import ConfigError
from rollout.integrations.row_policy import RowPolicy
from test_slime_samples import groups
from test_trainer_settings import ANSWER, save_model, serve_answers
from trainers.contracts import slime as contract


@pytest.fixture(scope="session")
def slime() -> Any:
    """slime's own code, where it can be imported, and the loop that it never ends."""
    if find_spec("slime") is None:
        pytest.skip("slime is not installed; see docs/trainers/slime.md")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from slime.observability import rollout_data_utils
        from slime.rollout import base_types
        from slime.utils import async_utils, types
    async_utils.get_async_loop()
    return SimpleNamespace(types=types, base=base_types, checks=rollout_data_utils)


def test_slime_itself_takes_samples_of_every_outcome(slime: Any) -> None:
    made = groups(slime.types.Sample)
    contract.check(made, given.LAYERS, given.TOP_K)
    slime.checks.validate_rollout_id_annotated(made)
    experts = [sample.rollout_routed_experts for sample in contract.flat(made)]
    args = Namespace(num_layers=given.LAYERS, moe_router_topk=given.TOP_K)
    slime.checks.validate_rollout_routed_experts_for_replay(
        [each for each in experts if each is not None and each.count_nonzero()], args
    )
    for sample in contract.flat(made):
        sample._validate_response_metadata_lengths()
        assert slime.types.Sample.from_dict(sample.to_dict()).tokens == sample.tokens


def arguments(**changes: Any) -> Namespace:
    """Those of slime that its rollout reads."""
    return Namespace(
        **{
            "rollout_settings": given.settings,
            "rollout_batch_size": len(given.ENDINGS),
            "n_samples_per_prompt": 2,
            "rollout_temperature": 1.0,
            "rollout_top_p": 1.0,
            "rollout_top_k": -1,
            "rollout_max_response_len": 500,
            "rollout_stop": None,
            "rollout_stop_token_ids": None,
            "partial_rollout": False,
            "group_rm": False,
            "rm_type": None,
            "custom_rm_path": None,
            "reward_key": None,
            "dynamic_sampling_filter_path": None,
            "rollout_sample_filter_path": None,
            "rollout_all_samples_process_path": None,
            **changes,
        }
    )


class DataSource:
    """Groups of two, one for each ending in turn."""

    def __init__(self, sample_type: Any) -> None:
        self._type = sample_type
        self._given = 0

    def get_samples(self, count: int) -> list[list[Any]]:
        made = []
        for _ in range(count):
            group, ending = self._given, given.ENDINGS[self._given % len(given.ENDINGS)]
            self._given += 1
            made.append(
                [
                    self._type(
                        group_index=group,
                        index=2 * group + member,
                        prompt=given.messages(ending),
                        metadata={"ending": ending},
                    )
                    for member in range(2)
                ]
            )
        return made


@pytest.fixture
def functions(slime: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import rollout.integrations.slime as ours

        ours.generate_rollout  # noqa: B018  (imports slime)
    yield ours
    ours.close()


def test_generate_rollout_gives_slime_a_batch_of_every_ending(slime: Any, functions: Any) -> None:
    output = functions.generate_rollout(arguments(), 3, DataSource(slime.types.Sample))
    assert isinstance(output, slime.base.RolloutFnTrainOutput)
    contract.check(output.samples, given.LAYERS, given.TOP_K)
    slime.checks.validate_rollout_id_annotated(output.samples)
    outcomes = [
        [sample.metadata["rollout"]["outcome"] for sample in contract.flat(group)]
        for group in output.samples
    ]
    assert [sorted(set(group)) for group in outcomes] == [[ending] for ending in given.ENDINGS]
    assert [len(group) for group in outcomes] == [4] + [2] * 6
    assert output.samples[0][0][0].weight_versions == ["7", "8"]
    assert output.metrics["rollout/outcomes/failed"] == 2


def zero_reward(args: Namespace, samples: list[Any], **_: Any) -> bool:
    """A dynamic filter: whether any member got something."""
    return any(sample.reward for sample in samples)


async def judge_all(args: Namespace, sample: Any, **_: Any) -> float:
    """A reward model that must not see what failed."""
    assert sample.status is not type(sample).Status.FAILED
    return 0.75


async def judge(args: Namespace, sample: Any, **_: Any) -> float:
    """slime's reward model."""
    return 0.5 if sample.metadata["ending"] == "limit" else 0.0


def test_generate_rollout_uses_slime_s_reward_model_and_dynamic_filter(
    slime: Any, functions: Any
) -> None:
    args = arguments(
        rollout_settings=lambda: given.settings(reward=None, policy=RowPolicy(segments="last")),
        rollout_batch_size=2,
        custom_rm_path=f"{__name__}.judge",
        dynamic_sampling_filter_path=f"{__name__}.zero_reward",
    )
    output = functions.generate_rollout(args, 0, DataSource(slime.types.Sample))
    endings = [[sample.metadata["ending"] for sample in group] for group in output.samples]
    assert endings == [["limit", "limit"]] * 2
    flat = contract.flat(output.samples)
    assert [sample.reward for sample in flat] == [0.5] * 4
    assert all(any(sample.loss_mask) and not sample.remove_sample for sample in flat)


def test_generate_rollout_gives_what_failed_the_mean_of_what_slime_judged(
    slime: Any, functions: Any
) -> None:
    source = DataSource(slime.types.Sample)
    [group] = source.get_samples(1)
    group[1].metadata["ending"] = "failed"
    group[1].group_index = 99
    mixed = SimpleNamespace(get_samples=lambda _: [group])
    args = arguments(
        rollout_settings=lambda: given.settings(reward=None, policy=RowPolicy(segments="last")),
        rollout_batch_size=1,
        custom_rm_path=f"{__name__}.judge_all",
    )
    output = functions.generate_rollout(args, 0, mixed)
    flat = contract.flat(output.samples)
    assert [sample.reward for sample in flat] == [0.75, 0.75]
    assert [any(sample.loss_mask) for sample in flat] == [True, False]


def test_generate_runs_one_sample_with_its_segments(slime: Any, functions: Any) -> None:
    source = DataSource(slime.types.Sample)
    sample = source.get_samples(1)[0][0]
    sampling = {"temperature": 1.0, "max_new_tokens": 500, "stop": None, "sampling_seed": 4}
    trained = anyio.run(partial(functions.generate, arguments(), sample, sampling))
    assert [each.rollout_id for each in trained] == [0, 0]
    assert sample.tokens == []
    checked = anyio.run(partial(functions.generate, arguments(), sample, sampling, evaluation=True))
    assert isinstance(checked, slime.types.Sample)
    assert checked.status is slime.types.Sample.Status.COMPLETED


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial_rollout": True}, "args.partial_rollout = True"),
        ({"rollout_top_p": 0.9}, "args.rollout_top_p = 0.9"),
        ({"rollout_stop": ["x"]}, r"sampling_params.stop = \['x'\]"),
        (
            {
                "use_rollout_routing_replay": True,
                "rollout_settings": lambda: given.settings(engines="trainer"),
            },
            "args.use_rollout_routing_replay = True",
        ),
        ({"rollout_settings": None}, "args.rollout_settings: not set"),
        ({"rollout_settings": "nowhere:settings"}, "No module named 'nowhere'"),
    ],
)
def test_generate_rollout_refuses_by_name_what_it_cannot_do(
    slime: Any, functions: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        functions.generate_rollout(arguments(**changes), 0, DataSource(slime.types.Sample))


def test_generate_rollout_generates_on_the_servers_of_slime_s_router(
    slime: Any, functions: Any, tmp_path: Path
) -> None:
    save_model(tmp_path)

    async def run_rollout() -> Any:
        async with recorded_server() as server:
            serve_answers(server)
            server.on("GET /workers", json.dumps({"workers": [{"url": server.url}]}))
            args = arguments(
                rollout_settings=lambda: given.single_turn(engines="trainer"),
                rollout_batch_size=1,
                hf_checkpoint=str(tmp_path),
                sglang_router_ip="127.0.0.1",
                sglang_router_port=server.url.rpartition(":")[2],
            )
            rolled = partial(functions.generate_rollout, args, 0, DataSource(slime.types.Sample))
            try:
                return await anyio.to_thread.run_sync(rolled)
            finally:
                await anyio.to_thread.run_sync(functions.close)

    [group] = anyio.run(run_rollout).samples
    assert [sample.tokens[-3:] for sample in group] == [ANSWER] * 2
    assert [sample.weight_versions for sample in group] == [["3"]] * 2
    assert group[0].status is slime.types.Sample.Status.COMPLETED
