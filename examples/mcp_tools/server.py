"""An MCP server with two tools, over standard input and output or, with a port, over HTTP.

python examples/mcp_tools/server.py [PORT]
"""

import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

STOCK = {"apple": 3, "pear": 5, "plum": 0}

server = MCPServer("shop")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def in_stock(item: str) -> str:
    """How many pieces of an item the shop has."""
    if item not in STOCK:
        raise ToolError(f"there is no {item} here; there are {', '.join(STOCK)}")
    return str(STOCK[item])


@server.tool()
def sell(item: str, pieces: int = 1) -> str:
    """Sell some pieces of an item, and say how many are left."""
    if STOCK.get(item, 0) < pieces:
        raise ToolError(f"only {STOCK.get(item, 0)} of {item} left")
    STOCK[item] -= pieces
    return f"{STOCK[item]} left"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
