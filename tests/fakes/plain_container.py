"""Runs a command under the system call filter of a plain container: no new namespaces, no mounts, as Docker's default profile has it.

    python tests/fakes/plain_container.py ostinato doctor

Needs no rights. The filter holds for the command and all of its children, and cannot be taken off.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

CALLS = {  # what the default profile refuses a process without CAP_SYS_ADMIN
    "x86_64": {
        "mount": 165,
        "umount2": 166,
        "pivot_root": 155,
        "unshare": 272,
        "setns": 308,
        "clone": 56,
        "clone3": 435,
    },
    "aarch64": {"mount": 40, "umount2": 39, "pivot_root": 41, "unshare": 97, "setns": 268, "clone": 220, "clone3": 435},
}
NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* flag of clone
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_FIRST_ARGUMENT = 16  # its offset in struct seccomp_data; the call's number lies at 0


def program(machine: str) -> bytes:
    """The filter as an array of BPF instructions."""
    calls = dict(CALLS[machine])
    clone, clone3 = calls.pop("clone"), calls.pop("clone3")
    lines = [(_LOAD, 0, 0, 0)]
    for number in calls.values():
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | errno.EPERM)]
    lines += [
        (_EQUAL, 0, 1, clone3),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
    ]  # its flags lie in memory: callers then use clone
    lines += [
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, NEW_NAMESPACES),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def enclose() -> None:
    """Put the filter on this process. Raises OSError where the kernel has no such filters."""

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_char_p)]

    lines = program(platform.machine())
    libc = ctypes.CDLL(None, use_errno=True)
    wanted = Filter(len(lines) // 8, lines)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(wanted), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "this kernel takes no system call filter")


if __name__ == "__main__":
    enclose()
    os.execvp(sys.argv[1], sys.argv[1:])
