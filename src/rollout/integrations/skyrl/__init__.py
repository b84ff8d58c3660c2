"""Runs agents of this library inside SkyRL: `docs/trainers/skyrl.md`.

SkyRL is imported when one of these names is first used.
"""

from rollout.lazy import export_stub

export_stub(globals())
