"""One step: slots to waiting requests, the model over the planned tokens, a draw for each row."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from rollout.engine.cores.transformers.attention import StepSpan
from rollout.engine.cores.transformers.token_sampling import SamplingRow, sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.engine.cores.transformers.scheduler import Piece, Scheduler
    from rollout.engine.cores.transformers.slot_model import SlotModel


def step(scheduler: Scheduler, model: SlotModel) -> None:
    """Compute the next tokens of `scheduler` on `model`; the scheduler must not be idle."""
    for slot, kept, reused, source in scheduler.admit():
        if source is not None:
            model.copy_prefix(source.index, slot.index, kept, reused)
    pieces = scheduler.plan()
    fed = np.concatenate([piece.sequence.ids[piece.start : piece.stop] for piece in pieces])
    spans = [StepSpan(piece.slot.index, piece.start, piece.stop) for piece in pieces]
    sampled = [index for index, piece in enumerate(pieces) if piece.is_sampled]
    logits = model.step(torch.from_numpy(fed.astype(np.int64)), spans, sampled)
    scheduler.mark_computed(pieces)
    if sampled:
        _draw(scheduler, model, logits, [pieces[index] for index in sampled])


def _draw(
    scheduler: Scheduler, model: SlotModel, logits: torch.Tensor, pieces: Sequence[Piece]
) -> None:
    draws = sample(logits, [_row(piece) for piece in pieces])
    tokens, log_probs = draws.ids.tolist(), draws.log_probs.tolist()
    for piece, token, log_prob, top in zip(pieces, tokens, log_probs, draws.top, strict=True):
        if math.isfinite(log_prob):
            scheduler.advance(piece.sequence, token, log_prob, *top)
        else:
            scheduler.fail(
                piece.sequence, f"the model's logits at position {piece.stop - 1} are not finite"
            )
            model.clear(piece.slot.index)


def _row(piece: Piece) -> SamplingRow:
    sequence = piece.sequence
    return SamplingRow(
        sequence.sampling,
        sequence.seed,
        sequence.length,
        seen=sequence.ids[: sequence.length],
        prompt_length=sequence.prompt_length,
    )
