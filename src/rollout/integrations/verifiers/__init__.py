"""Agents of verifiers, trained by this library's engines: `docs/trainers/verifiers.md`.

verifiers and prime-rl are imported when what needs them is first used.
"""

from rollout.lazy import export_stub

export_stub(globals())
