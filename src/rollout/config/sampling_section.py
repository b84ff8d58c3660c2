"""How tokens are drawn."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
from typing import ClassVar

import attrs

from rollout.config.checks import (
    Count,
    Flag,
    Natural,
    NonNegative,
    Number,
    Positive,
    PositiveProbability,
    Probability,
    TokenIds,
    TopK,
)
from rollout.config.section_type import Section, annotations_of, given_fields

#: Keys of other engines' sampling that need a tokenizer in the engine.
KEYS_OF_TEXT = ("stop", "stop_strings", "stop_regex", "min_new_tokens", "min_tokens")
NO_TEXT_IN_ENGINES = (
    "no such key: engines work on token ids only; expected stop_token_ids to say where a "
    "generation ends"
)


@attrs.frozen(kw_only=True)
class SamplingConfig(Section):
    """How tokens are drawn; a prompt can override each of these.

    Settings that stand over others (`validation_sampling` over `sampling`, a prompt's over both)
    leave what they do not name as it is. A temperature that is named without `greedy` samples.
    """

    section: ClassVar[str] = "sampling"
    #: What the logits are divided by; 0 takes the most likely token.
    temperature: NonNegative = 1.0
    #: Keeps the most likely tokens until they have this share of the probability.
    top_p: PositiveProbability = 1.0
    #: -1 keeps the whole vocabulary.
    top_k: TopK = -1
    #: Drops tokens less likely than this share of the most likely one's probability.
    min_p: Probability = 0.0
    #: Divides positive and multiplies negative logits of tokens in the prompt or the generation.
    repetition_penalty: Positive = 1.0
    #: Taken off the logits of tokens that the generation has. A request with it restarts where
    #: its replica is lost: its tokens do not say what is output.
    presence_penalty: Number = 0.0
    #: Taken off the logits of tokens for each time that the generation has them; as above.
    frequency_penalty: Number = 0.0
    #: Takes the most likely token and ignores the temperature.
    greedy: Flag = False
    #: Tokens of one generation; None leaves it to `lengths`.
    max_new_tokens: Count | None = None
    #: Ids that end a generation beside the model's own end tokens.
    stop_token_ids: TokenIds = ()
    #: The k most likely ids come with each sampled token, and their log-probs: in transcripts and
    #: in ``trajectories.jsonl``, as `top_ids` and `top_log_probs`. An http engine knows none.
    top_log_probs: Natural = 0

    @classmethod
    def instead_of(cls, key: str) -> str:
        """What engines could only find in text, and how many a prompt gets."""
        if key == "n":
            return "unknown key; scheduling.samples_per_prompt says how many each prompt gets"
        return NO_TEXT_IN_ENGINES if key in KEYS_OF_TEXT else ""

    def over(self, base: "SamplingConfig") -> "SamplingConfig":
        """These settings, with what they were not given taken from `base`."""
        given = given_fields(self)
        values = {
            name: getattr(self if name in given else base, name)
            for name in annotations_of(SamplingConfig)
        }
        if "temperature" in given and "greedy" not in given:
            values["greedy"] = False
        whole = SamplingConfig(**values)
        object.__setattr__(whole, "_given", given)
        return whole
