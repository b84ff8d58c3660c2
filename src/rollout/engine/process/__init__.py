"""What runs where an engine lives, beside its core: msgspec and anyio are all that it needs."""
