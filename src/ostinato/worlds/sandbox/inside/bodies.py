"""What a child of the compiled loop does in Python: run a body in the warm interpreter, or compare a workspace with its start."""

from __future__ import annotations

import ast  # noqa: F401 # pyright: ignore[reportUnusedImport] - graded programs want it: warm it up
import builtins
import contextlib
import ctypes
import json  # noqa: F401 # pyright: ignore[reportUnusedImport]
import os
import random  # noqa: F401 # pyright: ignore[reportUnusedImport]
import signal
import sys
import traceback
from typing import Any, NoReturn

from compare import write_changes


def interpret(path: str) -> int:
    """Run a Python file as ``__main__`` in this interpreter, which is warm: several times faster than starting another."""
    sys.argv = [path]
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec")
        exec(code, {"__name__": "__main__", "__builtins__": builtins})
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 - what an interpreter's own top level does
        traceback.print_exc()
        status = 1
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.flush()
    return status & 255


def texts(library: Any, name: str) -> list[str]:
    """An array of C strings that ends in NULL."""
    array = ctypes.POINTER(ctypes.c_char_p).in_dll(library, name)
    found: list[str] = []
    while (text := array[len(found)]) is not None:
        found.append(os.fsdecode(text))
    return found


def go_on(what: int, library: Any) -> NoReturn:
    """Run a body if `what` is 1, else compare the workspace, for the rest of the child's life."""
    status = 126
    try:
        if what == 1:
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.environ.clear()
            for text in texts(library, "body_environment"):
                name, _, value = text.partition("=")
                os.environ[name] = value
            for name in ("kernel", "groups", "root", "view", "bodies", "compare"):
                sys.modules.pop(name, None)
            status = interpret(texts(library, "body_arguments")[0])
        else:
            count = ctypes.c_int.in_dll(library, "body_count").value
            fds = list((ctypes.c_int * 250).in_dll(library, "body_fds"))[:count]
            write_changes(fds[0], fds[1], fds[2], fds[3:])
            status = 0
    finally:
        os._exit(status)
