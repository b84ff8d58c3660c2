"""The connection between a driver and one engine: messages, handshake, and both of its ends.

Loaded in engine processes, but for `channel`: imports msgspec and anyio only.
"""
