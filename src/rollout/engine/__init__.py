"""Engines: what generates tokens, where it lives, and the channel to it.

Names are imported on first use: an engine process imports submodules of this package in an
environment that may hold little else.
"""

from rollout.lazy import export_stub

export_stub(globals())
