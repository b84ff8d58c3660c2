"""Tools of MCP servers."""

from rollout.tools.mcp.connecting import connect_mcp

__all__ = ["connect_mcp"]
