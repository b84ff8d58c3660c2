"""SIGUSR1 while some code blocks the event loop of `rollout run`."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from forked import rollout_command

pytestmark = pytest.mark.process
BLOCKED_RUN = """
from rollout.config import *
from rollout.testing import Scenario, tool_call

config = Scenario(seed=1).reply("sum", tool_call("block")).then("the end").config(
    placement=InProcessPlacement(),
)
"""
BLOCKING_TOOL = """
import hashlib, sys, rollout

@rollout.function_tool
async def block() -> str:
    '''Block the event loop.'''
    BLOCKING
    return "done"
"""


@pytest.mark.parametrize(
    "blocking",
    [
        pytest.param("sys.stdin.readline()", id="code that Python interrupts"),
        pytest.param(
            "hashlib.pbkdf2_hmac('sha256', b'', b'', 12_000_000)",
            id="a loop in C, seconds long",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_signal_while_the_loop_is_blocked_prints_its_stack_and_what_is_waited_for(
    tmp_path: Path, blocking: str
) -> None:
    (tmp_path / "tools.py").write_text(BLOCKING_TOOL.replace("BLOCKING", blocking))
    (tmp_path / "config.py").write_text(BLOCKED_RUN)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "sum"}\n')
    arguments = ("--prompts", "prompts.jsonl", "--out", "out", "--tools", "tools.py")
    with rollout_command(
        *("run", "config.py", *arguments),
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        guard = threading.Timer(120, process.kill)
        guard.start()
        assert process.stdin is not None
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            if "WARNING" in line and "the event loop is blocked" in line:  # for 0.1 s by now
                process.send_signal(signal.SIGUSR1)
                continue
            said += line
            if "engine-0: serving" in line:
                process.stdin.write("\n")
                process.stdin.flush()
        assert process.wait() == 0, said
        guard.cancel()
    doing = (
        "the event loop is blocked for .* s: .*tool 'block' of trajectory prompt-0/0 at .*tools.py"
    )
    assert re.search(doing, said), said
    stack = said.index('tools.py", line 7, in block')
    assert 0 < stack < said.index("tool 'block', for")
