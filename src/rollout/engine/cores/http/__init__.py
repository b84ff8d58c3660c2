"""Engines behind servers started elsewhere: SGLang's own API, or vLLM's.

`http_core` faces the engine's server; `client` is the one module that knows the HTTP library;
`sglang_api` and `vllm_api` say what each kind of server is asked and how its answers read.
"""

from rollout.engine.cores.http.http_core import HttpCore

__all__ = ["HttpCore"]
