"""CPU time of a tool turn: ours, rendering everything again, and encoding the tool's text alone.

A conversation of T tool turns, each with a text and a call of the assistant and a tool's result of
about 100 tokens. At T = 4, 32 and 128 it measures, on the embedded model's tokenizer and Hermes
template:

    delta      `ChatTemplate.observation_ids` of the next result
    rerender   `ChatTemplate.prompt_ids` of the whole conversation with that result
    encode     the tokenizer's encoding of the result's text, and nothing else

Medians of CPU time, the three ways in turn in every round, results of other words each time.
`ratio_encode` is the worst delta over the encoding at the same length, `ratio_encode_cjk` the same
of results in Chinese after 4 turns, `flatness` the delta at 128 turns over the one at 4.

The last line is the result as JSON.

    python benchmarks/tokens.py [--rounds 60] [--quick]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time  # noqa: TID251  (what is measured here is CPU time)
from array import array
from typing import TYPE_CHECKING

from rollout.chat import ChatTemplate, load_chat_template
from rollout.engine.model_files import resolve_model
from rollout.types import Message, ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MODEL = "embedded:smollm2-135m-instruct"
TURNS = (4, 32, 128)
#: Calls that are timed together: one takes about as long as the clock's finest steps are wide.
CALLS = 8
CITIES = ("Bern", "Oslo", "Lima", "Kyoto", "Quito", "Accra", "Zürich", "Porto", "Hanoi", "Sucre")
#: Of about 100 tokens.
RESULT = (
    '{{"city": "{city}", "temperature": {number}.5, "unit": "celsius", "wind": "12 km/h", '
    '"summary": "Clouds in the morning, then sun; report {number} of the station at {city}. '
    "The evening stays dry, with a light breeze from the lake and good visibility. "
    'Tomorrow begins with fog in the valleys, which is gone by noon; later it grows warm."}}'
)
#: As many characters in Chinese.
RESULT_CJK = (
    '{{"城市": "{city}", "气温": {number}.5, "单位": "摄氏度", "风速": "每小时十二公里", '
    '"概况": "上午多云，随后转晴；这是{city}气象站的第{number}号报告。'
    "傍晚天气干燥，湖面吹来微风，能见度良好。"
    '明天山谷里先有雾，中午之前消散；之后气温逐渐升高，夜里可能有小雨。"}}'
)


def results(text: str = RESULT) -> Iterator[str]:
    """Texts of tools, no two of them equal."""
    for number in itertools.count(100):
        yield text.format(city=CITIES[number % len(CITIES)], number=number)


def conversation(turns: int, texts: Iterator[str]) -> list[Message]:
    """A question and `turns` calls with their results."""
    messages = [Message(role="user", content="How is the weather in all of these cities?")]
    for turn in range(turns):
        call = ToolCall(name="weather", arguments={"city": CITIES[turn % 10]}, id=f"call_{turn}")
        messages += [
            Message(role="assistant", content="Let me look at the next one.", tool_calls=(call,)),
            result(next(texts)),
        ]
    return messages


def result(text: str) -> Message:
    """A tool's answer."""
    return Message(role="tool", content=text, name="weather", tool_call_id="call_0")


def cpu_us(act: Callable[[str], object], texts: list[str]) -> float:
    """CPU microseconds of one call."""
    start = time.thread_time()
    for text in texts:
        act(text)
    return (time.thread_time() - start) / len(texts) * 1e6


def measure(
    template: ChatTemplate, turns: int, rounds: int, text: str = RESULT
) -> dict[str, float]:
    """Medians of the three ways after a conversation of `turns` tool turns."""
    texts = results(text)
    messages = conversation(turns, texts)
    ids = template.prompt_ids(messages)
    last = array("i", [*ids[-40:], *template.stop_token_ids[-1:]])
    encode = template.tokenizer.backend_tokenizer.encode
    ways: dict[str, Callable[[str], object]] = {
        "delta_us": lambda text: template.observation_ids([result(text)], after=last),
        "rerender_us": lambda text: template.prompt_ids([*messages, result(text)]),
        "encode_us": lambda text: encode(text, add_special_tokens=False).ids,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, act in ways.items():
            calls = 1 if name == "rerender_us" else CALLS
            times[name].append(cpu_us(act, [next(texts) for _ in range(calls)]))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure and print a table, and the result as JSON in the last line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60, help="rounds of each length (60)")
    parser.add_argument("--quick", action="store_true", help="10 rounds")
    options = parser.parse_args()
    rounds = 10 if options.quick else options.rounds
    template = load_chat_template(resolve_model(MODEL))
    measure(template, 1, 5)  # forms and caches are found once for each template
    gc.collect()
    gc.freeze()
    table = {turns: measure(template, turns, rounds) for turns in TURNS}
    cjk = measure(template, TURNS[0], rounds, RESULT_CJK)
    print(f"{'turns':>5} {'delta µs':>10} {'rerender µs':>12} {'encode µs':>10}", file=sys.stderr)
    for turns, row in table.items():
        delta, again, encode = row["delta_us"], row["rerender_us"], row["encode_us"]
        print(f"{turns:>5} {delta:>10.0f} {again:>12.0f} {encode:>10.0f}", file=sys.stderr)
    outcome = {
        "turns": {str(turns): _rounded(row) for turns, row in table.items()},
        "ratio_encode": round(max(r["delta_us"] / r["encode_us"] for r in table.values()), 3),
        "ratio_encode_cjk": round(cjk["delta_us"] / cjk["encode_us"], 3),
        "flatness": round(table[TURNS[-1]]["delta_us"] / table[TURNS[0]]["delta_us"], 3),
    }
    print(json.dumps(outcome))


def _rounded(row: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in row.items()}


if __name__ == "__main__":
    main()
