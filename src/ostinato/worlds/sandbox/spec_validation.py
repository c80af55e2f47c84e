"""Validates a sandbox's spec and packs it into the message that starts a box.

Also searches directories that will be visible in a sandbox for files and sockets that programs must not reach.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from ostinato.core.errors import BadRequest, NotFound, StorageFull
from ostinato.core.sandbox import Limits, SandboxSpec
from ostinato.worlds.sandbox.protocol import FILE, START, StartFlag

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
}
MAX_MOUNTS = 16
_HOST = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
RESERVED_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/dev", "/proc", "/sys", "/etc", "/tmp")


def check_names(names: Mapping[str, bytes]) -> None:
    """Raise BadRequest unless every name is a plain path below the working directory."""
    for name in names:
        path = PurePosixPath(name)
        outside = not name or path.is_absolute() or ".." in path.parts
        if outside or name.endswith("/") or "\0" in name or len(name) > 4000:
            raise BadRequest(f"files: {name!r} must be a relative path without '..'", field="files")


def check_spec(spec: SandboxSpec) -> None:
    """Raise BadRequest, which names the field, for an invalid spec."""
    check_names(spec.files)
    if not _is_free(spec.workdir, ()):
        raise BadRequest(
            f"workdir: {spec.workdir!r} must be an absolute path outside of {', '.join(RESERVED_PATHS)} and the interpreter's own place, "
            "such as '/work'",
            field="workdir",
        )
    _check_mounts(spec.mounts, spec.workdir)
    check_environment(spec.env)
    for host in spec.hosts:
        found = _HOST.fullmatch(host)
        if found is None or not 0 < int(found[2]) < 65536:
            raise BadRequest(f"hosts: {host!r} must be 'name:port', such as 'pypi.org:443'", field="hosts")
    for layer in spec.layers:
        if not os.path.isabs(layer):
            raise BadRequest("layers: must be absolute paths of directories", field="layers")
    check_directories(spec)


def check_directories(spec: SandboxSpec) -> None:
    """Raise BadRequest, which names the field, unless all layers and mounts are directories."""
    for field, sources in (("layers", spec.layers), ("mounts", spec.mounts.values())):
        for source in sources:
            check_directory(field, source)


def check_directory(field: str, path: str) -> None:
    """Raise BadRequest, which names the field, unless `path` is a directory."""
    if not os.path.isdir(path):
        raise BadRequest(f"{field}: {path!r} is not a directory", field=field)


def _check_mounts(mounts: Mapping[str, str], workdir: str) -> None:
    """Raise BadRequest for a mount that would hide files programs need, overlaps another, or has no absolute source."""
    if len(mounts) > MAX_MOUNTS:
        raise BadRequest(f"mounts: {len(mounts)} of them, at most {MAX_MOUNTS}", field="mounts")
    for place, source in mounts.items():
        others = [other for other in mounts if other != place]
        if not _is_free(place, (workdir, *others)):
            raise BadRequest(
                f"mounts: {place!r} must be an absolute path apart from {workdir}, the other mounts, {', '.join(RESERVED_PATHS)} and the "
                "interpreter's own place, such as '/opt/agent'",
                field="mounts",
            )
        if not os.path.isabs(source):
            raise BadRequest(f"mounts: {source!r} must be the absolute path of a directory", field="mounts")


def _is_free(path: str, others: Sequence[str]) -> bool:
    """Return True for a normalised absolute path outside reserved paths, and neither below nor above the interpreter and `others`."""
    plain = path.startswith("/") and path == os.path.normpath(path) and path != "/" and "\0" not in path
    below = any(f"{path}/".startswith(f"{place}/") for place in (*RESERVED_PATHS, sys.base_prefix, *others))
    above = any(f"{place}/".startswith(f"{path}/") for place in (sys.base_prefix, *others))
    return plain and not below and not above and len(path) <= 1000


def check_port(port: int) -> None:
    """Raise BadRequest for a number that is not a port."""
    if not 0 < port < 65536:
        raise BadRequest(f"port: {port} must lie in 1 to 65535", field="port")


def inside_workdir(path: str, workdir: str) -> str:
    """Return a file's path relative to the working directory. Raises BadRequest for a path outside it; links are not resolved here."""
    name = path.removeprefix(f"{workdir}/")
    parts = name.split("/")
    if not name or name.startswith("/") or ".." in parts or parts[-1] in ("", ".") or "\0" in name or len(name) > 4000:
        raise BadRequest(f"path: {path!r} must be below {workdir}, without '..'", field="path")
    return "/".join(part for part in parts if part not in ("", "."))


def check_read(path: str, error: int) -> None:
    """Raise NotFound if opening a file of the working directory failed with errno `error`; 0 is success."""
    if error in (errno.EXDEV, errno.ELOOP, errno.EACCES):
        raise NotFound(f"path: {path!r} leads out of the working directory", field="path")
    if error:
        raise NotFound(f"path: {path!r} cannot be read: {os.strerror(error)}", field="path")


def check_written(path: str, error: int, limits: Limits) -> None:
    """Raise StorageFull or BadRequest if writing a file of the working directory failed with errno `error`; 0 is success."""
    if error in (errno.ENOSPC, errno.EDQUOT):
        raise StorageFull(f"the sandbox's {limits.disk_mb} MiB do not hold {path!r} as well")
    if error:
        raise BadRequest(f"path: {path!r} cannot be written: {os.strerror(error)}", field="path")


def check_environment(variables: Mapping[str, str]) -> None:
    """Raise BadRequest for an invalid environment variable."""
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name + value:
            raise BadRequest(
                f"env: {name!r} must be a name without '=', and neither it nor its value may hold NUL", field="env"
            )


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """Pack files into one blob, which `write_files` in native/setup.c reads. Files that begin with "#!" become executable."""
    parts: list[bytes] = []
    for name, data in files.items():
        encoded = os.fsencode(name)
        mode = 0o755 if data[:2] == b"#!" else 0o644
        parts += [FILE.pack(len(encoded), mode, len(data)), encoded, b"\0", data]
    return b"".join(parts)


def pack_start(
    flags: StartFlag,
    limits: Limits,
    workdir: str,
    lowers: tuple[str, ...] = (),
    *,
    layers: int = 0,
    mounts: int = 0,
    binds: Sequence[tuple[str, str]] = (),
    address_space: int = 0,
) -> bytes:
    """Pack `struct start` of native/sandbox.h.

    The last `layers` of `lowers`, and the first text of each of `binds`, name directories of the host: "h" + the zygote's number.
    """
    head = START.pack(
        flags, max(4096, limits.disk_mb * 64), limits.processes, limits.open_files, len(lowers), layers, mounts, 0, len(binds), 0,
        limits.disk_mb << 20, limits.memory_mb << 20, address_space,
    )  # fmt: skip
    texts = (workdir, *lowers, *(text for bind in binds for text in bind))
    return head + b"".join(os.fsencode(text) + b"\0" for text in texts)


def pack_program(argv: tuple[str, ...], env: Mapping[str, str], cwd: str | None) -> tuple[int, bytes]:
    """Validate and pack a program's directory, arguments and variables. Return (arguments | variables << 16, the bytes).

    Raises BadRequest.
    """
    if cwd is not None and (".." in cwd.split("/") or "\0" in cwd):
        raise BadRequest(f"cwd: {cwd!r} must be a path inside the sandbox, without '..'", field="cwd")
    check_environment(env)
    texts = [cwd or "", *argv, *(f"{name}={value}" for name, value in env.items())]
    if not argv or any("\0" in text for text in texts):
        raise BadRequest("argv: must name a program, and hold no NUL", field="argv")
    packed = b"".join(os.fsencode(text) + b"\0" for text in texts)
    if len(packed) > 128 << 10 or len(texts) > 8000:
        raise BadRequest(
            f"argv: {len(packed)} bytes with the environment, at most {128 << 10}; put long texts into a file",
            field="argv",
        )
    return len(argv) | len(env) << 16, packed


# ---------------------------------------------------------------- host directories that programs can see


def entries(directory: str, enter: Callable[[os.DirEntry[str]], bool] = lambda _: True) -> Iterator[os.DirEntry[str]]:
    """Yield all entries below a directory that `enter` accepts. Links are not followed; directories that cannot be listed are skipped."""
    pending = [directory]
    while pending:
        try:
            with os.scandir(pending.pop()) as found:
                for entry in filter(enter, found):
                    yield entry
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except OSError:
            continue


def root_only_paths(directory: str) -> list[str]:
    """Return files below a directory that belong to root or its group and that others may not read, and such directories that others may
    not read and enter. The contents of those directories are left out, and `directory` itself is not checked.
    """
    found = list[str]()

    def is_open(entry: os.DirEntry[str]) -> bool:
        if entry.is_symlink():
            return True
        try:
            seen = entry.stat(follow_symlinks=False)
        except OSError:
            return True
        wanted = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(seen.st_mode) else 0)
        if (seen.st_uid and seen.st_gid) or seen.st_mode & wanted == wanted:
            return True
        found.append(entry.path)
        return False

    for _ in entries(directory, is_open):
        pass
    return found


def check_no_socket(directory: str) -> None:
    """Raise BadRequest for a directory that contains a socket: programs could connect to it even on a read-only mount, and may run as the
    host user who owns it.
    """
    for entry in entries(directory):
        if entry.is_symlink() or entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False):
            continue
        try:
            socket = stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
        except OSError:
            continue
        if socket:
            raise BadRequest(
                f"mounts: {directory!r} holds the socket {entry.path!r}, which programs could connect to; show a directory without it",
                field="mounts",
            )
