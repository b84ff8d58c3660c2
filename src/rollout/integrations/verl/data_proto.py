"""Rows to the ``DataProto`` that verl's own manager makes of them.

Shapes: B rows, P prompt and R response tokens.

The tensors are filled here, all rows at once; what is made of them, and every other field, is
verl's own code: its worker's ``_postprocess`` and its manager's figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollout.errors import RolloutError
from rollout.integrations.row_media import named

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from rollout.config import LengthsConfig
    from rollout.integrations.trainer_rows import TrainerRow

#: What verl expects of every row, in its own words, where a row has none.
_NOTHING: tuple[tuple[type, Any], ...] = ((bool, False), (int, 0), (float, 0.0), (str, ""))


def data_proto(
    worker: Any,
    batch: Any,
    rows: Sequence[TrainerRow],
    outputs: Sequence[Any],
    *,
    lengths: LengthsConfig,
    has_scores: bool,
    metrics: Mapping[str, float],
) -> Any:
    """A batch of verl's, answered.

    Args:
        worker: verl's ``AgentLoopWorker``.
        batch: The ``DataProto`` that was asked.
        rows: (B) by the policy.
        outputs: (B) ``AgentLoopOutput``s, as their loops left them.
        lengths: P and R.
        has_scores: Whether rewards are known; else verl's trainer finds them out.
        metrics: Added to verl's own, under their names.
    """
    from verl.experimental.agent_loop import AgentLoopManager

    tensors = _tensors(rows, lengths, worker.tokenizer.pad_token_id or 0)
    extras = _Extras(outputs, lengths, worker.tokenizer.pad_token_id or 0)
    _complete_extra_info(outputs, has_scores=has_scores)
    padded = [
        _padded(worker, row, output, {name: each[at : at + 1] for name, each in tensors.items()})
        for at, (row, output) in enumerate(zip(rows, outputs, strict=True))
    ]
    for at, (row, each) in enumerate(zip(rows, padded, strict=True)):
        each.reward_score = row.reward if has_scores else None
        extras.give(each, at)
    validate = bool(batch.meta_info.get("validate", False))
    made = worker._postprocess(padded, batch.non_tensor_batch, validate)
    figures = made.meta_info.pop("metrics")
    timing = AgentLoopManager._performance_metrics(None, [figures], made)
    made.meta_info = {"timing": {**timing, **metrics}, **made.meta_info}
    return made


def _tensors(
    rows: Sequence[TrainerRow], lengths: LengthsConfig, pad: int
) -> dict[str, torch.Tensor]:
    """Prompts on the right of their (B, P), responses on the left of their (B, R)."""
    count, prompt, response = len(rows), lengths.prompt, lengths.response
    ids = np.full((count, prompt + response), pad, dtype=np.int64)
    attention = np.zeros((count, prompt + response), dtype=np.int64)
    mask = np.zeros((count, response), dtype=np.int64)
    log_probs = np.zeros((count, response), dtype=np.float32)
    for at, row in enumerate(rows):
        begin, stop = prompt - len(row.prompt_ids), prompt + len(row.response_ids)
        ids[at, begin:prompt], ids[at, prompt:stop] = row.prompt_ids, row.response_ids
        attention[at, begin:stop] = 1
        mask[at, : stop - prompt] = row.mask
        log_probs[at, : stop - prompt] = row.log_probs
    # As verl counts them: from the first token on, and the last number on all padding after it.
    positions = np.clip(np.cumsum(attention, axis=1) - 1, 0, None)
    arrays: dict[str, npt.NDArray[Any]] = {
        "prompt_ids": ids[:, :prompt],
        "response_ids": ids[:, prompt:],
        "input_ids": ids,
        "position_ids": positions,
        "attention_mask": attention,
        "response_mask": mask,
        "response_logprobs": log_probs,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _padded(worker: Any, row: TrainerRow, output: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """One row as verl's worker has it before it puts them together."""
    from verl.experimental.agent_loop.agent_loop import _InternalAgentLoopOutput

    inputs: dict[str, Any] = {}
    position_ids = tensors["position_ids"]
    if output.multi_modal_data and worker.processor is None:
        raise RolloutError(
            f"{named(row)} has images or videos, and verl found no processor of the model "
            "(actor_rollout_ref.model.path)"
        )
    if worker.processor is not None:
        inputs = worker._compute_multi_modal_inputs(output, tensors["input_ids"])
        if not hasattr(worker.processor, "get_rope_index_kwargs"):
            worker.processor.get_rope_index_kwargs = _seconds_of_videos
        position_ids = worker._compute_position_ids(
            tensors["input_ids"],
            tensors["attention_mask"],
            inputs,
            _processor_kwargs(worker, output),
        )
    return _InternalAgentLoopOutput.model_construct(
        **{**tensors, "position_ids": position_ids},
        multi_modal_inputs=inputs,
        multi_modal_data=output.multi_modal_data,
        mm_processor_kwargs=output.mm_processor_kwargs,
        num_turns=output.num_turns,
        metrics=output.metrics,
        extra_fields=output.extra_fields,
        teacher_logprobs=None,
        teacher_ids=None,
        routed_experts=None,
    )


def _seconds_of_videos(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What verl's worker leaves out, so that Qwen2.5-VL would have other positions than engines."""
    seconds = inputs.get("second_per_grid_ts")
    return {} if seconds is None else {"second_per_grid_ts": seconds}


def _processor_kwargs(worker: Any, output: Any) -> Any:
    if output.mm_processor_kwargs is not None:
        return output.mm_processor_kwargs
    return worker._get_mm_processor_kwargs((output.multi_modal_data or {}).get("audios"))


class _Extras:
    """What only some batches have: log-probs, experts, a teacher's words.

    verl looks at the first row for whether there are any, and fails where another one lacks them:
    here all rows have them where one has, zeros in place of what is not known.
    """

    def __init__(self, outputs: Sequence[Any], lengths: LengthsConfig, pad: int) -> None:
        self._outputs, self._lengths, self._pad = outputs, lengths, pad
        self._log_probs = any(each.response_logprobs is not None for each in outputs)
        self._experts = _shape(each.routed_experts for each in outputs)
        self._teacher = _shape(each.extra_fields.get("teacher_ids") for each in outputs)

    def give(self, padded: Any, at: int) -> None:
        """Complete a row."""
        output = self._outputs[at]
        if not self._log_probs:
            padded.response_logprobs = None
        if self._experts is not None:
            padded.routed_experts = self._experts_of(output)
        ids = output.extra_fields.pop("teacher_ids", None)
        log_probs = output.extra_fields.pop("teacher_logprobs", None)
        if self._teacher is not None:
            padded.teacher_ids, padded.teacher_logprobs = self._taught(output, ids, log_probs)

    def _experts_of(self, output: Any) -> torch.Tensor:
        """(1, P + R, layers, top_k) int16."""
        assert self._experts is not None
        width = self._lengths.prompt + self._lengths.response
        given = torch.zeros(1, width, *self._experts, dtype=torch.int16)
        if output.routed_experts is not None:
            known = torch.as_tensor(np.array(output.routed_experts)).to(torch.int16)
            begin = self._lengths.prompt - len(output.prompt_ids)
            stop = min(begin + len(known), width)
            given[0, begin:stop] = known[: stop - begin]
        return given

    def _taught(self, output: Any, ids: Any, log_probs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        from verl.experimental.teacher_loop.teacher_manager import _pad_teacher_outputs

        assert self._teacher is not None
        prompt, response = len(output.prompt_ids), len(output.response_ids)
        if ids is None:
            prompt = response = 0
            ids = torch.zeros(0, *self._teacher, dtype=torch.int32)
            log_probs = torch.zeros(0, *self._teacher)
        taught: tuple[torch.Tensor, torch.Tensor] = _pad_teacher_outputs(
            ids,
            log_probs,
            prompt_width=self._lengths.prompt,
            response_width=self._lengths.response,
            prompt_length=prompt,
            response_length=response,
            pad_token_id=self._pad,
        )
        return taught


def _shape(values: Any) -> tuple[int, ...] | None:
    """Of what one token has; None where no row has any."""
    return next((tuple(each.shape[1:]) for each in values if each is not None), None)


def _complete_extra_info(outputs: Sequence[Any], *, has_scores: bool) -> None:
    """Give rows that nobody scored what verl's trainer reads of every row."""
    infos = [each.extra_fields.get("reward_extra_info") for each in outputs]
    known = {name: value for info in infos if info for name, value in info.items()}
    if not known or not has_scores:
        return
    for output, info in zip(outputs, infos, strict=True):
        missing = {
            name: _nothing(value) for name, value in known.items() if name not in (info or {})
        }
        output.extra_fields["reward_extra_info"] = {**missing, **(info or {})}


def _nothing(like: Any) -> Any:
    """What stands in a column of such values for one that is not known."""
    plain = like.item() if isinstance(like, np.generic) else like
    return next((empty for kind, empty in _NOTHING if isinstance(plain, kind)), None)
