"""The cases of the gateway's benchmark."""
