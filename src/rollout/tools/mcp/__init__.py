"""Tools of MCP servers."""

from rollout.tools.mcp.mcp_tools import connect_mcp

__all__ = ["connect_mcp"]
