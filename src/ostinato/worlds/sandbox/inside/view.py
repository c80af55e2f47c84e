"""What programs see of a machine in any sandbox, as plain data."""

from __future__ import annotations

from collections.abc import Iterator

ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/tmp:/bin/bash\n",
    "group": "root:x:0:\nuser:x:1000:\n",
    "hosts": "127.0.0.1 localhost workspace\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
SHOWN = ("alternatives", "ld.so.cache", "ssl/certs", "localtime", "mime.types")
"""Entries of the host's /etc that are shown if they exist."""


def masks(prefix: str, version: str) -> Iterator[str]:
    """Directories that may hold packages of the host, to be hidden."""
    yield f"{prefix}/lib/python{version}/site-packages"
    yield "/usr/lib/python3/dist-packages"
    yield f"/usr/lib/python{version}/dist-packages"
    yield f"/usr/local/lib/python{version}/dist-packages"
