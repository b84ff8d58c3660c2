"""The command line, and what only it uses."""

from rollout.cli.arguments import main

__all__ = ["main"]
