"""What a scenario can say: plain data that travels as JSON or msgpack.

Durations are in seconds, lengths in tokens; a token of the simulated model is a byte of UTF-8.

Loaded in engine processes: imports msgspec and the standard library only.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from rollout.engine.core import AtLeastOne, Natural, NonNegative, Share
from rollout.engine.cores.simulated.stable import stable_share
from rollout.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

Positive = Annotated[float, msgspec.Meta(gt=0)]
Finish = Literal["stop", "length"]


class _Section(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A part of a scenario."""


class Lognormal(_Section, frozen=True, kw_only=True):
    """Lengths that vary as those of real answers do.

    Attributes:
        median: Half of the lengths are shorter.
        sigma: Standard deviation of the logarithm; 0 makes all equal, 1 spreads widely.
        max: Longer ones are cut to this.
    """

    median: Positive
    sigma: NonNegative = 0.5
    max: AtLeastOne | None = None


class ReplyRule(_Section, frozen=True, kw_only=True):
    """What to answer where a prompt matches.

    Attributes:
        when: Text that the prompt must contain, special tokens spelled out; "" is in every one.
        turn: Number of the assistant's turn that is asked for, counted from 1 over the whole
            prompt; None takes every turn.
        replies: Alternatives for the first assistant's turn after `when` appeared, for the
            second, …; the last entry stays for the later ones. Empty: the answer is filler.
        filler: Tokens of made-up words before the reply: a number, or a `Lognormal`.
        finish: "stop" ends with the end token; "length" continues with made-up words until
            `max_new_tokens`.
    """

    when: str = ""
    turn: AtLeastOne | None = None
    replies: tuple[Annotated[tuple[str, ...], msgspec.Meta(min_length=1)], ...] = ()
    filler: Natural | Lognormal = 0
    finish: Finish = "stop"


class Timing(_Section, frozen=True, kw_only=True):
    """How long work takes.

    Attributes:
        base_s: Seconds of a decoding step, whatever the batch.
        slope_s: Further seconds of a step for each request in the batch.
        prefill_tokens_per_s: Prompt tokens prefilled in a second where the prefix cache does not
            hold them; None makes prefill free.
        load_weights_s: Seconds that `update_weights` takes.
    """

    base_s: NonNegative = 0.01
    slope_s: NonNegative = 0.0001
    prefill_tokens_per_s: Positive | None = 20_000.0
    load_weights_s: NonNegative = 0.0


class Capacity(_Section, frozen=True, kw_only=True):
    """How much the engine takes on.

    Attributes:
        max_running: Requests decoded together.
        max_queued: Requests waiting for a place; past that the answer is "rejected".
        context_length: Prompt plus generated tokens.
    """

    max_running: AtLeastOne = 256
    max_queued: Natural = 4096
    context_length: Annotated[int, msgspec.Meta(ge=2)] = 32_768


class Kv(_Section, frozen=True, kw_only=True):
    """The memory for keys and values.

    Attributes:
        tokens: Capacity. Where it does not suffice for the next step, the youngest request goes
            back to the queue and is prefilled again later.
        block_tokens: Prefixes are shared in whole blocks of this length.
        prefix_cache: Whether what one request computed serves the next.
    """

    tokens: Annotated[int, msgspec.Meta(ge=2)] = 1_000_000
    block_tokens: AtLeastOne = 16
    prefix_cache: bool = True


class Experts(_Section, frozen=True, kw_only=True):
    """The mixture of experts that the engine tells of, where `engine.routed_experts` is set.

    Attributes:
        layers: How many of the model's layers have experts.
        top_k: How many of them a layer routes a token to.
        count: How many a layer has.
    """

    layers: AtLeastOne = 2
    top_k: AtLeastOne = 2
    count: Annotated[int, msgspec.Meta(ge=1, le=2**15)] = 8

    def __post_init__(self) -> None:
        if self.top_k > self.count:
            raise ValueError(f"top_k = {self.top_k}; expected at most count = {self.count}")


class Faults(_Section, frozen=True, kw_only=True):
    """What goes wrong. Shares are of requests; which ones, the scenario's seed decides.

    Attributes:
        start_delay_s: Seconds before the engine has started.
        freeze_at_s: Seconds after the start at which the engine freezes; nothing is computed,
            answered or aborted until `freeze_s` later, then it continues as if nothing had
            happened.
        freeze_s: Length of the freeze; None never ends.
        die_after_tokens: The engine dies when it has sampled this many tokens in all.
        lost_aborts: So many of the first aborts are ignored.
        reject_share: Refused at once with "rejected".
        duplicate_answers: The last chunk is sent twice.
        reordered_answers: The last chunk overtakes the one before it.
        wrong_length: The first chunk with ids has one log-prob too few.
        replicas: Indices of the replicas that have these faults; None means all.
    """

    start_delay_s: NonNegative = 0.0
    freeze_at_s: NonNegative | None = None
    freeze_s: NonNegative | None = None
    die_after_tokens: AtLeastOne | None = None
    lost_aborts: Natural = 0
    reject_share: Share = 0.0
    duplicate_answers: Share = 0.0
    reordered_answers: Share = 0.0
    wrong_length: Share = 0.0
    replicas: tuple[Natural, ...] | None = None

    def draw(self, seed: int, number: int) -> set[str]:
        """Names of the faults that hit the request of this number.

        Numbers count requests, ids say nothing: one order of requests meets the same faults each
        time, and a request that is tried again is drawn again.
        """
        shares = {
            "reject": self.reject_share,
            "duplicate": self.duplicate_answers,
            "reorder": self.reordered_answers,
            "wrong_length": self.wrong_length,
        }
        drawn = {name for name, share in shares.items() if share > 0}
        return {name for name in drawn if stable_share(seed, name, number) < shares[name]}


class ScenarioOptions(_Section, frozen=True, kw_only=True):
    """All of a scenario.

    Attributes:
        seed: Made-up words, choices and faults derive from it.
        rules: The first one that matches answers; without a match the answer is 64 tokens of
            made-up words and the end token.
        stream_interval: Tokens of a chunk.
        weight_version: What the engine stamps on its tokens until other weights are loaded.
        modalities: Media that prompts may hold: "image", "video". Their pixels say nothing to it.
    """

    seed: int = 0
    rules: tuple[ReplyRule, ...] = ()
    timing: Timing = Timing()
    capacity: Capacity = Capacity()
    kv: Kv = Kv()
    faults: Faults = Faults()
    experts: Experts = Experts()
    stream_interval: AtLeastOne = 16
    weight_version: Natural = 0
    modalities: tuple[Literal["image", "video"], ...] = ("image", "video")


def parse_scenario(data: Mapping[str, Any], path: str = "engine.scenario") -> ScenarioOptions:
    """The scenario that plain `data` describes."""
    try:
        return msgspec.convert(data, ScenarioOptions)
    except msgspec.ValidationError as error:
        what, _, where = str(error).replace("`", "").partition(" - at $")
        fault = f"{path}{where}: {what[:1].lower()}{what[1:]}"
        key = what.rpartition(" unknown field ")[2]
        if key != what:
            names = [name for kind in _Section.__subclasses__() for name in kind.__struct_fields__]
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)[0]
            fault = f"{path}{where}.{key}: unknown key; did you mean {near!r}?"
        raise ConfigError(fault, (fault,)) from None
