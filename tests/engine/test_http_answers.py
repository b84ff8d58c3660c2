"""Servers whose answers leave out, or contradict, what was asked for: no row is made of them."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Literal

import pytest

import rollout
from recorded_server import recorded_server
from rollout.config import HttpEngine, InProcessPlacement, ModelConfig, RolloutConfig
from rollout.errors import EngineError
from rollout.types import Outcome, Prompt
from slow_cases import slow_after
from test_trainer_settings import save_model

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from rollout import Trajectory

pytestmark = pytest.mark.anyio
Api = Literal["sglang", "vllm"]
Event = dict[str, Any]
#: "yes", in the simulated vocabulary's bytes.
IDS = [*b"yes"]
STOP = {"type": "stop", "matched": IDS[-1]}
PATHS = {"sglang": "/generate", "vllm": "/v1/completions"}
LEFT_OUT: Any = object()


@pytest.fixture(params=slow_after(1, ["trio", "asyncio"]))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real sockets, so real time."""
    return str(request.param)


def sglang(ids: Sequence[Any], finish: Any = None, total: Any = None, **changed: Any) -> Event:
    """An event of SGLang; `changed` are its fields, `LEFT_OUT` ones are missing."""
    meta = {
        "finish_reason": finish,
        "weight_version": "3",
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "completion_tokens": len(ids) if total is None else total,
    }
    event = {"output_ids": list(ids), "meta_info": meta}
    for name, value in changed.items():
        _change(event if name in event else meta, name, value)
    return event


def vllm(ids: Sequence[Any], finish: Any = None, usage: Any = None, **changed: Any) -> Event:
    """An event of vLLM, with new tokens only."""
    scored = {
        "token_logprobs": [-0.5] * len(ids),
        "tokens": [f"token_id:{token}" for token in ids],
    }
    choice = {"index": 0, "text": "", "token_ids": list(ids), "logprobs": scored}
    choice["finish_reason"] = finish
    event = {"choices": [choice]} | ({} if usage is None else {"usage": usage})
    for name, value in changed.items():
        places = [each for each in (event, choice, scored) if name in each]
        _change(places[0] if places else event, name, value)
    return event


def _change(record: dict[str, Any], name: str, value: Any) -> None:
    if value is LEFT_OUT:
        del record[name]
    else:
        record[name] = value


async def play(
    api: Api,
    answers: Sequence[Sequence[Event]],
    directory: Path,
    facts: dict[str, Any] | None = None,
) -> tuple[list[Trajectory], list[dict[str, Any]], str]:
    """A trajectory for each of `answers`, in turn; the bodies the server got, and where."""
    save_model(directory)
    current: list[Event] = []

    async def answer(_: dict[str, Any], send: Callable[[str], Awaitable[None]]) -> None:
        for event in current:
            await send(f"data: {json.dumps(event)}\n\n")

    async with recorded_server() as server:
        info = {"max_req_input_len": 2042} | (facts or {})
        server.on("GET /server_info", json.dumps(info))
        server.on("GET /v1/models", json.dumps({"data": [{"id": "m", "max_model_len": 2042}]}))
        server.on("GET /health", "")
        server.on_stream(f"POST {PATHS[api]}", answer)
        config = RolloutConfig(
            model=ModelConfig(path=str(directory)),
            engine=HttpEngine(urls=(server.url,), api=api),
            placement=InProcessPlacement(),
        )
        prompt = Prompt(messages=[{"role": "user", "content": "Yes?"}])
        trajectories: list[Trajectory] = []
        async with rollout.open_rollout(config) as runtime:
            for events in answers:
                current[:] = events
                trajectories += (await runtime.generate([prompt])).trajectories
        bodies = [body for path, body in server.bodies if path == PATHS[api]]
        return trajectories, bodies, server.url + PATHS[api]


#: What the server answers, and what the error names beside the URL.
SGLANG_FAULTS: dict[str, tuple[list[Event], str]] = {
    "no_ids_for_3_tokens": ([sglang([], STOP, 3)], "output_ids"),
    "fewer_ids_than_tokens": (
        [sglang(IDS[:2], STOP, 3)],
        "output_ids has 2 ids; expected 3, as meta_info.completion_tokens",
    ),
    "ids_missing": ([sglang(IDS, STOP, output_ids=LEFT_OUT)], "output_ids"),
    "id_negative": ([sglang([*IDS[:2], -1], STOP)], "output_ids[2]"),
    "meta_missing": ([sglang(IDS, STOP, meta_info=LEFT_OUT)], "meta_info"),
    "log_probs_missing": (
        [sglang(IDS, STOP, output_token_logprobs=LEFT_OUT)],
        "meta_info.output_token_logprobs has 0 entries",
    ),
    "log_prob_positive": (
        [sglang(IDS, STOP, output_token_logprobs=[[0.6, token, None] for token in IDS])],
        "output_token_logprobs[0]",
    ),
    "log_probs_short": (
        [sglang(IDS, STOP, output_token_logprobs=[[-0.5, IDS[0], None]])],
        "meta_info.output_token_logprobs has 1 ",
    ),
    "log_probs_shifted": (
        [sglang(IDS, STOP, output_token_logprobs=[[-0.5, t, None] for t in [9, *IDS[:2]]])],
        "output_token_logprobs[0] is of token 9; expected 121, as in output_ids",
    ),
    "answer_shrinks": ([sglang(IDS), sglang(IDS[:1], STOP)], "output_ids"),
    "version_huge": (
        [sglang(IDS, STOP, weight_version="2147483648")],
        "meta_info.weight_version = '2147483648'; expected less than 2**31",
    ),
    "finish_missing": ([sglang(IDS, finish_reason=LEFT_OUT)], "finish reason"),
    "finish_unknown": ([sglang(IDS, {"type": "new"})], "{'type': 'new'}"),
}
#: Of servers that say that their events have new tokens only.
DELTA_FAULTS: dict[str, tuple[list[Event], str]] = {
    "count_missing": (
        [sglang(IDS[:2], completion_tokens=LEFT_OUT), sglang(IDS[2:], STOP, 3)],
        "completion_tokens",
    ),
    "event_lost": ([sglang(IDS[:1], None, 1), sglang(IDS[2:], STOP, 3)], "output_ids"),
    "cumulative_unannounced": ([sglang(IDS[:1], None, 1), sglang(IDS, STOP, 3)], "output_ids"),
    "log_probs_of_others": (
        [sglang(IDS, STOP, output_token_logprobs=[[-0.5, t, None] for t in [7, 8, 9]])],
        "output_token_logprobs",
    ),
}
VLLM_FAULTS: dict[str, tuple[list[Event], str]] = {
    "ids_missing_later": ([vllm(IDS[:2]), vllm(IDS[2:], "stop", token_ids=None)], "token_ids"),
    "id_negative": ([vllm(IDS, "stop", token_ids=[*IDS[:2], -1])], "token_ids[2]"),
    "ids_empty_beside_text": ([vllm([], "stop", text="yes")], "token_ids"),
    "ids_empty_beside_later_text": (
        [vllm(IDS[:1], text="y"), vllm([], text="e"), vllm(IDS[2:], "stop", text="s")],
        "token_ids",
    ),
    "ids_empty_beside_usage": (
        [vllm([], "stop", usage={"completion_tokens": 3})],
        "completion_tokens",
    ),
    "usage_disagrees": ([vllm(IDS, "stop", usage={"completion_tokens": 2})], "completion_tokens"),
    "log_probs_missing": ([vllm(IDS, "stop", logprobs=LEFT_OUT)], "logprobs"),
    "log_prob_null": ([vllm(IDS, "stop", token_logprobs=[-0.5, None, -0.5])], "token_logprobs[1]"),
    "log_prob_positive": ([vllm(IDS, "stop", token_logprobs=[0.5] * 3)], "token_logprobs[0]"),
    "log_probs_short": ([vllm(IDS, "stop", token_logprobs=[-0.5])], "token_logprobs"),
    "log_probs_of_others": (
        [vllm(IDS, "stop", tokens=["token_id:7", "token_id:8", "token_id:9"])],
        "logprobs.tokens[0]",
    ),
    "finish_unknown": ([vllm(IDS, "new")], "'new'"),
    "choices_missing": ([vllm(IDS, "stop", choices=LEFT_OUT)], "choices"),
    "finish_missing": ([vllm(IDS, finish_reason=LEFT_OUT)], "finish reason"),
}


def answer_of(trajectory: Trajectory) -> tuple[list[int], list[float]]:
    """What the model sampled, and the log-probs of that."""
    transcript = trajectory.transcript
    mask = transcript.mask()
    return transcript.ids()[mask].tolist(), transcript.log_probs()[mask].tolist()


async def check_faults(
    api: Api,
    faults: dict[str, tuple[list[Event], str]],
    directory: Path,
    facts: dict[str, Any] | None = None,
) -> None:
    """Each answer fails its trajectory with an error that names field and URL."""
    answers = [events for events, _ in faults.values()]
    trajectories, _, url = await play(api, answers, directory, facts)
    wrong = {}
    for (kind, (_, named)), trajectory in zip(faults.items(), trajectories, strict=True):
        cause = trajectory.cause
        is_right = (
            (trajectory.outcome, trajectory.trainable) == (Outcome.FAILED, False)
            and cause is not None
            and cause.type == EngineError.__name__
            and cause.message.startswith(url)
            and named in cause.message
        )
        if not is_right:
            ids = answer_of(trajectory)[0]
            wrong[kind] = (trajectory.outcome, ids, cause and cause.message)
    assert not wrong, "\n".join(f"{kind}: {found}" for kind, found in wrong.items())


async def test_sglang_answer_that_leaves_out_what_was_asked_fails_by_name(tmp_path: Path) -> None:
    await check_faults("sglang", SGLANG_FAULTS, tmp_path)


async def test_sglang_deltas_that_leave_out_what_was_asked_fail_by_name(tmp_path: Path) -> None:
    facts = {"incremental_streaming_output": True}
    await check_faults("sglang", DELTA_FAULTS, tmp_path, facts)


async def test_vllm_answer_that_leaves_out_what_was_asked_fails_by_name(tmp_path: Path) -> None:
    await check_faults("vllm", VLLM_FAULTS, tmp_path)


AT_ONCE: dict[Api, list[Event]] = {
    "sglang": [sglang([], STOP), sglang([], STOP, output_token_logprobs=None)],
    "vllm": [vllm([], "stop"), vllm([], "stop", logprobs=None, usage={"completion_tokens": 0})],
}


NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "stop": [],
    "ignore_eos": False,
    "n": 1,
    "logit_bias": None,
}
NEUTRAL_OF: dict[Api, dict[str, Any]] = {
    "sglang": NEUTRAL | {"min_new_tokens": 0, "regex": None, "json_schema": None, "ebnf": None},
    "vllm": NEUTRAL | {"min_tokens": 0},
}


@pytest.mark.parametrize("api", AT_ONCE)
async def test_bodies_carry_every_sampling_parameter_and_an_answer_may_stop_at_once(
    api: Api, tmp_path: Path
) -> None:
    answers = [[event] for event in AT_ONCE[api]]
    trajectories, (body, *_), _ = await play(api, answers, tmp_path)
    for trajectory in trajectories:
        assert trajectory.cause is None or "http://" not in trajectory.cause.message
    params, neutral = body.get("sampling_params", body), NEUTRAL_OF[api]
    assert {name: params[name] for name in neutral} == neutral
    assert api == "sglang" or math.isfinite(body["max_tokens"])


async def test_sglang_deltas_may_end_with_none_and_an_abort_repeated_behind_them_keeps_them(
    tmp_path: Path,
) -> None:
    """SGLang joins what waits into one event, and repeats the last token and all log-probs."""
    aborted = sglang(
        [*IDS[1:], IDS[-1]],
        {"type": "abort", "message": "Aborted by AbortReq."},
        3,
        output_token_logprobs=[[-0.5, token, None] for token in [*IDS[1:], *IDS]],
    )
    facts = {"incremental_streaming_output": True}
    whole = [sglang(IDS[:2], None, 2), sglang(IDS[2:], None, 3), sglang([], STOP, 3)]
    cut = [sglang(IDS[:1], None, 1), aborted]
    (completed, failed), _, _ = await play("sglang", [whole, cut], tmp_path, facts)
    assert completed.outcome is Outcome.COMPLETED, completed.cause
    assert failed.cause is not None
    assert failed.cause.message.endswith("the engine aborted the generation")
    assert [answer_of(each)[0] for each in (completed, failed)] == [IDS, IDS]
