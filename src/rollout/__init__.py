"""Token-exact training data for agentic reinforcement learning.

The public names are listed in ``__init__.pyi``, where type checkers read them. Each is imported on
first use, so that ``import rollout`` stays cheap: engine processes, which may run in an environment
with little installed, pay only for what they touch.
"""

from rollout.lazy import export_stub
from rollout.version import VERSION

__version__ = VERSION
export_stub(globals())
