"""The compiled part of the sandbox: C sources of this package, built once per machine and user and kept in the user's cache."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ostinato.core.errors import BadConfig, SandboxRefused
from ostinato.core.places import cache_directory
from ostinato.worlds.sandbox.filter.bpf import ARCHITECTURES, compile_filter
from ostinato.worlds.sandbox.filter.calls import NAMES

_SOURCES = Path(__file__).with_name("native")
_FLAGS = (
    "-std=gnu11",
    "-O2",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-fstack-protector-strong",
    "-Wl,-z,relro,-z,now",
)
_COMPILER = (
    "the sandbox's launcher is compiled at first use, and there is no C compiler here ('cc' is not on the PATH). To get one: "
    "apt-get install gcc libc6-dev (Debian, Ubuntu), dnf install gcc (Fedora), apk add gcc musl-dev linux-headers (Alpine); or set CC."
)


def _numbers_source() -> str:
    """C source for looking up system call numbers on the machine it is compiled for."""
    rows = "".join(f'#ifdef SYS_{name}\n{{"{name}", SYS_{name}}},\n#endif\n' for name in NAMES)
    head = "#include <string.h>\n#include <sys/syscall.h>\nstatic const struct { const char *name; int number; } calls[] = {\n"
    body = (
        '__attribute__((visibility("default")))\nint call_number(const char *name) {\n'
        "for (unsigned i = 0; i < sizeof calls / sizeof *calls; i++)\n"
    )
    return f"{head}{rows}}};\n{body}if (!strcmp(calls[i].name, name)) return calls[i].number;\nreturn -1;\n}}\n"


@functools.cache
def build() -> Path:
    """The launcher as a shared object. Raises SandboxRefused as `compiled` does."""
    sources = sorted(path for path in _SOURCES.iterdir() if path.suffix in (".c", ".h"))
    return compiled("launcher", {path.name: path.read_text() for path in sources} | {"numbers.c": _numbers_source()})


def compiled(name: str, sources: Mapping[str, str]) -> Path:
    """Compile C sources (file name -> text) to a shared object, unless this user has compiled the same sources here before.

    Raises SandboxRefused if there is no compiler or no place for the result, or if the sources do not compile.
    """
    digest = hashlib.sha256(" ".join((*_FLAGS, platform.machine(), platform.libc_ver()[1])).encode())
    for file, text in sources.items():
        digest.update(f"{file}\0{text}\0".encode())
    try:
        cache = cache_directory()
    except BadConfig as error:
        raise SandboxRefused(f"the sandbox's compiled launcher has no place: {error}") from error
    target = cache / f"{name}-{digest.hexdigest()[:32]}.so"
    with contextlib.suppress(FileNotFoundError):
        seen = target.lstat()
        if stat.S_ISREG(seen.st_mode) and seen.st_uid == os.getuid() and not seen.st_mode & 0o022:
            return target
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise SandboxRefused(_COMPILER)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / f"{name}.so"
        for file, text in sources.items():
            (Path(scratch) / file).write_text(text)
        files = [file for file in sources if file.endswith(".c")]
        command = [compiler, *_FLAGS, *files, "-o", str(made)]
        # the compiler looks for its linker there
        environment = {
            **os.environ,
            "PATH": os.environ.get("PATH") or os.defpath,
        }
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=scratch, env=environment)
        if result.returncode:
            raise SandboxRefused(f"the sandbox's {name} does not compile with {compiler}: {result.stderr[-1500:]}")
        made.chmod(0o700)
        os.replace(made, target)
    return target


@functools.cache
def system_call_filter() -> bytes:
    """The compiled allow-list for this machine. Raises SandboxRefused for an architecture that it does not know."""
    machine = {"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine().lower(), platform.machine())
    if machine not in ARCHITECTURES:
        raise SandboxRefused(f"system calls cannot be filtered on {machine}; known: {', '.join(ARCHITECTURES)}")
    library = ctypes.CDLL(str(build()))
    found = {name: int(library.call_number(name.encode())) for name in NAMES}
    return compile_filter({name: number for name, number in found.items() if number >= 0}, machine)
