"""A Python session in a sandbox, which needs nothing but ``exec`` from outside: one cell a command.

Started in an empty directory, with it and the working directory as arguments, it detaches itself,
and makes there two FIFOs and `pid`.
For a cell, a command writes the code to `cell` and a byte into the FIFO `go`, reads a line from the
FIFO `done`, and finds in `answer` a line ``OK SIZE`` (1 or 0; bytes that were printed) and then the
first `CAP` bytes. Where the session ends, `done` ends too. It runs on Python 3.8.
"""

from __future__ import annotations

import ast
import io
import linecache
import os
import sys
import traceback
import types
from contextlib import suppress
from functools import partial

TYPE_CHECKING = False  # importing typing takes as long as the rest
if TYPE_CHECKING:
    from typing import Any

CAP = 65536


class Output(io.FileIO):
    """Standard output or error, without what exceeds the cap: prints without end fill no disk.

    Child processes, which write to the file itself, are not bounded.
    """

    def write(self, data: Any) -> int:
        if os.fstat(self.fileno()).st_size > CAP:
            return len(data)
        return super().write(data)


def open_stream(descriptor: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(Output(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", errors="replace", line_buffering=True)


def run_cell(code: str, name: str, space: dict[str, Any]) -> bool:
    """Run a cell and print the value of a last expression; whether it raised nothing."""
    linecache.cache[name] = len(code), None, code.splitlines(True), name
    compile_part = partial(compile, filename=name, dont_inherit=True)
    try:
        tree: Any = compile_part(code, mode="exec", flags=ast.PyCF_ONLY_AST)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile_part(tree, mode="exec"), space)
        if last is not None:
            value = eval(compile_part(ast.Expression(last.value), mode="eval"), space)
            if value is not None:
                print(repr(value))
    except SystemExit as error:
        if error.code is None or error.code == 0:
            return True
        print(error.code if isinstance(error.code, str) else f"SystemExit: {error.code}")
    except BaseException as error:
        where = error.__traceback__
        traceback.print_exception(type(error), error, where and where.tb_next)
    else:
        return True
    return False


def serve(directory: str, out: int, go: int, done: int) -> None:
    """Run cells for ever, as the main module that they believe to be."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    me, number = os.getpid(), 0
    while True:
        os.read(go, 1)
        with open(directory + "/cell", encoding="utf-8", newline="") as file:
            code = file.read()
        number += 1
        sys.stdout, sys.stderr = open_stream(1), open_stream(2)
        is_ok = run_cell(code, f"<call {number}>", main.__dict__)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the code may have put anything there
                stream.flush()
        if os.getpid() != me:  # a forked child reached the end: only the parent answers
            os._exit(0)
        with open(directory + "/answer", "wb") as answer:
            answer.write(b"%d %d\n" % (is_ok, os.fstat(out).st_size) + os.pread(out, CAP, 0))
        os.ftruncate(out, 0)
        os.write(done, b"\n")


directory, workdir = sys.argv[1:]
for name in ("go", "done"):
    os.mkfifo(f"{directory}/{name}", 0o600)
# Opened in both directions, which waits for nobody.
fifos = [os.open(f"{directory}/{name}", os.O_RDWR) for name in ("go", "done")]
out = os.open(directory + "/out", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
pid = os.fork()
if pid:  # once the session can be spoken to
    with open(directory + "/pid", "w", encoding="ascii") as file:
        file.write(str(pid))
    os._exit(0)
os.setsid()
for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), out, out)):
    os.dup2(descriptor, number)
for each in fifos:  # which end with the session, whatever its children do
    os.register_at_fork(after_in_child=partial(os.close, each))
os.chdir(workdir)
sys.argv = [""]
serve(directory, out, *fifos)
