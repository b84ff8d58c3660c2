"""SGLang as an engine: token ids in, token ids with log-probs and weight versions out.

`sglang_core` faces the server; `adapter` is the module that knows SGLang's API; `server_arguments`
turns our options into its own, `translation` requests into its fields and its answers into chunks.
`plugin` and `cpu_platform` let an unmodified SGLang run on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.lazy import lazy_exports

if TYPE_CHECKING:
    from rollout.engine.cores.sglang.sglang_core import SGLangCore

# SGLang loads `plugin` in each of its processes: importing this package must stay cheap.
__all__ = ["SGLangCore"]
__getattr__ = lazy_exports(globals(), {"rollout.engine.cores.sglang.sglang_core": ("SGLangCore",)})
