"""SGLang's answers become chunks, and our options its arguments; no SGLang is needed for it."""

from __future__ import annotations

import base64
from array import array
from typing import Any

import pytest

from rollout.config import RolloutConfig, SamplingConfig, SGLangEngine, config_from_dict
from rollout.engine.core import EngineInfo, GenerationRequest, SamplingParams, pack_ids
from rollout.engine.cores.sglang.server_arguments import SGLangOptions, engine_arguments
from rollout.engine.cores.sglang.translation import AnswerReader, build_fields, make_salt
from rollout.engine.pool.generation import Generation
from rollout.errors import ConfigError, EngineError

INFO = EngineInfo(vocab_size=100, eos_ids=(2,), context_length=50, fingerprint="f", max_requests=4)


def answer(count: int, version: str = "0", **meta: Any) -> dict[str, Any]:
    """The cumulative answer after `count` tokens, whose ids count from 10."""
    ids = [10 + i for i in range(count)]
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": None,
            "weight_version": version,
            "output_token_logprobs": [(-token / 8, token, None) for token in ids],
            **meta,
        },
    }


def taken(answers: list[dict[str, Any]]) -> Generation:
    reader, generation = AnswerReader("r"), Generation()
    for each in answers:
        for chunk in reader.read(each):
            generation.append(chunk)
    return generation


def spans(*ends: tuple[str, int]) -> list[dict[str, Any]]:
    starts = [0, *(end for _, end in ends)]
    return [
        {"version": version, "start": start, "end": end}
        for (version, end), start in zip(ends, starts, strict=False)
    ]


LENGTH = {"finish_reason": {"type": "length", "length": 9}}


def test_reader_cumulative_answers_each_token_leaves_once() -> None:
    generation = taken([answer(1), answer(5), answer(9, cached_tokens=3, **LENGTH)])
    assert generation.ids.tolist() == list(range(10, 19))
    assert generation.log_probs.tolist() == [-token / 8 for token in range(10, 19)]
    assert (generation.versions, generation.finish_reason) == ([[0, 9]], "length")
    assert generation.cached_tokens == 3


def test_reader_weights_change_under_a_request_each_token_has_its_version() -> None:
    final = answer(9, "8", weight_versions=spans(("7", 5), ("8", 9)), **LENGTH)
    # The second answer arrives after the change, and four of its tokens were sampled before it.
    generation = taken([answer(1, "7"), answer(6, "8"), final])
    assert generation.versions == [[7, 5], [8, 4]]
    assert generation.ids.tolist() == list(range(10, 19))


def test_reader_held_nothing_leaves_before_the_final_answer() -> None:
    reader = AnswerReader("r")
    reader.is_buffering = True
    assert reader.read(answer(4)) == []
    chunks = reader.read(answer(9, "1", weight_versions=spans(("0", 2), ("1", 9)), **LENGTH))
    assert [(chunk.offset, chunk.weight_version) for chunk in chunks] == [(0, 0), (2, 1)]
    assert [chunk.finish_reason for chunk in chunks] == [None, "length"]


def test_reader_partial_answers_that_name_versions_leave_at_once() -> None:
    reader = AnswerReader("r")
    reader.is_buffering = True  # the weights change meanwhile
    first = reader.read(answer(4, "7", weight_versions=spans(("7", 4))))
    both = reader.read(answer(9, "8", weight_versions=spans(("7", 5), ("8", 9))))
    last = reader.read(answer(9, "8", weight_versions=spans(("7", 5), ("8", 9)), **LENGTH))
    found = [(chunk.offset, len(chunk.ids) // 4, chunk.weight_version) for chunk in first + both]
    assert found == [(0, 4, 7), (4, 1, 7), (5, 4, 8)]
    assert [(chunk.ids, chunk.finish_reason) for chunk in last] == [(b"", "length")]


def test_reader_version_without_spans_takes_the_final_one() -> None:
    assert taken([answer(2, "5"), answer(4, "5", **LENGTH)]).versions == [[5, 4]]
    assert taken([answer(2, "default"), answer(4, "default", **LENGTH)]).versions == [[0, 4]]


@pytest.mark.parametrize(
    ("reason", "finish", "error"),
    [
        ({"type": "stop", "matched": 12}, "stop", ""),
        ({"type": "length", "length": 2}, "length", ""),
        ({"type": "abort", "message": "Abort in waiting queue"}, "abort", ""),
        ({"type": "abort", "message": "full", "status_code": 503}, "rejected", "full"),
        ({"type": "abort", "message": "too long", "status_code": 400}, "error", "too long"),
        ({"type": "new"}, "error", "SGLang ended the request with {'type': 'new'}"),
    ],
)
def test_reader_finish_reason_is_ours(reason: dict[str, Any], finish: str, error: str) -> None:
    chunks = AnswerReader("r").read(answer(0, finish_reason=reason))
    assert [(c.finish_reason, c.error, c.ids) for c in chunks] == [(finish, error, b"")]


def test_reader_routed_experts_become_packed_int16() -> None:
    encoded = base64.b64encode(array("i", [0, 7, 3, 127]).tobytes()).decode()
    (chunk,) = AnswerReader("r").read(answer(1, routed_experts=encoded, **LENGTH))
    assert array("h", chunk.routed_experts).tolist() == [0, 7, 3, 127]


def asked(**sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id="r" * 32,
        prompt_ids=pack_ids([5, 6, 7]),
        session_id="s",
        priority=2,
        sampling=SamplingParams(**{"max_new_tokens": 100, **sampling}),
    )


def test_fields_request_is_clipped_to_the_context_and_salted() -> None:
    fields = build_fields(asked(stop_token_ids=(9,)), SGLangOptions(model="m"), INFO, make_salt(7))
    assert fields["input_ids"] == [5, 6, 7]
    assert fields["sampling_params"] == {
        "max_new_tokens": 47,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": [9],
        "ignore_eos": False,
        # What a server's own defaults would fill in.
        "min_new_tokens": 0,
        "n": 1,
        "stop": [],
        "logit_bias": None,
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        "structural_tag": None,
        "custom_params": None,
    }
    assert (fields["extra_key"], fields["priority"], fields["session_id"]) == ("weights-7", 2, "s")


def test_fields_seed_only_where_it_counts_and_then_one_for_each() -> None:
    plain, deterministic = SGLangOptions(model="m"), SGLangOptions(model="m", deterministic=True)

    def seed(options: SGLangOptions, **sampling: Any) -> int | None:
        params = build_fields(asked(**sampling), options, INFO, "")["sampling_params"]
        return params.get("sampling_seed")

    assert seed(plain, seed=4) is None
    assert seed(deterministic, seed=4) == 4
    assert len({seed(deterministic) for _ in range(8)}) == 8


class Everything(frozenset[str]):
    """The arguments of a version that has them all."""

    def __contains__(self, name: object) -> bool:
        return True


KNOWN = set(engine_arguments(SGLangOptions(model="m", device="cpu"), "m", Everything()))


def test_arguments_on_a_cpu_need_no_kernels() -> None:
    arguments = engine_arguments(SGLangOptions(model="m", device="cpu"), "/m", KNOWN)
    assert arguments["attention_backend"] == "torch_native"
    assert arguments["sampling_backend"] == "pytorch"
    assert (arguments["model_path"], arguments["skip_tokenizer_init"]) == ("/m", True)
    assert "enable_deterministic_inference" not in arguments


def test_arguments_that_the_installed_version_lacks_are_refused_by_name() -> None:
    options = SGLangOptions(model="m", device="cpu")
    with pytest.raises(EngineError, match=r"^the installed SGLang has no argument tp_size; exp"):
        engine_arguments(options, "m", KNOWN - {"tp_size"})
    asked_for = SGLangOptions(model="m", server_args={"new_thing": 1})
    with pytest.raises(EngineError, match=r"^engine\.server_args\.new_thing: the installed"):
        engine_arguments(asked_for, "m", KNOWN)


def test_arguments_with_the_memory_saver_leave_prefills_without_graphs() -> None:
    saver = {"enable_memory_saver": True}
    name = "disable_prefill_cuda_graph"

    def arguments(**options: Any) -> dict[str, Any]:
        return engine_arguments(SGLangOptions(model="m", **options), "m", Everything())

    assert arguments(server_args=saver)[name] is True
    assert arguments(server_args={**saver, name: False})[name] is False
    assert name not in arguments()
    assert name not in arguments(server_args=saver, device="cpu")


@pytest.mark.parametrize("key", ["stop", "min_new_tokens"])
def test_config_ends_that_need_text_name_stop_token_ids(key: str) -> None:
    expected = (
        f"sampling.{key} = 3: no such key: engines work on token ids only; expected "
        "stop_token_ids to say where a generation ends"
    )
    with pytest.raises(ConfigError) as caught:
        config_from_dict({"engine": {"kind": "sglang"}, "sampling": {key: 3}})
    assert caught.value.faults == (expected,)
    with pytest.raises(ConfigError, match="stop_token_ids"):
        SGLangEngine(server_args={key: 3})


def test_config_server_args_leave_alone_what_has_a_key() -> None:
    with pytest.raises(ConfigError) as caught:
        SGLangEngine(server_args={"tp_size": 2, "page_size": 1, "skip_tokenizer_init": False})
    assert caught.value.faults == (
        "engine.server_args.tp_size = 2: expected engine.tensor_parallel",
        "engine.server_args.skip_tokenizer_init = False: expected nothing: engines take and give "
        "token ids only",
    )


def test_config_penalties_are_refused_for_sglang() -> None:
    with pytest.raises(ConfigError) as caught:
        RolloutConfig(
            engine=SGLangEngine(),
            sampling=SamplingConfig(repetition_penalty=1.2),
            validation_sampling=SamplingConfig(presence_penalty=0.5),
        )
    because = "for engine.kind = 'sglang', which gives log-probs after penalties"
    assert caught.value.faults == (
        f"sampling.repetition_penalty = 1.2: expected 1.0 {because}",
        f"validation_sampling.presence_penalty = 0.5: expected 0.0 {because}",
    )


def test_config_deterministic_inference_needs_a_gpu() -> None:
    with pytest.raises(ConfigError) as caught:
        SGLangEngine(device="cpu", deterministic=True)
    assert caught.value.faults == (
        "engine.deterministic = True: expected false for engine.device = 'cpu': SGLang does that "
        "on GPUs only",
    )
