"""One step: slots to waiting requests, the model over the planned tokens, a draw for each row."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from rollout.engine.cores.transformers.attention import StepSpan
from rollout.engine.cores.transformers.token_sampling import SamplingRow, sample
from rollout.errors import MediaError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from rollout.engine.cores.transformers.scheduler import Piece, Scheduler
    from rollout.engine.cores.transformers.slot_model import SlotModel
    from rollout.engine.cores.transformers.vision import StepMedia


def step(scheduler: Scheduler, model: SlotModel) -> None:
    """Compute the next tokens of `scheduler` on `model`; the scheduler must not be idle."""
    for slot, kept, reused, source in scheduler.admit():
        if source is not None:
            model.copy_prefix(source.index, slot.index, kept, reused)
    pieces, media = _with_media(scheduler, model, scheduler.plan())
    if not pieces:
        return
    fed = np.concatenate([piece.sequence.ids[piece.start : piece.stop] for piece in pieces])
    spans = [StepSpan(piece.slot.index, piece.start, piece.stop) for piece in pieces]
    sampled = [index for index, piece in enumerate(pieces) if piece.is_sampled]
    tokens = torch.from_numpy(fed.astype(np.int64))
    logits = model.step(tokens, spans, sampled, positions=_positions(pieces), media=media)
    scheduler.mark_computed(pieces)
    if sampled:
        _draw(scheduler, model, logits, [pieces[index] for index in sampled])


def _with_media(
    scheduler: Scheduler, model: SlotModel, planned: Sequence[Piece]
) -> tuple[list[Piece], list[StepMedia]]:
    """The pieces of a step and what stands for their media; a request whose media fail ends."""
    pieces, media, offset = [], [], 0
    for piece in planned:
        if piece.sequence.vision is not None:
            try:
                found = model.step_media(piece.sequence.vision, piece.start, piece.stop, offset)
            except MediaError as error:
                scheduler.fail(piece.sequence, f"media of the prompt: {error}")
                continue
            if found is not None:
                media.append(found)
        pieces.append(piece)
        offset += piece.stop - piece.start
    return pieces, media


def _positions(pieces: Sequence[Piece]) -> npt.NDArray[np.int64] | None:
    """(rows, N) of a step; None where they are those of text."""
    laid_out = [piece.sequence.vision for piece in pieces]
    rows = next((len(v.positions) for v in laid_out if v and v.positions is not None), 0)
    if not rows:
        return None
    return np.concatenate(
        [
            np.broadcast_to(np.arange(piece.start, piece.stop), (rows, piece.stop - piece.start))
            if vision is None
            else vision.positions_of(piece.start, piece.stop)
            for piece, vision in zip(pieces, laid_out, strict=True)
        ],
        axis=1,
    )


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
