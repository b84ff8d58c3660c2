"""Whether what comes beside sampled ids is theirs: the most likely ids, and routed experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.chat.transcript import NO_EXPERT
from rollout.engine.cores.simulated.options import parse_scenario
from rollout.engine.cores.simulated.vocabulary import expert_of, top_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from rollout.chat.spans import Span
    from rollout.chat.transcript import Transcript
    from rollout.config import RolloutConfig
    from rollout.engine.driver.generation import Generation

_expert_of = np.frompyfunc(expert_of, 5, 1)


def top_anomalies(
    transcript: Transcript, span: Span, said: Generation, *, is_simulated: bool
) -> Iterator[str]:
    """What is wrong with the most likely ids of a generated span, in words without its name.

    Args:
        said: What its engine told.
        is_simulated: Whether that has to be what the simulated model says.
    """
    count = said.top_count
    top = said.top()
    if top is None or not len(span):
        return
    if is_simulated:
        ids, log_probs = top_of(said.ids, span.start, count)
        made_up = np.array(ids, np.int32), np.array(log_probs, np.float32)
        top = made_up[0].reshape(-1, count), made_up[1].reshape(-1, count)
    for name, expected in zip(("top_ids", "top_log_probs"), top, strict=True):
        found = getattr(transcript, name)()[span.start : span.stop, :count]
        if not np.array_equal(found, expected):
            yield f"its {name} are not those of its engine"


def expert_anomalies(transcript: Transcript, config: RolloutConfig) -> Iterator[str]:
    """What is wrong with the routed experts of a transcript, where a simulated engine told them.

    They must be known of each token before the last sampled one; of that nothing was computed.
    """
    count = _experts_of(config)
    stop = max((span.stop for span in transcript.generated_spans() if len(span)), default=0)
    if not (count and stop):
        return
    found = transcript.routed_experts()
    if found is None or transcript.routed_length < stop - 1:
        known = 0 if found is None else transcript.routed_length
        yield f"the routed experts of {known} tokens are known; expected {stop - 1}"
        return
    expected = _made_up(transcript, found.shape, count)
    expected[transcript.routed_length :] = NO_EXPERT
    if not np.array_equal(found, expected):
        at = int(np.nonzero(found != expected)[0][0])
        yield f"the routed experts at {at} are {found[at].tolist()}; expected " + str(
            expected[at].tolist()
        )


def _experts_of(config: RolloutConfig) -> int:
    """How many experts a simulated engine has; 0 where it tells of none."""
    from rollout.config import SimulatedEngine

    engine = config.engine
    if not isinstance(engine, SimulatedEngine) or not engine.routed_experts:
        return 0
    return parse_scenario(engine.scenario).experts.count


def _made_up(transcript: Transcript, shape: tuple[int, ...], count: int) -> npt.NDArray[np.int16]:
    """(T, layers, top_k) of all tokens, as the simulated model routes them."""
    tokens, layers, ranks = np.indices(shape)
    ids = transcript.ids()[tokens]
    values: Any = _expert_of(ids, tokens, layers, ranks, count)
    routed: npt.NDArray[np.int16] = values.astype(np.int16)
    return routed
