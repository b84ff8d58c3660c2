"""An interpreter that runs one piece of code after another and keeps its variables."""

from __future__ import annotations

import ast
import builtins
import json
import linecache
import os
import sys
import traceback
import types
from typing import Any

from .settings import read_frame


def serve(requests: int, status: int) -> None:
    """Run each piece of code that arrives; answers one byte after it.

    1 for a success, 0 for a failure, 2 where the code has broken the interpreter, which ends then.
    """
    _forget_host()
    _take_streams()
    namespace = _fresh_main()
    number, own = 0, os.getpid()
    while (frame := read_frame(requests)) is not None:
        number += 1
        is_ok = _run(json.loads(frame)["code"], f"<call {number}>", namespace)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):  # replaced or closed by the code
                continue
        if os.getpid() != own:  # a fork that ran to the end of the code: the answer is not its
            os._exit(0)
        if _is_broken():
            os.write(status, b"\2")
            break
        os.write(status, b"\1" if is_ok else b"\0")
    os._exit(0)


def _is_broken() -> bool:
    """Whether Python has lost modules that it looks up by itself: ``sys.modules.clear()``."""
    return any(sys.modules.get(module.__name__) is not module for module in (builtins, sys))


def _run(code: str, name: str, namespace: dict[str, Any]) -> bool:
    """Execute code as a notebook does: the value of a last expression is shown."""
    try:
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        # What ast.parse does, without a frame of its own in the traceback.
        tree = compile(code, name, "exec", ast.PyCF_ONLY_AST)
        assert isinstance(tree, ast.Module)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
            shown = compile(ast.Interactive([last]), name, "single")
            exec(compile(tree, name, "exec"), namespace)
            exec(shown, namespace)
        else:
            exec(compile(tree, name, "exec"), namespace)
    except SystemExit as leaving:
        return _is_success(leaving.code)
    except BaseException as error:
        _show(error)
        return False
    return True


def _is_success(code: object) -> bool:
    if code is None or code == 0:
        return True
    print(f"SystemExit: {code}" if isinstance(code, int) else code, file=sys.stderr)
    return False


def _show(error: BaseException) -> None:
    """Print a traceback without the frames of this module."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    try:
        traceback.print_exception(type(error), error, frame)
    except BaseException:  # no memory left, or an exception that cannot be printed
        os.write(2, f"{type(error).__name__}\n".encode())


def _fresh_main() -> dict[str, Any]:
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    namespace: dict[str, Any] = vars(main)
    return namespace


def _forget_host() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rollout_sandbox"]:
        del sys.modules[name]
    sys.path.insert(0, "")


def _take_streams() -> None:
    """Text streams over the new descriptors; the parent's may hold what it had buffered."""
    # Open as long as the process is.
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    # Lines leave at once: a call that is stopped has shown what it had printed.
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
