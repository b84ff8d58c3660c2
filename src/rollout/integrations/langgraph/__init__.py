"""LangChain's chat models and LangGraph's graphs on exact tokens, without HTTP.

Needs the extra ``langgraph``.
"""

from rollout.lazy import export_stub

export_stub(globals())
