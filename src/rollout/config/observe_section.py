"""What of a run is written down, and who is told."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
from collections.abc import Collection, Iterator
from typing import Annotated, ClassVar, Literal

import attrs

from rollout.config.checks import Flag, Probability, Rule, Text
from rollout.config.config_faults import Fault
from rollout.config.section_type import Section

Port = Annotated[int, Rule("a port, 0 to 65535", lambda port: 0 <= port <= 65535)]


@attrs.frozen(kw_only=True)
class ObserveConfig(Section):
    """What of a run is written down, and who is told; ``docs/observe.md`` explains it."""

    section: ClassVar[str] = "observe"
    #: A directory whose ``events.jsonl`` gets all events; made where there is none. ``rollout run``
    #: writes them to its results where this is None.
    path: Text | None = None
    #: Where traces go: "otel" to the tracer provider of OpenTelemetry that the process has set,
    #: "mlflow" to MLflow's tracking server or store, "weave" to Weights & Biases' Weave. None
    #: traces nothing. Each needs the extra of its name.
    trace_backend: Literal["otel", "mlflow", "weave"] | None = None
    #: Of all trajectories this share is traced, chosen by their step, uid and member; those that
    #: failed always are.
    trace_share: Probability = 1.0
    #: Adds the decoded text of prompts and turns to traces.
    token2text: Flag = False
    #: The project of the traces in Weave, and the experiment in MLflow.
    project: Text = "rollout"
    #: A port of this machine, reachable from itself only, on which Prometheus finds the metrics; 0
    #: takes a free one, which the log names. None opens none. Needs the extra "prometheus".
    prometheus_port: Port | None = None

    def relation_faults(self, sound: Collection[str]) -> Iterator[Fault]:
        """No setting of traces where there are none."""
        if self.trace_backend is not None or "trace_backend" not in sound:
            return
        usual = {"trace_share": 1.0, "token2text": False, "project": "rollout"}
        for name in usual.keys() & set(sound):
            if getattr(self, name) != usual[name]:
                problem = "expected the default without observe.trace_backend"
                yield Fault(name, problem, getattr(self, name))
