"""The command line, and what only it uses."""

from rollout.cli.command_line import main

__all__ = ["main"]
