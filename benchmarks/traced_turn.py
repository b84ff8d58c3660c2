"""Counts what one turn of a native agent enters and makes, in the driver's process.

    python benchmarks/traced_turn.py [--list]

From the call of `AgentContext.generate` until it has returned: modules of ours that are entered,
calls of functions of ours, objects of classes of ours that are made. The engine is a process of its
own, so that only the driver's side is counted; nothing else runs meanwhile.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib.machinery
import sys
from collections import Counter
from typing import Any

COPIES = ("replace", "evolve", "copy", "_replace")
#: Runs beside the turn, each few milliseconds.
BESIDE = "rollout.observe.loop_lag"

made: Counter[str] = Counter()
entered: Counter[str] = Counter()


def note_call(called: Any) -> Any:
    """Count the object that a call makes, if it is one of ours."""
    if sys.getprofile() is note_event:
        if isinstance(called, type) and called.__module__.startswith("rollout."):
            made[called.__qualname__] += called.__module__ != BESIDE
        elif getattr(called, "__name__", "") in COPIES:
            made[called.__name__] += 1
    return called


class _Counting(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = ast.Name("__note_call__", ast.Load())
        if not (isinstance(node.func, ast.Name) and node.func.id == "super"):
            node.func = ast.Call(name, [node.func], [])
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        tree = _Counting().visit(ast.parse(self.get_data(path)))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


def note_event(frame: Any, event: str, _arg: Any) -> None:
    """Count the functions that are entered."""
    home = frame.f_globals.get("__name__", "")
    if event == "call" and home.startswith("rollout.") and home != BESIDE:
        entered[home] += 1


class _Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        spec = None
        if fullname.partition(".")[0] == "rollout":
            spec = super().find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


async def trace() -> None:
    """Let an agent generate two turns, and count the second."""
    import rollout
    from rollout.config import AgentConfig, LocalProcessPlacement
    from rollout.testing import Scenario

    @rollout.register_agent("traced")
    class _Traced(rollout.AgentLoop):
        async def run(self, context: rollout.AgentContext) -> None:
            await context.generate()
            context.observe([rollout.Message(role="user", content="And?")])
            sys.setprofile(note_event)
            await context.generate()
            sys.setprofile(None)

    config = (
        Scenario(seed=1)
        .reply("go", "First.")
        .then("Second.")
        .config(agent=AgentConfig(name="traced"), placement=LocalProcessPlacement())
    )
    prompt = rollout.Prompt(messages=[rollout.Message(role="user", content="go")])
    async with rollout.open_rollout(config) as runtime:
        (trajectory,) = (await runtime.generate([prompt])).trajectories
    assert trajectory.transcript.turns == 2, trajectory.cause


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the modules and the objects")
    is_listed = parser.parse_args().list
    builtins.__note_call__ = note_call  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder)
    import trio

    trio.run(trace)
    print(f"modules {len(entered)}, calls {entered.total()}, objects {made.total()}")
    for title, counts in (("modules", entered), ("objects", made)) if is_listed else ():
        print(
            f"{title}:",
            *(f"  {count:3} {name}" for name, count in sorted(counts.items())),
            sep="\n",
        )


if __name__ == "__main__":
    main()
