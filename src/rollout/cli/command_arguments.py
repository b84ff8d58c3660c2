"""What each command takes on the command line, and what its ``--help`` says.

Nothing slow is imported here: ``rollout --help`` answers at once.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rollout import __version__
from rollout.cli.argument_types import natural, positive, seconds, step_number

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_CODES = """\
exit codes:
  0    every trajectory ended in an outcome other than failed or rejected
  1    some trajectories failed or were rejected
  2    bad usage, configuration, prompts or tools; nothing was started
  3    an engine did not start or was lost
  4    the results could not be saved; what was written as trajectories ended is kept
  130  interrupted (Ctrl-C); 143: terminated. What had been started is saved, and --resume
       continues it
"""

EXAMPLES = """\
examples:
  rollout demo
  rollout check conf/quickstart.py
  rollout run conf/quickstart.py --prompts prompts.jsonl --out results
  rollout report results
  rollout run config.toml --prompts train.parquet --out results --samples 8 \\
      --tools my_tools.py --reward my_rewards.py:score --set sampling.temperature=0.7
  rollout replay results --trajectory prompt-3/0 --tools my_tools.py
"""

PROMPTS_HELP = """\
prompts file: JSONL (one object a line) or parquet, with these columns:
  prompt or messages   a string (prompt only), or a list of {"role": …, "content": …}
  agent_name           the agent loop; default: agent.name of the configuration
  data_source          where the prompt comes from
  reward_model         {"ground_truth": …}; or a column ground_truth
  extra_info           an object for tools and rewards; tools_kwargs and interaction_kwargs in it
                       reach tools and simulated users
  uid, sampling, tools, tools_kwargs   as in rollout.Prompt
Other columns reach agents, tools and rewards as the prompt's extra.
"""


def make_parser() -> argparse.ArgumentParser:
    """What reads the command line of every command."""
    parser = argparse.ArgumentParser(
        prog="rollout",
        description="Token-exact training data for agentic reinforcement learning.",
        epilog=f"{EXAMPLES}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rollout {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_demo(commands)
    _add_report(commands)
    _add_check(commands)
    _add_check_template(commands)
    _add_serve_gateway(commands)
    _add_timeline(commands)
    _add_replay(commands)
    return parser


def _add_run(commands: Commands) -> None:
    parser = _add_command(
        commands,
        "run",
        "run a batch of prompts and save the results",
        f"{PROMPTS_HELP}\n{EXIT_CODES}",
    )
    _add_config(parser)
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        help="JSONL or parquet; or a directory of Harbor tasks, whose tests are the reward where "
        "--reward names none, and whose sandboxes sandbox.provider makes",
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="directory for the results; made if missing"
    )
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--overwrite", action="store_true", help="DIR need not be empty")
    kept.add_argument(
        "--resume",
        action="store_true",
        help="continue the run that left its journal in DIR: what it finished is kept, the rest "
        "resumes from its last whole turn; begins one where DIR has none",
    )
    parser.add_argument(
        "--samples", type=positive, metavar="N", help="trajectories for each prompt"
    )
    parser.add_argument("--step", type=step_number, metavar="N", help="part of every seed")
    parser.add_argument(
        "--validate", action="store_true", help="sample as validation_sampling says"
    )
    _add_code(parser)
    _add_engine_options(parser)


def _add_demo(commands: Commands) -> None:
    parser = _add_command(
        commands,
        "demo",
        "solve sums with a calculator, on the embedded model",
        EXIT_CODES,
    )
    parser.add_argument(
        "--prompts", type=positive, default=8, metavar="N", help="sums to solve (8)"
    )
    parser.add_argument(
        "--samples", type=positive, default=4, metavar="M", help="trajectories for each sum (4)"
    )
    parser.add_argument("--seed", type=natural, default=0, help="of tasks and sampling (0)")
    parser.add_argument(
        "--out", metavar="DIR", help="directory for the results (rollout-output/demo)"
    )
    parser.add_argument("--overwrite", action="store_true", help="DIR need not be empty")
    _add_engine_options(parser)


def _add_report(commands: Commands) -> None:
    parser = _add_command(
        commands,
        "report",
        "write one HTML page that shows what happened in a run",
        "exit codes:\n  0    the page is written\n"
        "  1    the directory holds no run, or a file cannot be read or written\n"
        "  2    bad usage\n"
        "  130  interrupted (Ctrl-C) while it followed a run; the last page stays\n",
    )
    parser.add_argument("directory", metavar="DIR", help="what `rollout run --out` was given")
    parser.add_argument("--out", metavar="FILE", help="the page (DIR/report.html)")
    parser.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="whose texts the tokens have: directory, hub name, or embedded:smollm2-135m-instruct "
        "(the model of the run)",
    )
    parser.add_argument(
        "--follow", action="store_true", help="write it again while the run grows, until its end"
    )
    parser.add_argument(
        "--every", type=seconds, default=5.0, metavar="S", help="seconds between two pages (5)"
    )
    _add_verbose(parser)


def _add_check(commands: Commands) -> None:
    parser = _add_command(
        commands,
        "check",
        "explain a configuration, and what is missing for it; starts nothing",
        "exit codes:\n  0    it can run here\n  2    it cannot; standard error says why\n",
    )
    _add_config(parser)
    _add_code(parser)
    _add_common(parser)


def _add_check_template(commands: Commands) -> None:
    parser = _add_command(
        commands,
        "check-template",
        "show what a model's chat template does at each boundary of a conversation",
        "exit codes:\n  0    every conversation can be continued append-only\n"
        "  1    some cannot; the table says why\n"
        "  2    the tokenizer or template cannot be loaded\n",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="directory, hub name, or embedded:smollm2-135m-instruct"
    )
    parser.add_argument("--revision", metavar="NAME", help="of a hub model")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="Jinja file in place of the model's own template"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="let code of the model's repository run"
    )
    _add_verbose(parser)


def _add_serve_gateway(commands: Commands) -> None:
    parser = _add_command(
        commands,
        "serve-gateway",
        "serve trajectories to agents and trainers in other processes",
        "The token of trainers is that of the environment variable ROLLOUT_GATEWAY_TOKEN;\n"
        "where it is not set, one is made and printed.\n\n"
        "exit codes:\n  0    ended by Ctrl-C or SIGTERM\n"
        "  2    bad usage or configuration\n"
        "  3    an engine did not start or was lost\n",
    )
    _add_config(parser)
    _add_engine_options(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="append to the journal that exists at journal.path; begins one where there is none",
    )


def _add_timeline(commands: Commands) -> None:
    parser = _add_command(
        commands,
        "timeline",
        "write where a run's time went, for Perfetto, Chrome or speedscope",
        "exit codes:\n  0    it is written\n"
        "  1    there are no events to be read, or the file cannot be written\n",
    )
    parser.add_argument("directory", metavar="DIR", help="results of `rollout run`")
    parser.add_argument(
        "--out", metavar="FILE", help="the Chrome trace to write (DIR/timeline.json)"
    )
    _add_verbose(parser)


def _add_replay(commands: Commands) -> None:
    parser = _add_command(
        commands,
        "replay",
        "run a recorded trajectory again through its agent, and say where it departs",
        "The model's tokens and the answers of tools come from the journal: no engine starts, no\n"
        "tool runs, and no limit of time holds, so that the agent's code may stop in a debugger\n"
        "(breakpoint() in it, or python -m pdb -m rollout replay …).\n\n"
        "exit codes:\n  0    it did as recorded\n"
        "  1    it departed from the record, at the step that is named\n"
        "  2    bad usage, or there is no such record\n",
    )
    parser.add_argument("directory", metavar="DIR", help="--out of the run, or its journal")
    parser.add_argument("--trajectory", required=True, metavar="UID/MEMBER", help="which one")
    parser.add_argument(
        "--step", type=step_number, metavar="N", help="where it is in several steps"
    )
    parser.add_argument(
        "--call",
        type=step_number,
        metavar="N",
        help="where several calls of its step had its uid: so many before it did",
    )
    parser.add_argument(
        "--validate", action="store_true", help="that of a validation, where there is another one"
    )
    parser.add_argument(
        "--tools",
        action="append",
        default=[],
        metavar="FILE.py",
        help="as --agents: its tools do not run",
    )
    _add_agents(parser)
    parser.add_argument(
        "--config", metavar="CONFIG", help="of the run, where that registers the agent"
    )
    parser.add_argument(
        "--backend", choices=("trio", "asyncio"), default="trio", help="event loop (trio)"
    )
    _add_verbose(parser)


def _add_command(commands: Commands, name: str, what: str, epilog: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", metavar="CONFIG", help=".py, .toml or .yaml file, or the name of a module"
    )


def _add_code(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tools",
        action="append",
        default=[],
        metavar="FILE.py",
        help="Python file with tools (@rollout.function_tool functions, Tool objects); agents and "
        "interactions that it defines are known too. Or a shipped tool, such as finish. Several "
        "with commas between them, python,finish,my_tools.py; may be repeated",
    )
    _add_agents(parser)
    parser.add_argument(
        "--reward",
        metavar="REF",
        help="path.py:function or package.module:function, called with each trajectory, or with "
        "data_source, solution_str, ground_truth and extra_info, as verl does",
    )
    parser.add_argument(
        "--group-reward",
        metavar="REF",
        help="path.py:function or package.module:function, called with each rollout.Group once its "
        "members have ended",
    )


def _add_agents(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--agents",
        action="append",
        default=[],
        metavar="FILE.py",
        help="Python file, or package.module, that registers agents (@rollout.agent, "
        "@rollout.register_agent); interactions that it defines are known too. May be repeated",
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", choices=("trio", "asyncio"), default="trio", help="event loop (trio)"
    )
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="PATH=VALUE",
        help="override, such as sampling.temperature=0.7; may be repeated",
    )
    _add_verbose(parser)


def _add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show what the library and its engines log"
    )
