"""Coding agents as `ProgramAgent`s: what each is started with, so that it finds the gateway.

Register what they return: ``register_agent("coder")(rollout.programs.claude_code())``. The programs
are installed in the sandbox's image, or lie in a directory that it can read. Each answers the
prompt's last message without asking anybody, and may run any command: the sandbox bounds it.

All take the program's name or path in the sandbox, further `arguments` of its command line,
variables of `env` beside or in place of the preset's, and the other arguments of `ProgramAgent`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.agents.program_agent import ProgramAgent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["claude_code", "codex", "mini_swe_agent"]


def claude_code(
    executable: str = "claude",
    *,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> ProgramAgent:
    """Claude Code, which speaks Anthropic's messages.

    It asks for no titles; its sub-agents have rows of purpose `subagent`.
    """
    command = [executable, "--dangerously-skip-permissions", *arguments, "-p", "--", "{prompt}"]
    variables = {
        "ANTHROPIC_MODEL": "{model}",
        "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
        # It refuses to skip permissions as root elsewhere.
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return ProgramAgent(command, variables | dict(env or {}), **options)


def codex(
    executable: str = "codex",
    *,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> ProgramAgent:
    """Codex, which speaks OpenAI's responses; `arguments` are those of ``codex exec``."""
    provider = "model_providers.gateway"
    settings = {
        "model_provider": '"gateway"',
        f"{provider}.name": '"gateway"',
        f"{provider}.base_url": '"{base_url}"',
        f"{provider}.env_key": '"OPENAI_API_KEY"',
    }
    command = [
        executable,
        "exec",
        *(part for name, value in settings.items() for part in ("-c", f"{name}={value}")),
        *("-m", "{model}", "--skip-git-repo-check"),
        "--dangerously-bypass-approvals-and-sandbox",
        *(*arguments, "--", "{prompt}"),
    ]
    return ProgramAgent(command, env, **options)


def mini_swe_agent(
    executable: str = "mini",
    *,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> ProgramAgent:
    """mini-swe-agent, which speaks OpenAI's chat completions, through LiteLLM."""
    command = [executable, "-y", "--exit-immediately", "-l", "0", "-m", "openai/{model}"]
    variables = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",  # no list of prices has the model
        "MSWEA_GLOBAL_CONFIG_DIR": ".mini-swe-agent",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_API_BASE": "{base_url}",
    }
    command += [*arguments, "-t", "{prompt}"]
    return ProgramAgent(command, variables | dict(env or {}), **options)
