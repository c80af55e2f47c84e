#!/usr/bin/env python3
"""Install torch's build for this machine into the Python that runs this, and say first what will be downloaded. `make install` calls it.

Without an NVIDIA GPU that is the CPU build from torch's own index: what PyPI has for x86 is the build for CUDA, gigabytes with its
libraries. Where the index cannot be reached, whatever pip finds by itself is taken, a wheel on disk for example.

Example::

    python deploy/install_torch.py --build auto torch==2.13.0 --constraint constraints.txt
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGES = "https://download.pytorch.org/whl/"
_SIZE_S = 10.0
_TOOL_S = 20.0
_MB = 1_000_000
_LIBRARIES_GB = 2.2  # what torch 2.13 asks for on x86 besides itself: NVIDIA's libraries for CUDA 13 and Triton


def has_gpu() -> bool:
    """Whether an NVIDIA GPU is here: its driver's files, or what its tool says."""
    if Path("/dev/nvidiactl").exists() or Path("/proc/driver/nvidia/version").exists():
        return True
    tool = shutil.which("nvidia-smi")
    try:
        return (
            tool is not None
            and subprocess.run([tool, "-L"], capture_output=True, check=False, timeout=_TOOL_S).returncode == 0
        )
    except (OSError, subprocess.TimeoutExpired):  # a broken driver can hold it for ever
        return False


def index_of(build: str, gpu: bool) -> str | None:
    """The index that a build lies in; None: where pip looks by itself.

    Args:
        build: "auto", "cpu", "cuda" (PyPI's), a build's name such as "cu129", or an index's address.
        gpu: whether an NVIDIA GPU is here, for "auto".
    """
    if build == "auto":
        build = "cuda" if gpu else "cpu"
    if build == "cuda":
        return None
    return build if "://" in build else PAGES + build


def places(index: str | None) -> list[str]:
    """The words for pip of an index beside its own: a build's version, such as 2.13.0+cpu, is newer than the plain one."""
    return [] if index is None else ["--extra-index-url", index]


def found(requirement: str, index: str | None, words: Sequence[str]) -> dict[str, Any] | None:
    """What pip would install for torch itself, as its report says; None: nothing, since it is there. Raises CalledProcessError."""
    quick = ["--retries", "0", "--timeout", "10"]  # an index that cannot be reached is passed over
    asked = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--report", "-"]
    done = subprocess.run(
        [*asked, *quick, *places(index), *words, requirement], capture_output=True, text=True, check=True
    )
    new = json.loads(done.stdout)["install"]
    return new[0] if new else None


def asks_for_cuda(metadata: Mapping[str, Any]) -> bool:
    """Whether a build needs NVIDIA's libraries on this machine."""
    from pip._vendor.packaging.requirements import Requirement

    asked = [Requirement(line) for line in metadata.get("requires_dist", [])]
    here = [each.name for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
    return any(name.startswith(("nvidia-", "cuda-")) for name in here)


def passed_over(index: str | None, one: Mapping[str, Any]) -> bool:
    """Whether a wheel on disk is taken, or one without a build's name although torch's index was asked: asking it again would only wait."""
    on_disk = str(one["download_info"]["url"]).startswith("file:")
    return on_disk or (index is not None and index.startswith(PAGES) and "+" not in str(one["metadata"]["version"]))


def size(url: str) -> int | None:
    """Bytes of a file, None if its server does not say."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_SIZE_S) as answer:
            return int(answer.headers["content-length"])
    except (OSError, http.client.HTTPException, TypeError, ValueError):
        return None


def sentence(one: Mapping[str, Any], wanted: str | None, bytes_: int | None) -> str:
    """Say what will be downloaded: package, index, size. `wanted`: the index that was to be used."""
    metadata, url = one["metadata"], str(one["download_info"]["url"])
    where = (
        f"on disk, in {Path(url).parent.as_posix().removeprefix('file:')}"
        if url.startswith("file:")
        else f"from {url.split('/')[2]}"
    )
    about = "size unknown" if bytes_ is None else f"{bytes_ / _MB:.0f} MB"
    text = f"torch {metadata['version']}, {where}: {about}"
    if asks_for_cuda(metadata):
        text += f", and NVIDIA's libraries: about {_LIBRARIES_GB} GB more"
        if wanted is not None:
            text += (
                f". {wanted} has no such torch or cannot be reached, so this is not the smaller build that was wanted"
            )
        elif platform.machine() == "x86_64":
            text += ". For the CPU alone, a tenth of it: make install TORCH_BUILD=cpu"
    return text


def main() -> None:
    """Ask pip what it would take, say so, install it."""
    parser = argparse.ArgumentParser(description="Install torch's build for this machine.")
    parser.add_argument(
        "--build", default="auto", help="auto, cpu, cuda (PyPI's), cu129 and the like, or an index's address"
    )
    parser.add_argument("--constraint", help="pip's file of versions")
    parser.add_argument("requirement", help="such as torch==2.13.0")
    given = parser.parse_args()
    index = index_of(given.build, has_gpu())
    words = ["--constraint", given.constraint] if given.constraint else []
    try:
        one = found(given.requirement, index, words)
        if one is None:
            return
        told = sentence(one, index, size(str(one["download_info"]["url"])))
        index = None if passed_over(index, one) else index
    except (subprocess.CalledProcessError, ValueError, LookupError, TypeError, ImportError):
        # a pip that fails or that we cannot read: the same command with pip's patience says why, if it fails again
        told = f"{given.requirement}, from {index or 'the index that pip is set to'}: size unknown"
    sys.stdout.write(f"{told}\n")
    sys.stdout.flush()
    command = [sys.executable, "-m", "pip", "install", "--quiet", *places(index), *words, given.requirement]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
