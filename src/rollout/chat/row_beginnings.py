"""How rows of tokens begin: what two have in common, and where the prompt of one ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.medium import PlacedMedia

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.chat.transcript import Transcript


def append_split(
    transcript: Transcript, ids: Sequence[int], media: Sequence[PlacedMedia], prompt: int
) -> None:
    """Append ids to an empty transcript, the first `prompt` of them as its prompt.

    No image or video is cut in two: one that would be belongs to the observation, and so does what
    follows it; to the prompt where it stands at its beginning.
    """
    cut = next((m for m in media if m.start < prompt < m.start + m.count), None)
    if cut is not None:
        prompt = cut.start or cut.count
    after = [PlacedMedia(m.medium, m.start - prompt, m.count) for m in media if m.start >= prompt]
    transcript.append_prompt(ids[:prompt], media=[m for m in media if m.start < prompt])
    transcript.append_observation(ids[prompt:], media=after)


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two rows have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
