"""Runs agents of this library inside slime: `docs/trainers/slime.md`.

slime is imported when one of these names is first used.
"""

from rollout.lazy import export_stub

export_stub(globals())
