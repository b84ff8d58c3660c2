"""Where engines live: one class for each kind of placement, and which engine may live where."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar, get_args

import attrs

from rollout.config.checks import Count, GpuSlots, NonNegative, Text, Texts
from rollout.config.config_faults import Fault
from rollout.config.section_type import Section, fields_named

#: Ray counts resources in these.
RAY_QUANTUM = 0.0001


@attrs.frozen(kw_only=True)
class PlacementConfig(Section):
    """What every placement has; use one of its subclasses."""

    section: ClassVar[str] = "placement"
    kind: ClassVar[str]

    @classmethod
    def homes_of(cls, key: str) -> list[str]:
        """The kinds of placement that have this key."""
        kinds = {f"kind {place.kind!r}": place for place in PLACEMENTS}
        return fields_named(key, kinds)


@attrs.frozen(kw_only=True)
class InProcessPlacement(PlacementConfig):
    """The engine runs on the driver's own event loop, behind the same frames in memory."""

    kind: ClassVar[str] = "in_process"


@attrs.frozen(kw_only=True)
class LocalProcessPlacement(PlacementConfig):
    """Each replica is a child process behind a loopback socket."""

    kind: ClassVar[str] = "local_process"
    #: Interpreter of the replica; None takes the driver's own.
    python: Text | None = None


@attrs.frozen(kw_only=True)
class RayPlacement(PlacementConfig):
    """Each replica is a Ray actor with its GPUs."""

    kind: ClassVar[str] = "ray"
    #: Interpreter of the replica, on its machine; needs no Ray. None takes that of Ray's workers.
    python: Text | None = None
    #: Ray cluster to join; None joins the one that this process has joined, that ``RAY_ADDRESS``
    #: names or that runs on this machine, else starts one here.
    address: Text | None = None
    #: A fraction lets actors share a GPU. None: as many as the engine spreads over, none on a CPU.
    gpus_per_replica: NonNegative | None = None
    #: May be a fraction too.
    cpus_per_replica: NonNegative = 1.0
    #: Machines that one replica spreads over, its GPUs and cores divided among them.
    machines_per_replica: Count = 1
    #: Machines by Ray node id or address; replica i lives on the i-th, counted round, or on the
    #: next `machines_per_replica` of them.
    nodes: Texts = ()
    #: GPUs of a trainer, one ``node:0,1`` for each machine of each replica
    #: (`rollout.engine.gpu_slots_of` finds them). The replicas share those GPUs and ask Ray for
    #: none.
    colocate: GpuSlots = ()

    def relation_faults(self, sound: Collection[str]) -> Iterator[Fault]:
        """A place is found in one way, and Ray can give what is asked of each machine."""
        if {"nodes", "colocate"} <= set(sound) and self.nodes and self.colocate:
            yield Fault("nodes", "expected none, as placement.colocate is given", list(self.nodes))
        for name in ("gpus_per_replica", "cpus_per_replica"):
            is_known = {name, "machines_per_replica"} <= set(sound)
            amount = (getattr(self, name) or 0.0) if is_known else 0.0
            share = amount / self.machines_per_replica if amount else 0.0
            if 0 < share < RAY_QUANTUM:
                yield Fault(name, f"expected 0 or at least {RAY_QUANTUM:g} a machine", amount)
            elif name == "gpus_per_replica" and share > 1 and share % 1:
                yield Fault(name, "expected a whole number a machine, or at most 1", amount)


def gpus_of(engine: object, placement: RayPlacement) -> float:
    """GPUs that Ray is asked for, for each replica of an engine."""
    if placement.colocate:
        return 0.0
    if placement.gpus_per_replica is not None:
        return placement.gpus_per_replica
    is_on_cpu = getattr(engine, "device", "cpu") == "cpu"
    return 0.0 if is_on_cpu else float(getattr(engine, "tensor_parallel", 1))


#: The first is what data without a `kind` means.
AnyPlacement = LocalProcessPlacement | RayPlacement | InProcessPlacement
PLACEMENTS: tuple[type[PlacementConfig], ...] = get_args(AnyPlacement)
PLACEMENT_KINDS = tuple(placement.kind for placement in PLACEMENTS)

#: Kinds of placement by kind of engine. A process of its own keeps a model's compute off the
#: driver's loop; a server started elsewhere needs no process of ours.
ALLOWED_PLACEMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "transformers": ("local_process", "ray"),
        "simulated": ("in_process", "local_process", "ray"),
        "sglang": ("local_process", "ray"),
        "http": ("in_process",),
        "custom": ("in_process", "local_process", "ray"),
    }
)
