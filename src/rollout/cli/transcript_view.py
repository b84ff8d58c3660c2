"""A transcript for people: which tokens are trained on, and which the model only read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from rollout.plurals import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console

    from rollout.chat.spans import SpanKind
    from rollout.chat.transcript import Transcript

STYLES: dict[SpanKind, str] = {
    "prompt": "dim",
    "generated": "bold green",
    "observation": "yellow",
}
MEANINGS: dict[SpanKind, str] = {
    "prompt": "prompt, not trained",
    "generated": "trained",
    "observation": "observation, not trained",
}
#: A longer prompt is shown by this many characters at either end.
PROMPT_END = 400


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
        text = Text("\n".join(_marked(transcript, decode)))
    console.print(text, soft_wrap=True, highlight=False)


def _legend() -> Text:
    parts = [Text(meaning, STYLES[kind]) for kind, meaning in MEANINGS.items()]
    return Text(" · ").join(parts)


def _pieces(
    transcript: Transcript, decode: Callable[[Sequence[int]], str]
) -> Iterator[tuple[SpanKind, int, str]]:
    for span in transcript.spans:
        text = decode(transcript.span_ids(span))
        yield span.kind, len(span), _shortened(text) if span.kind == "prompt" else text


def _coloured(transcript: Transcript, decode: Callable[[Sequence[int]], str]) -> Iterator[Text]:
    for kind, _, text in _pieces(transcript, decode):
        yield Text(text, STYLES[kind])


def _marked(transcript: Transcript, decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    for kind, length, text in _pieces(transcript, decode):
        yield f"[{MEANINGS[kind]}] {count(length, 'token')}\n{text}"


def _shortened(text: str) -> str:
    left_out = len(text) - 2 * PROMPT_END
    if left_out <= 0:
        return text
    return f"{text[:PROMPT_END]}\n… {left_out:,} characters …\n{text[-PROMPT_END:]}"
