"""Names of conversations, by which the router, the engines and the events know them.

The main conversation is named by its trajectory, `step/uid/member`; one that was opened from it has
`#path` after that. A uid may hold any sign, a member and a path hold digits and dots.
"""

from __future__ import annotations


def session_name(step: int, uid: str, member: int, path: str = "") -> str:
    """The conversation `path` of a trajectory; "" is the main one."""
    main = f"{step}/{uid}/{member}"
    return f"{main}#{path}" if path else main


def split_session(name: str) -> tuple[str, str]:
    """The name of the trajectory's main conversation, and the path of this one."""
    before, slash, last = name.rpartition("/")
    member, _, path = last.partition("#")
    return f"{before}{slash}{member}", path
