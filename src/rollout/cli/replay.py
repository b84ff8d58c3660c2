"""``rollout replay``: a recorded trajectory runs again through its agent, step by step."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from rollout.cli.exit_codes import OK, SOME_FAILED
from rollout.cli.run_journal import JOURNAL
from rollout.cli.user_code import UserCode
from rollout.cli.wrapping import print_line
from rollout.config import load_config
from rollout.errors import ConfigError, JournalError
from rollout.plurals import count

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from rollout.runtime.replaying import Replayed


def replay_command(arguments: argparse.Namespace, output: Console) -> int:
    """Replay, say each step, and where it departs from the record; the exit code.

    Raises:
        ConfigError: There is no such record, or its agent is not known.
    """
    from rollout.runtime.replaying import find_record, replay

    uid, member = _parse_name(arguments.trajectory)
    path = Path(arguments.directory)
    path = path / JOURNAL if os.path.isdir(path) else path
    if arguments.config is not None:
        load_config(arguments.config)  # what it registers is known from now on
    code = UserCode()
    code.run_tool_files(arguments.tools)
    code.agents(arguments.agents)
    interactions = code.interactions()
    try:
        record = find_record(
            path, uid, member, arguments.step, arguments.call, validate=arguments.validate
        )
    except JournalError as error:
        raise ConfigError(str(error)) from error
    print_line(output, f"{'replay':<12}{uid}/{member} of step {record.key.step}, from {path}")

    def tell(number: int, what: str) -> None:
        print_line(output, f"{f'step {number}':<12}{what}")

    run = partial(replay, record, interactions, tell)
    replayed = anyio.run(run, backend=arguments.backend)
    return _print_result(replayed, output)


def _print_result(replayed: Replayed, output: Console) -> int:
    from rollout.journal.replay_log import describe_end

    trajectory, ended = replayed.trajectory, replayed.record.ended
    steps = count(replayed.steps, "step")
    if replayed.departure:
        where = f"at step {replayed.steps + 1}"
        print_line(output, f"{'departs':<12}{where}, from the record: {replayed.departure}")
        return SOME_FAILED
    if replayed.is_beyond or ended is None:
        why = "it was not finished" if ended is None else describe_end(ended)
        print_line(output, f"{'as recorded':<12}{steps}, to the end of the record: {why}")
        return OK
    print_line(output, f"{'as recorded':<12}{steps}, {describe_end(trajectory)}")
    if ended.reward is not None:
        print_line(
            output, f"{'reward':<12}not asked for in a replay; recorded was {ended.reward:g}"
        )
    return OK


def _parse_name(text: str) -> tuple[str, int]:
    uid, _, member = text.rpartition("/")
    if not uid or not member.isdecimal():
        raise ConfigError(f"--trajectory {text}: expected UID/MEMBER, such as prompt-3/0")
    return uid, int(member)
