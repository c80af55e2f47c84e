"""Paths of the host that programs can see in a sandbox of any backend."""

from __future__ import annotations

import os
from collections.abc import Iterator

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
"""Directories (or links to directories) with the system's programs and libraries."""
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/tmp:/bin/bash\n",
    "group": "root:x:0:\nuser:x:1000:\n",
    "hosts": "127.0.0.1 localhost workspace\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
SHOWN = ("alternatives", "ld.so.cache", "ssl/certs", "localtime", "mime.types")
"""Entries of the host's /etc that are visible if they exist."""


def python_parts(prefix: str, version: str) -> tuple[str, str]:
    """Return paths below `prefix`: the interpreter, and its standard library with any shared libraries beside it."""
    linked = any(name.startswith("lib") and ".so" in name for name in os.listdir(f"{prefix}/lib"))
    return f"bin/python{version}", "lib" if linked else f"lib/python{version}"


def masks(prefix: str, version: str) -> Iterator[str]:
    """Yield directories that may contain the host's packages and must be hidden."""
    yield f"{prefix}/lib/python{version}/site-packages"
    yield "/usr/lib/python3/dist-packages"
    yield f"/usr/lib/python{version}/dist-packages"
    yield f"/usr/local/lib/python{version}/dist-packages"
