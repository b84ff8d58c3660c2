"""The one owner of a runtime's task groups, and how it is opened."""

from rollout.lazy import export_stub

export_stub(globals())
