"""What is asked and what is answered, the same on every road."""

from __future__ import annotations

import os
import struct
import sys
import time  # noqa: TID251  (what is measured here is CPU and wall time)
from array import array
from typing import TYPE_CHECKING

import attrs
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 128_000
#: Sampled tokens of an answer, with a log-probability each.
ANSWER = 200
#: What the system tells of a process, for those that cannot be asked.
TICKS = os.sysconf("SC_CLK_TCK")


def prompt_ids(tokens: int) -> array[int]:
    """A prompt; large ids, as real vocabularies have them."""
    return array("i", [(7919 * i) % VOCABULARY for i in range(tokens)])


ANSWER_IDS = array("i", [(104_729 * i) % VOCABULARY for i in range(ANSWER)])
ANSWER_LOG_PROBS = array("f", [-(i % 97) / 16 - 1 / 3 for i in range(ANSWER)])


def cpu_s(*pids: int) -> float:
    """CPU seconds that this process and those have used, by user and system."""
    return time.process_time() + sum(_cpu_of(pid) for pid in pids)


def _cpu_of(pid: int) -> float:
    """Nanoseconds from the scheduler where it tells them, else ticks; all threads."""
    total = 0.0
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                total += int(file.read().split()[0]) / 1e9
        except OSError:  # it ended meanwhile
            continue
    return total


@attrs.frozen
class Result:
    """One road at one number of requests in flight."""

    requests_per_s: float
    cpu_us: float


def wall_s() -> float:
    """A clock for rates."""
    return time.perf_counter()


def say(text: str) -> None:
    """A line for people."""
    print(text, file=sys.stderr, flush=True)


def send_port(port: int) -> None:
    """Tell the parent where a server listens."""
    sys.stdout.buffer.write(struct.pack("<H", port))
    sys.stdout.buffer.flush()


#: How a core may read a request's prompt: every id, as one does that refuses those outside of its
#: vocabulary, or into the list that SGLang's interface wants; None where it looks at nothing.
READINGS: dict[str, Callable[[bytes], int] | None] = {
    "none": None,
    "ids": lambda prompt: int(np.frombuffer(prompt, dtype="<i4").max()),
    "list": lambda prompt: len(np.frombuffer(prompt, dtype="<i4").tolist()),
}
