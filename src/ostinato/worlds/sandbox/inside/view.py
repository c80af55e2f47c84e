"""What programs see of a machine in any sandbox."""

from __future__ import annotations

import os
from collections.abc import Iterator

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
"""Directories with the system's programs and libraries, or links to such."""
ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/tmp:/bin/bash\n",
    "group": "root:x:0:\nuser:x:1000:\n",
    "hosts": "127.0.0.1 localhost workspace\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
SHOWN = ("alternatives", "ld.so.cache", "ssl/certs", "localtime", "mime.types")
"""Entries of the host's /etc that are shown if they exist."""


def python_parts(prefix: str, version: str) -> tuple[str, str]:
    """The interpreter's program, and its standard library with the shared libraries beside it if there are any, as paths below `prefix`."""
    linked = any(name.startswith("lib") and ".so" in name for name in os.listdir(f"{prefix}/lib"))
    return f"bin/python{version}", "lib" if linked else f"lib/python{version}"


def masks(prefix: str, version: str) -> Iterator[str]:
    """Directories that may hold packages of the host, to be hidden."""
    yield f"{prefix}/lib/python{version}/site-packages"
    yield "/usr/lib/python3/dist-packages"
    yield f"/usr/lib/python{version}/dist-packages"
    yield f"/usr/local/lib/python{version}/dist-packages"
