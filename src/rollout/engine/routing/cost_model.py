"""What an engine's time costs, learned from what engines report.

An engine's second goes into decoding steps, into the tokens of those steps, and into prompt tokens:

    seconds = step_s · steps + token_s · generated tokens + prompt_s · prompt tokens computed

`step_s` is the part of a step that every batch pays, so ``1 / token_s`` is the throughput that a
full batch approaches. The three costs are a least-squares fit over the reports of all replicas,
kept positive and drawn to a prior until there are reports. A replica's own *slowness* is the
ratio of the seconds it took to the seconds that its work should have cost.

Pure state machines: the time comes from the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from rollout.engine.core import EngineLoad

#: Costs before the first report, in seconds: about those of an 8B model on one current GPU.
STEP_S, TOKEN_S, PROMPT_S = 0.02, 1e-4, 5e-5
PRIORS = (STEP_S, TOKEN_S, PROMPT_S)
#: How much the prior weighs, in squared seconds of observation.
PRIOR_WEIGHT = 0.001
#: No cost falls below this share of its prior: a free resource would take every request.
LEAST_SHARE = 1e-4
#: What a fit keeps of the observations before it; a fit a second forgets half in 34 s.
FIT_MEMORY = 0.98
SWEEPS = 12
#: What a replica's speed keeps at each of its reports; it forgets half in 7.
SPEED_MEMORY = 0.9
#: Seconds of usual speed that a replica is assumed to have shown before its first report.
SPEED_PRIOR_S = 1.0
#: Least and greatest slowness that is believed.
SLOWNESS_RANGE = (0.01, 100.0)
#: Reports nearer to each other than this say little about speed.
LEAST_INTERVAL_S = 0.2


@attrs.frozen
class Work:
    """What one replica did between two reports.

    Attributes:
        seconds: How long that took.
        steps: Decoding steps, estimated: generated tokens ÷ mean batch.
        tokens: Tokens generated.
        prompt_tokens: Prompt tokens computed.
    """

    seconds: float = 0.0
    steps: float = 0.0
    tokens: float = 0.0
    prompt_tokens: float = 0.0

    def faded(self, memory: float, newer: Work) -> Work:
        """This work with the weight `memory`, and newer work beside it."""
        return Work(
            memory * self.seconds + newer.seconds,
            memory * self.steps + newer.steps,
            memory * self.tokens + newer.tokens,
            memory * self.prompt_tokens + newer.prompt_tokens,
        )


class CostModel:
    """The three costs of all replicas together.

    Attributes:
        step_s: Seconds of a decoding step, whatever its batch.
        token_s: Further seconds of a step for each request in the batch.
        prompt_s: Seconds to compute a prompt token that is not cached.
    """

    __slots__ = ("_moments", "_products", "_shares", "prompt_s", "step_s", "token_s")

    def __init__(self) -> None:
        # In units of the priors, which makes the three of one size: seconds at prior costs.
        self._moments = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._shares = [1.0] * 3
        self.step_s, self.token_s, self.prompt_s = PRIORS

    def seconds(self, work: Work) -> float:
        """What `work` should take a replica of usual speed."""
        return (
            self.step_s * work.steps
            + self.token_s * work.tokens
            + self.prompt_s * work.prompt_tokens
        )

    def observe(self, work: Work, slowness: float) -> None:
        """Take in what a replica of this slowness did."""
        amounts = (work.steps, work.tokens, work.prompt_tokens)
        parts = [amount * prior for amount, prior in zip(amounts, PRIORS, strict=True)]
        seconds = work.seconds / slowness
        for k, part in enumerate(parts):
            self._products[k] += part * seconds
            for other, factor in enumerate(parts):
                self._moments[k][other] += part * factor

    def fit(self) -> None:
        """Set the costs to what explains the observations best; older ones count less."""
        shares, moments = self._shares, self._moments
        for _ in range(SWEEPS):  # coordinate descent: each cost in turn, the others held
            for k in range(3):
                rest = sum(moments[k][other] * shares[other] for other in range(3) if other != k)
                best = self._products[k] + PRIOR_WEIGHT - rest
                shares[k] = max(LEAST_SHARE, best / (moments[k][k] + PRIOR_WEIGHT))
        self.step_s, self.token_s, self.prompt_s = (
            share * prior for share, prior in zip(shares, PRIORS, strict=True)
        )
        self._products = [product * FIT_MEMORY for product in self._products]
        self._moments = [[moment * FIT_MEMORY for moment in row] for row in moments]


class SpeedEstimate:
    """How fast one replica is, from its reports.

    Attributes:
        slowness: Seconds that it takes for what should cost one; 2 is half as fast as usual.
        latest: What it did before its last report, where that has not been judged yet.
        tokens_per_s: Tokens that it generated per second between its last two reports.
        was_idle: It had nothing to do for a while since the last report, so that the seconds
            until the next one say nothing. Set by the counter of requests.
        computed: Prompt tokens that it should have computed since the last report; likewise.
    """

    __slots__ = (
        "_at",
        "_last",
        "_work",
        "computed",
        "latest",
        "slowness",
        "tokens_per_s",
        "was_idle",
    )

    def __init__(self) -> None:
        self.slowness = 1.0
        self.tokens_per_s = 0.0
        self.latest: Work | None = None
        self._work = Work()
        self.restart()

    def restart(self) -> None:
        """The engine is a new one: its counters begin at 0. Its slowness is kept."""
        self._last: EngineLoad | None = None
        self._at = 0.0
        self.computed = 0.0
        self.was_idle = True

    def report(self, load: EngineLoad, now: float) -> None:
        """Note in `latest` what the replica did since its last report, if that is known.

        Args:
            now: When the report came. An engine that says when it took the load is believed
                instead, because what waited to be read says nothing of the engine's speed.
        """
        at = load.measured_at_s or now
        last, seconds = self._last, at - self._at
        if last is not None and 0 <= seconds < LEAST_INTERVAL_S:
            return
        self.latest = self._work_since(last, load, seconds) if last is not None else None
        self._last, self._at = load, at
        self.computed, self.was_idle = 0.0, False

    def _work_since(self, last: EngineLoad, load: EngineLoad, seconds: float) -> Work | None:
        tokens = load.generated_tokens - last.generated_tokens
        if seconds < 0 or tokens < 0:  # another engine than before
            return None
        self.tokens_per_s = tokens / seconds
        batch = (last.running + load.running) / 2
        if self.was_idle or not (tokens and last.running and load.running):
            return None
        return Work(seconds, tokens / batch, tokens, self.computed)

    def update(self, costs: CostModel) -> None:
        """Compare what it did lately, `latest` included, with what that should cost."""
        if self.latest is not None:
            self._work = self._work.faded(SPEED_MEMORY, self.latest)
            self.latest = None
        expected_s = costs.seconds(self._work)
        ratio = (self._work.seconds + SPEED_PRIOR_S) / (expected_s + SPEED_PRIOR_S)
        least, most = SLOWNESS_RANGE
        self.slowness = min(max(ratio, least), most)
