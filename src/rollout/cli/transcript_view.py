"""A transcript for people: which tokens are trained on, and which the model only read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from rollout.chat.trajectory import MEANINGS, span_texts, transcript_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console

    from rollout.chat.transcript import SpanKind, Transcript

STYLES: dict[SpanKind, str] = {
    "prompt": "dim",
    "generated": "bold green",
    "observation": "yellow",
}


def print_transcript(
    console: Console, transcript: Transcript, decode: Callable[[Sequence[int]], str]
) -> None:
    """Print every span of `transcript`, decoded from its own ids.

    In colour with a legend where the console has colours; else under headings like ``[trained]``.
    The middle of a long prompt is left out, and said to be.
    """
    if console.is_terminal and not console.no_color and console.color_system is not None:
        console.print(_legend())
        text = Text().join(_coloured(transcript, decode))
    else:
        text = Text(transcript_text(transcript, decode))
    console.print(text, soft_wrap=True, highlight=False)


def _legend() -> Text:
    parts = [Text(meaning, STYLES[kind]) for kind, meaning in MEANINGS.items()]
    return Text(" · ").join(parts)


def _coloured(transcript: Transcript, decode: Callable[[Sequence[int]], str]) -> Iterator[Text]:
    for kind, _, text in span_texts(transcript, decode):
        yield Text(text, STYLES[kind])
