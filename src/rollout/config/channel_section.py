"""The connections between driver and engines."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
from collections.abc import Collection, Iterator
from typing import ClassVar

import attrs

from rollout.config.checks import FrameBytes, NonNegative, Positive, Text
from rollout.config.config_faults import Fault
from rollout.config.section_type import Section

#: What encrypted connections take.
TLS_FILES = ("tls_certificate", "tls_key", "tls_authority")


@attrs.frozen(kw_only=True)
class ChannelConfig(Section):
    """The connections between driver and engines; ``docs/engines.md`` explains the protocol."""

    section: ClassVar[str] = "channel"
    #: Between two load reports of an engine, which are its heartbeat.
    heartbeat_s: Positive = 2.0
    #: Silence after which a connection is given up; time in which the driver's own loop was blocked
    #: does not count.
    heartbeat_timeout_s: Positive = 5.0
    #: How long the driver tries to connect anew after a break before it restarts the engine; 0
    #: restarts it at once.
    reconnect_s: NonNegative = 5.0
    #: How long a sampled token waits at most for others, up to `engine.stream_interval`, before
    #: it is sent.
    stream_interval_s: Positive = 0.25
    #: Longest message, either way.
    max_frame_bytes: FrameBytes = 256 * 1024 * 1024
    #: PEM files; all three encrypt the connections of engines in other processes. The engine shows
    #: the certificate, read on its machine, and the driver trusts what the authority has signed.
    tls_certificate: Text | None = None
    #: Of the certificate, and secret; read on the engine's machine.
    tls_key: Text | None = None
    #: Certificates that the driver trusts to sign those of engines.
    tls_authority: Text | None = None

    def relation_faults(self, sound: Collection[str]) -> Iterator[Fault]:
        """An engine must have the time to answer a heartbeat; encryption takes three files."""
        files = {name: getattr(self, name) for name in TLS_FILES}
        missing = [name for name, path in files.items() if path is None]
        if missing and len(missing) < len(files) and set(files) <= set(sound):
            given = next(name for name in files if name not in missing)
            yield Fault(missing[0], f"missing; expected a path beside channel.{given}")
        if not {"heartbeat_s", "heartbeat_timeout_s"} <= set(sound):
            return
        if self.heartbeat_timeout_s <= self.heartbeat_s:
            expected = f"expected more than channel.heartbeat_s = {self.heartbeat_s:g}"
            yield Fault("heartbeat_timeout_s", expected, self.heartbeat_timeout_s)
