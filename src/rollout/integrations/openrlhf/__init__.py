"""Runs agents of this library inside OpenRLHF: `docs/trainers/openrlhf.md`.

OpenRLHF is imported when one of these names is first used.
"""

from rollout.lazy import export_stub

export_stub(globals())
