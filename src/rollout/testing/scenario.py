"""Scenarios: what the simulated engine answers, how long that takes and what goes wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.engine.cores.simulated.options import Lognormal, ScenarioOptions, parse_scenario

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.config import RolloutConfig

#: Tokens are bytes here: enough for a system prompt with a few tool schemas, and for a tool's
#: longest answer beside some turns.
PROMPT_LENGTH = 2048
RESPONSE_LENGTH = 8192


class Scenario:
    """A scenario, built by chaining; each method returns a new one and leaves this one alone.

        Scenario(seed=1).reply("2+2", tool_call("add", a=2, b=2)).then("4").timing(base_s=0.02)

    Args:
        seed: Made-up words, choices among replies and faults derive from it.
        stream_interval: Tokens of a chunk.
        weight_version: What the engine stamps on its tokens.

    Raises:
        ConfigError: From every method, at an unknown option (naming the nearest known one) or a
            wrong value.
    """

    __slots__ = ("_options",)

    def __init__(self, seed: int = 0, **options: Any) -> None:
        self._options = parse_scenario({"seed": seed, **options}, "Scenario")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scenario) and self._options == other._options

    def __hash__(self) -> int:
        return hash(self._options)

    def __repr__(self) -> str:
        return f"Scenario({self.to_dict()})"

    @property
    def options(self) -> ScenarioOptions:
        """Everything that it says, checked."""
        return self._options

    def reply(
        self,
        when: str,
        *texts: str,
        turn: int | None = None,
        filler: int | Lognormal | Mapping[str, Any] = 0,
        finish: str = "stop",
    ) -> Scenario:
        """Answer prompts that contain `when`; of several rules that match, the first answers.

        Args:
            when: Text of the prompt, special tokens spelled out; "" is in every prompt.
            texts: The answer, or alternatives among which the request's seed decides. None at
                all: the answer is filler alone.
            turn: Only for this assistant's turn, counted from 1 over the whole prompt.
            filler: Tokens of made-up words before the text: a number, or the ``median``, ``sigma``
                and ``max`` of a log-normal distribution.
            finish: "stop" ends with the end token; "length" continues with made-up words until
                ``max_new_tokens``.
        """
        data = {
            "when": when,
            "turn": turn,
            "replies": [texts] if texts else [],
            "filler": msgspec.to_builtins(filler),
            "finish": finish,
        }
        return self._with(rules=[*self.to_dict().get("rules", []), data])

    def then(self, *texts: str) -> Scenario:
        """Answer the turn after the last `reply` or `then` with this text, or one of several.

        Turns are counted from the first appearance of that rule's `when`; the last text stays for
        all later turns.

        Raises:
            ValueError: There is no `reply` with a text before it.
        """
        rules = self.to_dict().get("rules", [])
        if not rules or "replies" not in rules[-1]:
            raise ValueError("then: there is no reply with a text before it")
        rules[-1]["replies"] = [*rules[-1]["replies"], texts]
        return self._with(rules=rules)

    def timing(self, **options: Any) -> Scenario:
        """Set fields of `rollout.engine.cores.simulated.options.Timing`, e.g. ``base_s=0.02``."""
        return self._with_section("timing", options)

    def capacity(self, **options: Any) -> Scenario:
        """Set fields of `Capacity` of the simulated engine, e.g. ``max_running=8``."""
        return self._with_section("capacity", options)

    def kv(self, **options: Any) -> Scenario:
        """Set fields of `rollout.engine.cores.simulated.options.Kv`, e.g. ``tokens=10_000``."""
        return self._with_section("kv", options)

    def experts(self, **options: Any) -> Scenario:
        """Set fields of `Experts` of the simulated engine, e.g. ``layers=4``.

        They are told where `SimulatedEngine(routed_experts=True)` serves.
        """
        return self._with_section("experts", options)

    def fault(self, **options: Any) -> Scenario:
        """Set fields of `Faults` of the simulated engine, e.g. ``die_after_tokens=500``."""
        return self._with_section("faults", options)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``SimulatedEngine(scenario=…)``; what has its default is left out."""
        data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self._options))
        return data

    def config(self, **sections: Any) -> RolloutConfig:
        """A whole configuration that runs this scenario on the driver's own event loop.

        Args:
            sections: Fields of `RolloutConfig` that replace the ones made here. An ``engine`` that
                is a `SimulatedEngine` without a scenario, e.g. for its replicas, gets this one.
        """
        import attrs

        from rollout.config import (
            InProcessPlacement,
            LengthsConfig,
            ModelConfig,
            RolloutConfig,
            SimulatedEngine,
        )

        engine = sections.pop("engine", SimulatedEngine())
        if getattr(engine, "scenario", None) == {}:
            engine = attrs.evolve(engine, scenario=self.to_dict())
        made: dict[str, Any] = {
            "model": ModelConfig(path="simulated"),
            "placement": InProcessPlacement(),
            "lengths": LengthsConfig(prompt=PROMPT_LENGTH, response=RESPONSE_LENGTH),
            "seed": self._options.seed,
        }
        return RolloutConfig(engine=engine, **(made | sections))

    def _with_section(self, name: str, options: dict[str, Any]) -> Scenario:
        return self._with(**{name: self.to_dict().get(name, {}) | options})

    def _with(self, **changes: Any) -> Scenario:
        scenario = object.__new__(Scenario)
        scenario._options = parse_scenario(self.to_dict() | changes, "Scenario")
        return scenario


def tool_call(name: str, /, **arguments: Any) -> str:
    """The text with which a model calls a tool in the Hermes format, for `Scenario.reply`."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"
