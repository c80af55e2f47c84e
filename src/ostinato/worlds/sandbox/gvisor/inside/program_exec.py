"""Turns a fork of pid 1 into a program (descriptors, group, limits, no privileges), or into a process with a program's file rights."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
from dataclasses import dataclass
from typing import NoReturn

from cgroups import ProcessGroup
from kernel import call
from rootfs import SandboxSettings

PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_FILTER = 24, 38, 22, 2
CAPABILITIES_VERSION = 0x20080522


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRequest:
    """A program as requested. An empty `cwd` means the workspace."""

    argv: list[bytes]
    env: dict[bytes, bytes]
    cwd: bytes
    stdin: bytes

    @classmethod
    def read(cls, data: bytes, text: int, count: int) -> ProgramRequest:
        """Parse the output of `pack_program` in ../../starting.py: `text` bytes and its number `count`. The program's input follows."""
        arguments, variables = count & 0xFFFF, count >> 16
        texts = data[:text].split(b"\0")
        pairs = (each.partition(b"=") for each in texts[1 + arguments : 1 + arguments + variables])
        return cls(
            argv=texts[1 : 1 + arguments],
            env={name: value for name, _, value in pairs},
            cwd=texts[0],
            stdin=data[text:],
        )


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def _complain(name: bytes, error: OSError) -> NoReturn:
    os.write(2, name[:400] + b": " + (error.strerror or "").encode() + b"\n")
    os._exit(126 if error.errno in (errno.EACCES, errno.ENOEXEC) else 127)


def _limit(settings: SandboxSettings) -> None:
    for what, most in (
        # per user, so for all programs together; their first process counts as pid 1's
        (
            resource.RLIMIT_NPROC,
            settings.processes - 1,
        ),
        (resource.RLIMIT_NOFILE, settings.open_files),
        (resource.RLIMIT_FSIZE, settings.disk),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def _give_up_capabilities() -> None:
    header, none = (ctypes.c_uint32 * 2)(CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)()
    call("capset", header, none)


def act_as_owner(settings: SandboxSettings) -> None:
    """Leave this fork only the programs' rights to files. Its real and saved uid stay pid 1's, so that no program can kill it."""
    own = os.getuid()
    os.umask(0o022)
    os.setgroups([])
    os.setresgid(settings.owner, settings.owner, settings.owner)
    os.setresuid(own, settings.owner, own)
    _give_up_capabilities()


def _give_up_rights(settings: SandboxSettings) -> None:
    for capability in range(64):
        try:
            call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
        except OSError:
            break  # the first capability that the kernel does not know
    os.setgroups([])
    os.setresgid(settings.owner, settings.owner, settings.owner)
    os.setresuid(settings.owner, settings.owner, settings.owner)
    _give_up_capabilities()
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if not settings.filter:
        return
    code = ctypes.create_string_buffer(settings.filter, len(settings.filter))
    program = _Program(len(settings.filter) // 8, ctypes.addressof(code))
    call("prctl", PR_SET_SECCOMP, SECCOMP_FILTER, ctypes.byref(program), 0, 0)


def _execute(wanted: ProgramRequest) -> NoReturn:
    """Execute the program, found as a shell finds it."""
    name, found = wanted.argv[0], FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    places = [b""] if b"/" in name else wanted.env.get(b"PATH", b"/usr/bin:/bin").split(b":")
    for place in places:
        try:
            os.execve(place + b"/" + name if place else name, wanted.argv, wanted.env)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                found = error
    _complain(name, found)


def become(
    wanted: ProgramRequest, settings: SandboxSettings, group: ProcessGroup, outputs: tuple[int, int]
) -> NoReturn:
    """Become the program. Never returns."""
    name = b"isolate the program"
    try:
        os.setpgid(0, 0)
        group.join()
        given = os.open("/dev/null", os.O_RDONLY)
        if wanted.stdin:
            given = os.memfd_create("input")
            os.write(given, wanted.stdin)
            os.lseek(given, 0, os.SEEK_SET)
        for place, fd in enumerate((given, *outputs)):
            os.dup2(fd, place)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.umask(0o022)
        _limit(settings)
        _give_up_rights(settings)
        name = wanted.cwd or os.fsencode(settings.workdir)
        os.chdir(os.path.join(os.fsencode(settings.workdir), wanted.cwd))
        _execute(wanted)
    except OSError as error:
        _complain(name, error)
    finally:
        os._exit(126)
