"""What the commands do, once their arguments are known to be well formed."""

from __future__ import annotations

import logging
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import attrs
from rich.text import Text

from rollout.cli.check import config_faults, look_at_sandbox
from rollout.cli.consoles import lasting_consoles
from rollout.cli.exit_codes import BAD_INPUT, ENGINE_LOST, NOT_SAVED, OK, SOME_FAILED
from rollout.cli.foreground import INTERRUPTED, ForegroundJob, JobResult, run_job
from rollout.cli.memory import batch_fault
from rollout.cli.run_journal import JOURNAL, asked_otherwise, check_journal, is_own, with_journal
from rollout.cli.sizing import sizing_lines
from rollout.cli.user_code import UserCode
from rollout.cli.wrapping import print_line
from rollout.config import describe_config, load_config
from rollout.errors import (
    ConfigError,
    EngineError,
    PromptError,
    RolloutError,
    SandboxUnavailable,
    TemplateError,
    ToolError,
)
from rollout.interactions import InteractionRegistry
from rollout.plurals import count
from rollout.scheduling.arguments import check_names
from rollout.scheduling.prompt_files import read_prompts
from rollout.scheduling.rewards.functions import GivenRewards, load_rewards
from rollout.types import Outcome

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from rollout.batch import RolloutBatch
    from rollout.config import RolloutConfig
    from rollout.types import Prompt

DEMO_DIRECTORY = "rollout-output/demo"


def run_command(arguments: argparse.Namespace) -> int:
    """Perform the command and return its exit code; errors go to standard error."""
    command = _COMMANDS[arguments.command]
    with lasting_consoles() as (output, errors):
        try:
            with _shown_log(errors, is_verbose=arguments.verbose):
                return command(arguments, output, errors)
        except EngineError as error:
            return _tell(errors, error, ENGINE_LOST)
        except (ConfigError, PromptError, SandboxUnavailable, TemplateError, ToolError) as error:
            return _tell(errors, error, BAD_INPUT)
        except RolloutError as error:
            return _tell(errors, error, SOME_FAILED)
        except OSError as error:
            if error.filename is None:  # of no path that was given
                raise
            return _tell(errors, f"{error.filename}: {error.strerror}", BAD_INPUT)


def _tell(errors: Console, error: object, code: int) -> int:
    text = Text.assemble(("error: ", "bold red"), str(error))
    errors.print(text, soft_wrap=True, highlight=False)
    return code


@contextmanager
def _shown_log(errors: Console, *, is_verbose: bool) -> Iterator[None]:
    """Print what the library logs, above the progress line where there is one."""
    from rich.logging import RichHandler

    handler: logging.Handler = logging.StreamHandler(errors.file)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    if errors.is_terminal:
        handler = RichHandler(console=errors, show_time=False, show_path=False, markup=False)
    logger = logging.getLogger("rollout")
    before = (logger.handlers, logger.propagate, logger.level)
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO if is_verbose else logging.WARNING)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[:2]
        logger.setLevel(before[2])  # which also forgets what it had cached


def _run(arguments: argparse.Namespace, output: Console, errors: Console) -> int:
    config = load_config(arguments.config, arguments.overrides)
    code = UserCode()
    tools, interactions, rewards = _code_of(arguments, code)
    faults = config_faults(config, interactions)
    if faults:
        raise _cannot_run("the configuration", faults)
    prompts, rewards = _read_prompts(Path(arguments.prompts), config, rewards)
    load_rewards(rewards, config.rewards.processes)
    known = [*config.tools.builtin, *(tool.name for tool in tools)]
    check_names(prompts, config.agent, known, InteractionRegistry(interactions))
    samples, step, validate = arguments.samples, arguments.step, arguments.validate
    each = config.scheduling.samples_of(validate=validate) if samples is None else samples
    if (fault := batch_fault(config, each * len(prompts))) is not None:
        raise _cannot_run("the configuration", [fault])
    asked = asked_otherwise(config, samples, step, validate=validate)
    config = with_journal(config, Path(arguments.out), Path(arguments.prompts), asked)
    journal = config.journal.file
    directory = _directory(arguments.out, arguments.overwrite, journal, may_resume=arguments.resume)
    check_journal(config, directory, resume=arguments.resume)
    job = ForegroundJob(
        config=config,
        prompts=prompts,
        directory=directory,
        resume=arguments.resume,
        tools=tools,
        rewards=rewards,
        interactions=interactions,
        samples=samples,
        step=step,
        validate=validate,
    )
    result = anyio.run(run_job, job, errors, backend=arguments.backend)
    return _finished(result, job, output, errors)


def _demo(arguments: argparse.Namespace, output: Console, errors: Console) -> int:
    from rollout.cli import demo
    from rollout.tools import calculator

    own = [f"scheduling.samples_per_prompt={arguments.samples}", f"seed={arguments.seed}"]
    config = load_config(demo, [*own, *arguments.overrides])
    faults = [*config_faults(config), *demo.task_faults()]
    if faults:
        raise _cannot_run("the demo", faults)
    tasks = demo.arithmetic_tasks(arguments.prompts, arguments.seed)
    may_overwrite = arguments.overwrite or arguments.out is None
    directory = _directory(arguments.out or DEMO_DIRECTORY, may_overwrite)
    config = with_journal(config, directory)
    check_journal(config, directory, resume=False)
    job = ForegroundJob(
        config=config,
        prompts=tasks.prompts,
        directory=directory,
        tools=[calculator],
        rewards=GivenRewards(tasks.reward),
    )
    result = anyio.run(run_job, job, errors, backend=arguments.backend)
    if result.batch is not None:
        _print_demo(result.batch, output)
    return _finished(result, job, output, errors)


def _check(arguments: argparse.Namespace, output: Console, errors: Console) -> int:
    config = load_config(arguments.config, arguments.overrides)
    tools, interactions, rewards = _code_of(arguments, UserCode())
    load_rewards(rewards, config.rewards.processes)
    for line in describe_config(config):
        print_line(output, line)
    for label, text in sizing_lines(config):
        print_line(output, f"{label:<12}{text}")
    sandbox, unfit = anyio.run(look_at_sandbox, config, tools)
    print_line(output, f"{'sandbox':<12}{sandbox}")
    faults = [*config_faults(config, interactions, asks_for_gpus=True), *unfit]
    for fault in faults:
        _tell(errors, fault, BAD_INPUT)
    if not faults:
        print_line(output, f"{'check':<12}can run here; nothing was started")
    return BAD_INPUT if faults else OK


def _serve_gateway(arguments: argparse.Namespace, output: Console, errors: Console) -> int:
    from rollout.cli.serve_gateway import serve_gateway

    config = load_config(arguments.config, arguments.overrides)
    faults = config_faults(config)
    if faults:
        raise _cannot_run("the configuration", faults)
    anyio.run(serve_gateway, config, output, arguments.resume, backend=arguments.backend)
    return OK


def _replay(arguments: argparse.Namespace, output: Console, errors: Console) -> int:
    from rollout.cli.replay import replay_command

    return replay_command(arguments, output)


def _check_template(arguments: argparse.Namespace, output: Console, errors: Console) -> int:
    from rollout.cli.check_template import check_template

    is_appending = check_template(
        arguments.model,
        output,
        revision=arguments.revision,
        chat_template=arguments.chat_template,
        trust_remote_code=arguments.trust_remote_code,
    )
    return OK if is_appending else SOME_FAILED


def _report(arguments: argparse.Namespace, output: Console, errors: Console) -> int:
    from rollout.cli.report import write_reports

    write_reports(
        arguments.directory,
        output,
        path=arguments.out,
        tokenizer=arguments.tokenizer,
        follow_s=arguments.every if arguments.follow else None,
    )
    return OK


def _timeline(arguments: argparse.Namespace, output: Console, errors: Console) -> int:
    from rollout.observe import read_events
    from rollout.observe.timeline import TIMELINE, write_timeline

    directory = Path(arguments.directory)
    path = directory / TIMELINE if arguments.out is None else Path(arguments.out)
    slices = write_timeline(read_events(directory), path)
    print_line(output, f"{'timeline':<12}{path} ({count(slices, 'slice')})")
    return OK


_COMMANDS = {
    "run": _run,
    "demo": _demo,
    "report": _report,
    "check": _check,
    "check-template": _check_template,
    "serve-gateway": _serve_gateway,
    "timeline": _timeline,
    "replay": _replay,
}


def _code_of(
    arguments: argparse.Namespace, code: UserCode
) -> tuple[list[Any], list[Any], GivenRewards]:
    """Tools, simulated users and the rewards that the options name."""
    rewards = GivenRewards(
        None if arguments.reward is None else code.reward(arguments.reward),
        None if arguments.group_reward is None else code.group_reward(arguments.group_reward),
    )
    tools = code.tools(arguments.tools)
    code.agents(arguments.agents)
    return tools, code.interactions(), rewards


def _read_prompts(
    path: Path, config: RolloutConfig, rewards: GivenRewards
) -> tuple[list[Prompt], GivenRewards]:
    """The prompts of a file, or of a directory of tasks, whose tests are the reward then."""
    if not os.path.isdir(path):
        return read_prompts(path), rewards
    from rollout.environments.task_directory import TaskDirectory

    tasks = TaskDirectory(path, provider=config.sandbox.provider)
    tasks.check_limits(config.limits)
    if rewards.single is None:
        rewards = attrs.evolve(rewards, single=tasks.reward)
    return tasks.prompts(), rewards


def _cannot_run(what: str, faults: Sequence[str]) -> ConfigError:
    return ConfigError("\n  ".join((f"{what} cannot run here:", *faults)), tuple(faults))


def _directory(
    path: str, may_overwrite: bool, journal: Path | None = None, *, may_resume: bool = False
) -> Path:
    """The directory for the results, made and known to be writable before any work starts."""
    directory = Path(path)
    try:
        has_journal = journal is not None and journal.is_file()
        may_have_files = may_overwrite or (may_resume and has_journal)
        if directory.exists() and not may_have_files and any(directory.iterdir()):
            options = "--overwrite"
            if has_journal:
                where = "there" if is_own(journal, directory) else str(journal)
                options += f", or --resume to continue the run that left its journal {where}"
            raise ConfigError(
                f"--out {path}: is not empty; expected an empty or new directory, or {options}"
            )
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return directory
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written: {error.strerror}") from error


def _print_demo(batch: RolloutBatch, output: Console) -> None:
    """A table of the groups, one transcript, and how many trajectories solved their sum."""
    from rollout.cli.demo import is_solved
    from rollout.cli.groups import group_table
    from rollout.cli.transcript_view import print_transcript

    output.print(group_table(batch, is_plain=not output.is_terminal))
    output.print()
    shown = [row for row in batch.trajectories if row.transcript.response_length]
    shown.sort(key=lambda row: (is_solved(row), row.trainable), reverse=True)
    if shown and batch.decode is not None:
        row = shown[0]
        print_line(output, f"transcript of {row.uid}, member {row.member}")
        print_transcript(output, row.transcript, batch.decode)
        output.print()
    solved = sum(map(is_solved, batch.trajectories))
    share = f" ({solved / len(batch):.0%})" if len(batch) else ""
    print_line(output, f"{'solved':<10}{solved} of {len(batch)}{share}, by a right call and answer")


def _finished(result: JobResult, job: ForegroundJob, output: Console, errors: Console) -> int:
    """Say what became of a job; its exit code."""
    from rollout.cli.summary import summary_lines

    journal = job.config.journal.file
    if result.batch is not None:
        kept = [JOURNAL] if result.written and is_own(journal, job.directory) else []
        files = None if result.fault is None else kept
        for line in summary_lines(
            result.batch, result.seconds, job.directory, files, is_resumed=job.resume
        ):
            print_line(output, line)
    if result.fault is not None:
        return _tell(errors, _loss(result, journal), NOT_SAVED)
    return _exit_code(result, errors)


def _loss(result: JobResult, path: Path | None) -> str:
    """What could not be saved, and what there is in its place."""
    assert result.batch is not None
    ended = count(len(result.batch.trajectories), "trajectory")
    kept = f"kept is {path} with {result.written:,} of {ended}, as they ended; "
    hint = "--resume continues from it, rollout.load_trajectories reads it"
    return f"{result.fault}\n  {kept + hint if result.written else f'none of {ended} is saved'}"


def _exit_code(result: JobResult, errors: Console) -> int:
    if result.signal is not None:
        errors.print(_interruption(result), soft_wrap=True, highlight=False)
        return 128 + result.signal
    assert result.batch is not None
    failed = [row for row in result.batch.samples if row.outcome == Outcome.FAILED]
    if any(row.reason == "engine" for row in failed):
        return ENGINE_LOST
    rejected = any(row.outcome == Outcome.REJECTED for row in result.batch.samples)
    return SOME_FAILED if failed or rejected else OK


def _interruption(result: JobResult) -> str:
    if result.batch is None:
        return "interrupted before a trajectory had started; nothing is saved"
    rows = result.batch.trajectories
    ended = sum(row.reason != INTERRUPTED for row in rows)
    lost = f"; {result.lost} more had no time to end and are lost" if result.lost else ""
    if ended == len(rows):
        return f"interrupted: all {len(rows)} saved trajectories had ended by themselves{lost}"
    return (
        f"interrupted: {ended} of {len(rows)} saved trajectories had ended by themselves, "
        f"the others are saved as far as they had come{lost}"
    )
