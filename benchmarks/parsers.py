"""CPU seconds that a megabyte of adversarial text costs each tool-call parser.

For every format: fragments of it repeated, in pairs and in threes, closed or left open, read once
as an answer and once as a turn that starts inside reasoning. All texts are tried at a fiftieth of
the size first; the slowest of them then count at full size. Progress goes to stderr; the last line
of stdout is the result as JSON: the most seconds of each format and of all. It takes two minutes.

    python benchmarks/parsers.py [--quick] [FORMAT …]
"""

from __future__ import annotations

import argparse
import json
import sys
import time  # noqa: TID251  (what is measured here is CPU time)
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from parser_cases.floods import FRAGMENTS, floods
from rollout.chat import get_tool_parser

MEGABYTE = 1_000_000
SMALL = MEGABYTE // 50
#: How many of a format's texts count at full size.
SLOWEST = 8


def seconds(name: str, text: str, *, in_reasoning: bool = False) -> float:
    parser = get_tool_parser(name)
    started = time.process_time()
    parser.parse(text, in_reasoning=in_reasoning)
    return time.process_time() - started


def slowest(name: str, size: int) -> float:
    """The most seconds that a text of this size costs the format `name`."""
    costs = [(seconds(name, text), what) for what, text in floods(name, SMALL)]
    chosen = {what for _, what in sorted(costs, reverse=True)[:SLOWEST]}
    plain = {"'<' *"} | {f"{one!r} *" for one in FRAGMENTS[name]}
    worst = (0.0, "")
    for what, text in floods(name, size):
        if what in chosen | plain:
            for in_reasoning in (False, True):
                cost = seconds(name, text[:size], in_reasoning=in_reasoning)
                worst = max(worst, (cost, what))
    print(f"{name:12} {len(costs)} texts, at most {worst[0]:.3f} s: {worst[1]}", file=sys.stderr)
    return worst[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help="default: all")
    parser.add_argument("--quick", action="store_true", help="a tenth of the size")
    options = parser.parse_args()
    unknown = sorted(set(options.formats) - FRAGMENTS.keys())
    if unknown:
        parser.error(f"{unknown[0]}: expected some of {', '.join(FRAGMENTS)}")
    size = MEGABYTE // 10 if options.quick else MEGABYTE
    names = options.formats or FRAGMENTS
    seconds_of = {name: round(slowest(name, size), 3) for name in names}
    print(json.dumps({"seconds": seconds_of, "worst": max(seconds_of.values())}))


if __name__ == "__main__":
    main()
