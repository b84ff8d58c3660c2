"""Token-exact training data for agentic reinforcement learning.

The public names are listed in ``__init__.pyi``, where type checkers read them. Each is imported on
first use, so that ``import rollout`` stays cheap: engine processes, which may run in an environment
with little installed, pay only for what they touch.
"""

from __future__ import annotations

from rollout.lazy import lazy_exports, read_stub
from rollout.version import VERSION

_HOMES = read_stub(__file__)

__version__ = VERSION
__all__ = sorted(name for names in _HOMES.values() for name in names)  # noqa: PLE0605
__getattr__ = lazy_exports(globals(), _HOMES)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
