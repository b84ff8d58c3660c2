"""SGLang as an engine: token ids in, token ids with log-probs and weight versions out.

`sglang_core` faces the server; `adapter` is the module that knows SGLang's API; `server_arguments`
turns our options into its own, `translation` requests into its fields and its answers into chunks.
`plugin` and `cpu_platform` let an unmodified SGLang run on a CPU.
"""

from rollout.lazy import export_stub

# SGLang loads `plugin` in each of its processes: importing this package must stay cheap.
export_stub(globals())
